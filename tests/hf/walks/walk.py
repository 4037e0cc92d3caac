"""One walk: random operations on caches, each of which is followed by all checks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import keepset
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf import layer_stack
from keepset.hf.batch import can_go_together, go_together
from keepset.hf.progress import Event
from tests.hf.models import GREEDY, allocated
from tests.hf.walks.draw import WHOLE, Plan, plan
from tests.hf.walks.reference import Row, are_nearest, feed, reference_model, round_to_8_bits
from tests.hf.walks.state import difference, saved_state, state

_TRUE_WARNINGS = {
    "keepset compresses nothing": lambda cache: not cache.managed_layers,
    "compilerkv has no tables": lambda cache: "compilerkv" in str(cache.recipe),
}
"""What keepset may warn of, and when it is true."""


_EXACT = ("match", "quantized", "uniform", "criticalkv")
"""Allocators under which every head keeps what the budget says."""
_INEXACT = {"zigzag", "dynamic", *WHOLE}


@dataclass
class Branch:
    """A cache and what the reference knows of it."""

    cache: keepset.Cache
    rows: list[Row]
    ids: Tensor
    valid: Tensor
    ends: list[int]
    prompt: int | None
    told: bool
    events: int = 0
    given: int = 0
    """How many of the first tokens a caller has given to `generate`, or has saved with the context."""
    idle: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Tokens so far, padding included."""
        return self.ids.shape[1]

    @property
    def complete(self) -> bool:
        """Whether the whole prompt is there."""
        return self.prompt is not None and self.columns >= self.prompt


class Walk:
    """One walk, which a text draws."""

    def __init__(self, seed: str, counts: Counter[str]) -> None:
        self.draw = Random(seed)
        self.tokens = torch.Generator().manual_seed(self.draw.getrandbits(32))
        self.plan: Plan = plan(self.draw)
        self.counts = counts
        self.trace: list[str] = []
        self.branches: list[Branch] = []
        self.recipe = keepset.Recipe.parse(self.plan.recipe)

    def run(self) -> None:
        """Go through all operations; whatever is raised is a fault."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with torch.no_grad():
                self._run()
        for warning in told:
            if "keepset" in str(warning.filename) and "tests" not in str(warning.filename):
                self._check_warning(str(warning.message))
        self.counts["walks"] += 1
        self.counts[f"model {self.plan.architecture}"] += 1

    def _run(self) -> None:
        self.model = self.plan.model
        self.reference = reference_model(self.plan.architecture, self.plan.half)
        try:
            cache = self.plan.cache(self.plan.prompt if self.plan.in_chunks else None)
        except KeepsetError as error:
            self._refused("make", error)
            return
        self.kept = tuple(cache.managed_layers)
        self.windowed = len(self.kept) < len(cache.layers)
        self.rewrites = self.recipe.method.stage > 0 and bool(self.kept)
        self.rounds = "quantized(" in self.plan.recipe and bool(self.kept)
        self.branches = [self._empty(cache)]
        operations: dict[str, tuple[float, Callable[[Branch], None]]] = {
            "feed": (8, self.feed),
            "decode": (8, self.decode),
            "generate": (2, self.generate),
            "crop": (3, self.crop),
            "fork": (1.5, self.fork),
            "reorder": (1.5, self.reorder),
            "save": (1.5, self.save),
            "ask": (1.5, self.ask),
            "misuse": (2, self.misuse),
            "trim": (0.5, self.trim),
            "together": (1, self.together),
            "reset": (0.4, self.reset),
        }
        names, weights = list(operations), [weight for weight, _ in operations.values()]
        try:
            self._do("feed", self.branches[0], self.feed)
        except UnsupportedModelError as error:
            if not ("rotates queries" in str(error) and self.plan.architecture == "stablelm"):
                raise
            self._refused("feed", error)
            return
        for _ in range(self.draw.randint(4, 16)):
            name = self.draw.choices(names, weights)[0]
            self._do(name, self.draw.choice(self.branches), operations[name][1])
            if any(branch.columns > 180 for branch in self.branches):
                break
        self._replay(self.draw.choice(self.branches))

    def _do(self, name: str, branch: Branch, operation: Callable[[Branch], None]) -> None:
        self.trace.append(f"{self.branches.index(branch)}: {name}")
        operation(branch)
        self.counts[f"operation {name}"] += 1
        for number, each in enumerate(self.branches):
            now = state(each.cache)
            where = each.idle and each is not branch and difference(each.idle, now)
            assert not where, f"{name} on branch {self.branches.index(branch)} has changed branch {number}: {where}"
            each.idle = now

    def _note(self, text: str) -> None:
        self.trace[-1] += f" {text}"

    # --- operations

    def feed(self, branch: Branch) -> None:
        """Some tokens at once: of the prompt all, or a chunk."""
        draw, rows = self.draw, len(branch.rows)
        if branch.columns == 0:
            n = draw.randint(1, self.plan.prompt + 6) if branch.told else self.plan.prompt
            n = self._not_too_far(branch, n)
            padding = [max(0, min(pad, n)) for pad in self._padding(branch)]
        else:
            n = self._not_too_far(branch, draw.choice([1, 2, draw.randint(1, 6), draw.randint(1, 25)]))
            padding = [draw.randint(0, n - 1) if draw.random() < 0.15 and rows > 1 else 0 for _ in range(rows)]
            if not branch.complete:
                padding = [min(max(pad - branch.columns, 0), n) for pad in self._padding(branch)]
        mask = torch.arange(n) >= torch.tensor(padding)[:, None]
        if branch.complete and rows > 1 and draw.random() < 0.05:
            mask &= torch.rand(rows, n, generator=self.tokens) < 0.7
        self._forward(branch, self._ids(rows, n, mask), mask)

    def decode(self, branch: Branch) -> None:
        if branch.columns == 0:
            return self.feed(branch)
        for _ in range(self.draw.randint(1, 6)):
            n = 1
            mask = torch.ones(len(branch.rows), n, dtype=torch.bool)
            if not branch.complete:
                mask = torch.tensor([[branch.columns >= pad] for pad in self._padding(branch)])
            self._forward(branch, self._ids(len(branch.rows), n, mask), mask)
        return None

    def generate(self, branch: Branch, asked: dict[str, Any] | None = None) -> None:
        """`model.generate` from here, also on a prompt that is not complete."""
        draw, rows = self.draw, len(branch.rows)
        n = new = draw.randint(1, 6)
        mask = torch.ones(rows, new, dtype=torch.bool)
        options: dict[str, Any] = {}
        if not branch.complete:
            n = new = self.plan.prompt - branch.columns
            mask = torch.arange(branch.columns, self.plan.prompt) >= torch.tensor(self._padding(branch))[:, None]
            if branch.columns == 0 and branch.told and draw.random() < 0.5:
                options["prefill_chunk_size"] = n = draw.randint(1, new)
        ids = self._ids(rows, new, mask)
        more = draw.randint(1, 8)
        while more > 1 and not self._may_pass(branch, branch.columns + new + more - 1, one_by_one=True):
            more -= 1
        if not self._may_pass(branch, branch.columns + new, one_by_one=True):
            return
        inputs = {
            "input_ids": torch.cat([branch.ids, ids], 1),
            "attention_mask": torch.cat([branch.valid, mask], 1).long(),
            "past_key_values": branch.cache,
        }
        self._note(f"{new} tokens and {more} more {options}")
        self._generate(branch, inputs, ids, mask, more, chunk=n, **options)

    def ask(self, branch: Branch) -> None:
        """Questions on a fork, which goes on as a branch of its own."""
        draw, rows = self.draw, len(branch.rows)
        n = draw.randint(1, 5)
        asked = draw.randint(1, 3) if rows == 1 else rows
        padding = torch.tensor([draw.choice([0, 0, draw.randint(0, n - 1)]) for _ in range(asked)])
        mask = torch.arange(n) >= padding[:, None]
        ids = self._ids(asked, n, mask)
        self._note(f"{asked} rows of {n} tokens")
        if not self.kept or not branch.complete:
            return self._refusal("ask", branch, lambda: branch.cache.ask(ids), "keepset has nothing|whole prompt")
        given = branch.cache.ask(ids, mask.long())
        twin = replace(branch, cache=given["past_key_values"], rows=list(branch.rows), ends=list(branch.ends), idle={})
        if asked != rows:
            twin.rows = twin.rows * asked
            twin.ids, twin.valid = twin.ids.expand(asked, -1), twin.valid.expand(asked, -1)
        more = draw.randint(1, 6)
        while more > 1 and not self._may_pass(twin, twin.columns + n + more - 1, one_by_one=True):
            more -= 1
        if self._may_pass(twin, twin.columns + n, one_by_one=True):
            self._generate(twin, given, ids, mask, more)
            self._join(twin)
        return None

    def crop(self, branch: Branch) -> None:
        """Takes tokens back, those that may be taken back or more."""
        if not self.kept:
            return self._note("nothing is compressed")
        length, at = branch.columns, branch.cache.progress.compressed_at if branch.cache.progress else None
        most = length - (at or 0)
        if self.draw.random() < 0.2 and at:
            removed = most + self.draw.randint(1, at)
            self._note(f"{removed} of {most} that may be")
            self._refusal("crop", branch, lambda: branch.cache.crop(-removed), "can be taken back")
            return None
        removed = self.draw.randint(0, min(most, 12))
        if removed == length:
            removed -= 1
        self._note(f"{removed}")
        if removed <= 0:
            return None
        call = lambda: branch.cache.crop(-removed if self.draw.random() < 0.7 else length - removed)  # noqa: E731
        refused = "|".join(["added up"] * bool(self.recipe.schedule.every) + ["cannot take back"] * self.windowed)
        if not branch.complete and self.recipe.schedule.prefill and self.recipe.method.traits.needs:
            return self._refusal("crop", branch, call, "incomplete")
        if not self._attempt("crop", branch, call, refused):
            return None
        length -= removed
        branch.rows = [row.without(length) for row in branch.rows]
        branch.ids, branch.valid = branch.ids[:, :length], branch.valid[:, :length]
        branch.ends = [end for end in branch.ends if end < length] + [length]
        known = branch.cache.progress.known
        branch.given = min(branch.given, length) if known is not None else 0
        self._check(branch)
        return None

    def fork(self, branch: Branch) -> None:
        cache = branch.cache.fork() if self.draw.random() < 0.7 else copy.deepcopy(branch.cache)
        twin = replace(branch, cache=cache, rows=list(branch.rows), ends=list(branch.ends))
        where = difference(state(branch.cache), state(twin.cache))
        assert not where, f"a fork differs: {where}"
        self._check(twin)
        self._join(twin)

    def reorder(self, branch: Branch) -> None:
        draw, rows, cache = self.draw, len(branch.rows), branch.cache
        kind = draw.choice(["reorder", "select", "select by mask", "repeat"])
        order = [draw.randrange(rows) for _ in range(rows)]
        if kind == "select":
            order = [draw.randrange(rows) for _ in range(draw.randint(1, 3))]
        elif kind == "select by mask":
            order = sorted({draw.randrange(rows) for _ in range(rows)})
        elif kind == "repeat":
            order = [row for row in range(rows) for _ in range(draw.randint(1, 2) if rows == 1 else 1)]
        self._note(f"{kind} {order}")
        chosen = torch.tensor(order)
        if kind == "select by mask":
            chosen = torch.tensor([row in order for row in range(rows)])
        calls: dict[str, Callable[[], None]] = {
            "reorder": lambda: cache.reorder_cache(chosen),
            "repeat": lambda: cache.batch_repeat_interleave(len(order) // rows),
        }
        call = calls.get(kind, lambda: cache.batch_select_indices(chosen))
        refused = "" if branch.complete or not branch.columns else "before its prompt is complete"
        if not branch.columns or not self._attempt("reorder", branch, call, refused):
            return
        branch.rows = [branch.rows[row] for row in order]
        branch.ids, branch.valid = branch.ids[order], branch.valid[order]
        self._check(branch)

    def save(self, branch: Branch) -> None:
        """Saved and loaded, and loaded again into the branch's place."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "context.safetensors"
            if not branch.complete or not self.kept:
                self._refusal("save", branch, lambda: branch.cache.save(path), "whole prompt|keepset has nothing")
                assert not path.exists(), "a save that was refused has left a file"
                return
            known = len(branch.rows) == 1 and branch.cache.progress.valid is None and self.draw.random() < 0.5
            branch.cache.save(path, token_ids=branch.ids[0].tolist() if known else None)
            loaded = keepset.Cache.load(path, self.model)
        loaded.history = self.plan.history
        assert str(loaded.recipe) == str(self.recipe), f"it was loaded with the recipe {loaded.recipe}"
        where = difference(saved_state(branch.cache), saved_state(loaded))
        assert not where, f"what is loaded differs: {where}"
        assert allocated(loaded) == loaded.nbytes, f"{loaded.nbytes} bytes are reported of {allocated(loaded)}"
        twin = replace(branch, cache=loaded, rows=list(branch.rows), ends=list(branch.ends), idle={})
        twin.events, twin.given = len(loaded.events), branch.columns if known else 0
        self._check(twin)
        if self.draw.random() < 0.5:
            branch.cache, branch.events, branch.given = loaded, twin.events, twin.given
        else:
            self._join(twin)

    def reset(self, branch: Branch) -> None:
        branch.cache.reset()
        fresh = self._empty(branch.cache)
        for name in ("rows", "ids", "valid", "ends", "prompt", "told", "events", "given"):
            setattr(branch, name, getattr(fresh, name))
        left = sum(layer.nbytes for layer in branch.cache.managed_layers.values())
        assert not (left or branch.cache.events or branch.cache.get_seq_length()), f"{left} bytes are left"
        self.feed(branch)

    def trim(self, branch: Branch) -> None:
        branch.cache.trim()
        if branch.columns:
            stores = [layer.store for layer in branch.cache.managed_layers.values() if layer.store is not None]
            assert all(store.nbytes == store.entries_nbytes for store in stores), "there are free places after a trim"
            self._check(branch)

    def together(self, branch: Branch) -> None:
        """All branches of one request without padding go on side by side."""
        alone = [each for each in self.branches if len(each.rows) == 1 and bool(each.valid.all()) and each.complete]
        if not alone or not can_go_together(self.model):
            return
        n = self.draw.choice([1, 1, 3])
        alone = [each for each in alone if self._may_pass(each, each.columns + n)]
        if not alone:
            return
        self._note(f"{n} tokens of {len(alone)}")
        ids = self._ids(len(alone), n, torch.ones(len(alone), n, dtype=torch.bool))
        logits, errors = go_together(self.model, [each.cache for each in alone], ids)
        self.counts["forwards"] += 1
        if errors:
            raise next(iter(errors.values()))
        for row, each in enumerate(alone):
            mask = torch.ones(1, n, dtype=torch.bool)
            self._follow(each, ids[row : row + 1], mask, logits[row : row + 1, None])
            self._check(each)
            each.idle = {}

    def misuse(self, branch: Branch) -> None:
        """What is refused, and changes nothing."""
        if not branch.columns or not self.kept:
            return
        rows, columns = len(branch.rows), branch.columns
        kind = self.draw.choice(["too many rows", "a short mask", "positions again", *["another text"] * 2])
        self._note(kind)
        if kind == "another text":
            return self._another_text(branch)
        if self.windowed and kind == "positions again":
            return self._note("is noticed by the first layer without a window, too late for those before it")
        n, rows = 2, rows + (kind == "too many rows")
        first, covered, words = {
            "too many rows": (columns, columns + n, "requests"),
            "a short mask": (columns, n, "attention mask covers"),
            "positions again": (0, columns + n, "repeats positions"),
        }[kind]
        ids, positions = self._ids(rows, n, None), torch.arange(first, first + n).expand(rows, -1)
        inputs = dict(position_ids=positions, past_key_values=branch.cache, use_cache=True)
        mask = torch.ones(rows, covered, dtype=torch.long)
        if kind == "positions again":
            mask[:, :columns] = branch.valid
        return self._refusal(kind, branch, lambda: self.model(ids, attention_mask=mask, **inputs), words)

    def _another_text(self, branch: Branch) -> None:
        """A text that begins with other tokens than were given before, padding aside."""
        if not branch.given:
            self.generate(branch)
        given = branch.valid[:, : branch.given].nonzero().tolist()
        if not given:
            return self._note("nothing is known of it")
        row, column = self.draw.choice(given)
        ids = torch.cat([branch.ids, self._ids(len(branch.rows), 2, None)], 1)
        ids = torch.where(torch.cat([branch.valid, ids[:, -2:] > 0], 1), ids, self.draw.randint(0, 199))
        ids[row, column] = 3 + (ids[row, column] - 2) % 197
        mask = torch.cat([branch.valid, ids[:, -2:] > 0], 1).long()
        inputs = dict(input_ids=ids, attention_mask=mask, past_key_values=branch.cache, max_new_tokens=1)
        self._refusal("another text", branch, lambda: self.model.generate(**inputs, **GREEDY), "begins with others")

    # --- parts of operations

    def _empty(self, cache: keepset.Cache) -> Branch:
        rows = len(self.plan.padding)
        none = torch.empty(rows, 0, dtype=torch.long)
        told = cache.prompt_length is not None
        return Branch(cache, [Row() for _ in range(rows)], none, none.bool(), [], cache.prompt_length, told)

    def _join(self, branch: Branch) -> None:
        """The branch is one more, or takes another's place."""
        if len(self.branches) < 3:
            self.branches.append(branch)
        else:
            self.branches[self.draw.randrange(3)] = branch

    def _padding(self, branch: Branch) -> list[int]:
        """Of each request; a batch may have been changed before its prompt was complete."""
        if branch.columns == 0 or len(branch.rows) == len(self.plan.padding):
            return list(self.plan.padding)
        return [0] * len(branch.rows)

    def _ids(self, rows: int, n: int, mask: Tensor | None) -> Tensor:
        ids = torch.randint(3, 200, (rows, n), generator=self.tokens)
        return ids if mask is None else ids * mask

    def _passed(self, branch: Branch, end: int, *, one_by_one: bool = False) -> list[int]:
        """Lengths at which there are events up to this one; of tokens that come together, the newest alone."""
        start, prompt, schedule = branch.columns, branch.prompt or self.plan.prompt, self.recipe.schedule
        if not self.kept:
            return []
        points = [prompt] if schedule.prefill and start < prompt <= end else []
        if schedule.every is not None:
            later = [p for p in range(prompt + schedule.every, end + 1, schedule.every) if p > start]
            points += later if one_by_one else later[-1:]
        return points

    def _may_pass(self, branch: Branch, end: int, *, one_by_one: bool = False) -> bool:
        """Whether the reference can know what every event up to there has kept, and stored."""
        points = self._passed(branch, end, one_by_one=one_by_one)
        return len(points) <= 1 or (self.plan.history and not self.rewrites)

    def _not_too_far(self, branch: Branch, n: int) -> int:
        """As many tokens, or fewer where they would be drafts that are refused, or where the reference lost track."""
        prompt = branch.prompt or self.plan.prompt
        if branch.columns < prompt < branch.columns + n and branch.cache._no_drafts:
            n = prompt - branch.columns
        while n > 1 and not self._may_pass(branch, branch.columns + n):
            n -= 1
        return n

    def _forward(self, branch: Branch, ids: Tensor, mask: Tensor) -> None:
        valid = torch.cat([branch.valid, mask], 1)
        options: dict[str, Any] = {}
        if not valid.all() or self.draw.random() < 0.5:
            positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
            options = {"attention_mask": valid.long(), "position_ids": positions[:, -ids.shape[1] :]}
        self._note(f"[{ids.shape[1]}{'' if mask.all() else ' ' + str(mask.long().tolist())}]")
        output = self.model(ids, past_key_values=branch.cache, use_cache=True, **options)
        self.counts["forwards"] += 1
        self._follow(branch, ids, mask, output.logits)
        self._check(branch)

    def _generate(
        self,
        branch: Branch,
        inputs: dict[str, Any],
        ids: Tensor,
        mask: Tensor,
        more: int,
        chunk: int = 0,
        **options: Any,
    ) -> None:
        output = self.model.generate(**inputs, max_new_tokens=more, **GREEDY, **options)
        if inputs["input_ids"].shape[1] == inputs["attention_mask"].shape[1]:
            branch.given = inputs["input_ids"].shape[1]
        said, logits = output.sequences[:, -more:], torch.stack(output.logits, 1)
        n = ids.shape[1]
        chunks = range(0, n, chunk) if "prefill_chunk_size" in options else [0]
        for start in chunks:
            part = slice(start, start + chunk if len(chunks) > 1 else n)
            last = start == chunks[-1]
            self._follow(branch, ids[:, part], mask[:, part], logits[:, :1] if last else None)
        for step in range(more - 1):
            token = said[:, step : step + 1]
            self._follow(branch, token, torch.ones_like(token).bool(), logits[:, step + 1 : step + 2])
        self.counts["forwards"] += len(chunks) + more - 1
        self._check(branch)

    def _attempt(self, kind: str, branch: Branch, call: Callable[[], Any], words: str) -> bool:
        """Whether it was done; if there are `words`, it may be refused with them."""
        if words:
            before = state(branch.cache)
        try:
            call()
        except KeepsetError as error:
            if not words or not any(word in str(error) for word in words.split("|")):
                raise
            self._refused(kind, error)
            where = difference(before, state(branch.cache))
            assert not where, f"{kind} was refused, and has changed {where}"
            return False
        return True

    def _refusal(self, kind: str, branch: Branch, call: Callable[[], Any], words: str) -> None:
        assert not self._attempt(kind, branch, call, words), f"{kind} was not refused"

    def _refused(self, kind: str, error: KeepsetError) -> None:
        self.counts[f"refused {kind}: {str(error)[:90]}"] += 1
        if self.trace:
            self._note("(refused)")

    # --- the reference follows

    def _follow(self, branch: Branch, ids: Tensor, mask: Tensor, logits: Tensor | None) -> None:
        """The reference takes the forward that the cache has taken, and compares logits of its last tokens."""
        start, end = branch.columns, branch.columns + ids.shape[1]
        branch.prompt = branch.prompt or end
        points = self._passed(branch, end)
        events = branch.cache.events[branch.events : branch.events + len(points)]
        assert [event.length for event in events] == points, f"{events} instead of events at {points}"
        by_length = {event.length: event for event in events}
        cuts = [start, branch.prompt, end] if start < branch.prompt < end and branch.prompt in points else [start, end]
        expected, guessed = [torch.full((ids.shape[1], 200), float("nan")) for _ in branch.rows], False
        for first, last in pairwise(cuts):
            for r, row in enumerate(branch.rows):
                columns = [c for c in range(first, last) if mask[r, c - start]]
                if columns:
                    own = [int(ids[r, c - start]) for c in columns]
                    branch.rows[r], made, rounded = feed(
                        self.reference, row, own, columns, self._stored(branch, r, start)
                    )
                    expected[r][[c - start for c in columns]] = made
                    guessed |= rounded
            for point in points:
                if last == point == branch.prompt or (last == end and point != branch.prompt):
                    self._event(branch, by_length[point], point)
        branch.ids, branch.valid = torch.cat([branch.ids, ids], 1), torch.cat([branch.valid, mask], 1)
        branch.ends.append(end)
        branch.events += len(points)
        self.counts["events"] += len(points)
        if logits is not None:
            for r in range(len(branch.rows)):
                there = mask[r, -logits.shape[1] :]
                self._compare(logits[r][there].float(), expected[r][-logits.shape[1] :][there], guessed)

    def _compare(self, logits: Tensor, expected: Tensor, guessed: bool) -> None:
        if not logits.numel():
            return
        assert bool(logits.isfinite().all()), "logits are not finite"
        size = float(expected.abs().max())
        gap = float((logits - expected).abs().max())
        bound = 0.1 * size if self.plan.half or guessed else 1e-4 + 1e-4 * size
        assert gap <= bound, f"logits of up to {size:.2f} differ by {gap:.6f}"

    def _stored(self, branch: Branch, request: int, start: int) -> dict[int, Any]:
        """Of recipes that round, what is stored of every position."""
        if not self.rounds:
            return {}
        found: dict[int, Any] = {}
        # At an event with a window new values are fitted to what came in its forward, too. Keys stay as they are.
        fits = any(getattr(step, "window", 0) for step in self.recipe.method.steps() if step.name == "match")
        fitted = fits and (branch.cache.progress.compressed_at or 0) > start
        for index, layer in branch.cache.managed_layers.items():
            columns, exists = layer.store.padded()
            heads = []
            for head in range(exists.shape[1]):
                there = exists[request, head]
                at, keys, values = (columns[name][request, head][there] for name in ("positions", "keys", "values"))
                rows = zip(at, keys, values, strict=True)
                heads.append({int(p): (key, None if fitted else value) for p, key, value in rows})
            found[index] = heads
        return found

    def _event(self, branch: Branch, event: Event, point: int) -> None:
        """The reference drops what the event says, which must be what the recipe foresees in number."""
        kept = event.keep_set
        assert kept is not None and kept.layers == self.kept, f"{kept} of layers {self.kept}"
        total = 0
        for r, row in enumerate(branch.rows):
            until = row.before(point)
            held = {index: row.layers[index].seen[:, :until].sum(-1).tolist() for index in self.kept}
            total += sum(map(sum, held.values()))
            of = {index: [kept.positions(index, r, head) for head in range(len(held[index]))] for index in self.kept}
            for index, heads in of.items():
                for head, positions in enumerate(heads):
                    self._check_always(row, until, index, head, positions, branch)
            self._check_numbers(held, {i: [len(p) for p in heads] for i, heads in of.items()}, row, until, branch)
            after = row.kept(of, point)
            branch.rows[r] = self._adopted(after, branch, r, until) if self.rewrites else after
        assert event.entries == total and event.kept == kept.entries, f"{event} of {total} entries"

    def _adopted(self, row: Row, branch: Branch, request: int, until: int) -> Row:
        """With values and biases as they are stored, where the recipe changes them; rounded, if it rounds."""
        layers = dict(row.layers)
        for index, kept in branch.cache.managed_layers.items():
            columns, exists = kept.store.padded()
            layer = layers[index]
            keys, values, bias = layer.keys.clone(), layer.values.clone(), layer.bias.clone()
            for head in range(exists.shape[1]):
                there = exists[request, head]
                at = columns["positions"][request, head][there].long()
                there = there.nonzero()[:, 0][at < until]
                at = at[at < until]
                if self.rounds:
                    keys[head, at] = columns["keys"][request, head, there]
                values[head, at] = columns["values"][request, head, there]
                if "bias" in columns:
                    bias[head, at] = columns["bias"][request, head, there]
            if self.rounds:
                self._check_rounded(layer.keys, keys)
                if "match(" not in self.plan.recipe:
                    self._check_rounded(layer.values, values)
                keys[:, until:], values[:, until:] = (
                    torch.where((x == y).all(-1, keepdim=True), round_to_8_bits(y), x)
                    for x, y in ((keys[:, until:], layer.keys[:, until:]), (values[:, until:], layer.values[:, until:]))
                )
            layers[index] = replace(layer, keys=keys, values=values, bias=bias)
        return replace(row, layers=layers, rounded=self.rounds)

    def _check_rounded(self, own: Tensor, stored: Tensor) -> None:
        assert are_nearest(stored, own), "what is stored in 8 bits is not the nearest number"

    def _always(self, row: Row, until: int, branch: Branch) -> set[int]:
        budget = self.recipe.budget
        always = {*range(min(budget.sinks, until)), *range(max(0, until - budget.recent), until)}
        for first, end in budget.protect:
            always |= {*range(min(first, until), min(end, until))}
        return always | {*range(row.before(branch.prompt or 0) if budget.protect_prompt else 0)}

    def _check_always(self, row: Row, until: int, index: int, head: int, positions: Tensor, branch: Branch) -> None:
        missing = self._always(row, until, branch) - {*positions.tolist()}
        assert not missing, f"layer {index}, head {head} has dropped {sorted(missing)}, which always stay"

    def _check_numbers(
        self, held: dict[int, list[int]], kept: dict[int, list[int]], row: Row, until: int, branch: Branch
    ) -> None:
        """As many entries stay as the budget says: in every head, or in all together."""
        method, budget = self.recipe.method, self.recipe.budget
        if budget.keep is None:
            return
        always = len(self._always(row, until, branch))
        floor = always if isinstance(budget.keep, float) or budget.protect or budget.protect_prompt else 0

        def quota(n: int) -> int:
            wanted = int(budget.keep * n + 1e-9) if isinstance(budget.keep, float) else budget.keep
            return min(max(wanted, floor, 1), n)

        foreseen = {index: [quota(n) for n in heads] for index, heads in held.items()}
        steps = list(method.steps())
        names = {step.name for step in steps}
        plain = all(step.name in _EXACT or step.family == "scorer" for step in steps) and not names & _INEXACT
        assert not plain or kept == foreseen, f"{kept} entries stay, and the budget foresees {foreseen}"

    # --- what holds at any time

    def _check(self, branch: Branch) -> None:
        """The cache holds exactly what the reference has not dropped, and says so."""
        cache, columns = branch.cache, branch.columns
        lengths = {layer.get_seq_length() for layer in cache.layers}
        assert lengths == {columns} == {cache.get_seq_length()}, (
            f"layers say {lengths}, and there were {columns} tokens"
        )
        assert len(cache.events) == branch.events, f"{len(cache.events)} events, and there were {branch.events}"
        assert not (cache._waiting or cache._unfinished), "layers wait after a forward"
        for index, layer in cache.managed_layers.items():
            self._check_layer(branch, index, layer.store)
        collecting = any(layer.prompt is not None for layer in cache.managed_layers.values())
        reported, there = cache.nbytes, allocated(cache)
        assert reported == there or collecting, f"{reported} bytes are reported, and {there} are allocated"
        repr(cache)

    def _check_layer(self, branch: Branch, index: int, store: Any) -> None:
        columns, exists = store.padded()
        assert sum(store.counts) == store.entries, f"layer {index} holds {store.entries} entries"
        assert store.batch == len(branch.rows), f"layer {index} holds {store.batch} requests"
        loose = self.plan.half or self.rounds
        for r, row in enumerate(branch.rows):
            if not row.layers:
                continue
            layer = row.layers[index]
            for head in range(store.kv_heads):
                there = exists[r, head]
                at = columns["positions"][r, head][there].long()
                where, right = f"layer {index}, request {r}, head {head}", layer.seen[head].nonzero()[:, 0].tolist()
                assert at.tolist() == right, f"{where} holds {at.tolist()} and not {right}"
                for name, own in (("keys", layer.keys), ("values", layer.values)):
                    gap = float((columns[name][r, head][there].float() - own[head, at]).abs().max()) if len(at) else 0.0
                    close = gap <= (0.1 if loose else 1e-4) * (1 + float(own.abs().max()))
                    assert close, f"{where}: {name} differ by {gap}"

    def _replay(self, branch: Branch) -> None:
        """A request of the branch alone, from its first token on without detours, keeps the same.

        Layers are chosen from together or one after another; and tokens come in other chunks, as far as no other events
        follow from that.
        """
        if not branch.complete or not self.kept or self.plan.half or self.rounds or not branch.cache.events:
            return
        r = self.draw.randrange(len(branch.rows))
        self.trace.append(f"{self.branches.index(branch)}: replay of request {r}")
        ids, valid, prompt = branch.ids[r : r + 1], branch.valid[r : r + 1], branch.prompt or 0
        strip = int(valid[0].long().argmax()) if self.draw.random() < 0.7 else 0
        # Not at events: tokens that follow one in the same forward have looked at what it drops.
        ends = set(branch.ends)
        if self.draw.random() < 0.5:
            last = branch.columns if self.recipe.schedule.every is None else prompt
            ends |= {self.draw.randint(1, last) for _ in range(2)}
        ends = sorted(end - strip for end in ends if end > strip)
        told = ends[0] != prompt - strip or self.draw.random() < 0.5
        cache = self.plan.cache(prompt - strip if told else None)
        cache.history = True
        ids, valid = ids[:, strip:], valid[:, strip:]
        positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
        workspace = self.draw.choice([0, layer_stack._WORKSPACE])
        with patch.multiple(layer_stack, _WORKSPACE=workspace, CACHE_BLOCK=self.draw.choice([1, 1 << 18])):
            for start, end in zip([0, *ends], ends, strict=False):
                inputs = dict(attention_mask=valid[:, :end].long(), position_ids=positions[:, start:end])
                self.model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs)
        alone = {event.length + strip: event.keep_set for event in cache.events}
        self.counts["replays"] += 1
        for length, kept in branch.rows[r].events:
            assert length in alone, f"alone there are events at {sorted(alone)}, and not at {length}"
            differs = sum(
                len(set(positions.tolist()) ^ set(alone[length].positions(index, 0, head).tolist()))
                for index, heads in kept.items()
                for head, positions in enumerate(heads)
            )
            assert differs <= 12, f"alone the event at {length} keeps {differs // 2} other entries"
            if differs:
                self.counts["ties"] += 1
                return

    def _check_warning(self, message: str) -> None:
        for words, is_true in _TRUE_WARNINGS.items():
            if words in message and is_true(self.branches[0].cache):
                return
        raise AssertionError(f"keepset warns: {message}")
