"""A server whose contexts' files are damaged before and after they were used.

It answers as the whole file would, or with 400 and a sentence; and whoever asks for something else is served.
`python -m tests.vllm.test_damaged_files --minutes 60 --seed 1` goes on by hand.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import keepset
from tests.hf.damage import damaged, flipped
from tests.proof import by_hand, take_steps
from tests.vllm.served import save_model, served

pytestmark = pytest.mark.full
RECIPE = "adakv(snapkv(window=8), keep=40, every=16)"
CONTEXTS = {"equal": "knorm(keep=0.5)", "ragged": "adakv(snapkv(window=8), keep=0.5)", "goes on": RECIPE}
TEXT = list(range(300, 550))
QUESTION, ANSWER = list(range(900, 910)), 4
STEPS = 100


class Proof:
    """Damages files of a server's folder, and asks for them."""

    def __init__(self, client: httpx.Client, folder: Path, whole: dict[str, bytes]) -> None:
        self._client, self._folder, self._whole = client, folder, whole
        self.counts: Counter[str] = Counter()
        for name, content in whole.items():
            (folder / f"{name}.safetensors").write_bytes(content)
        self._right = {name: self._asked(name) for name in whole}
        answers = {str(self._asked(name)) for name in [*whole, None]}
        assert len(answers) == len(whole) + 1, "answers do not tell contexts apart"

    def step(self, seed: str) -> None:
        """Damage one file by this seed, and ask for it."""
        draw = random.Random(seed)
        kind = draw.choice(["before", "before", "after", "after", "bit", "place"])
        getattr(self, f"_{kind}")(draw)
        listing = self._client.get("/v1/contexts")
        assert listing.status_code == 200 and {each["id"] for each in listing.json()["data"]} >= {"equal", "ragged"}
        other = draw.choice(["equal", "ragged"])
        found = self._asked(other)
        assert found == self._right[other], f"{other} is not served as before: {found} for {self._right[other]}"
        assert self._asked(None)
        self.counts[kind] += 1
        self.counts["steps"] += 1

    def _before(self, draw: random.Random) -> None:
        """A file that was damaged before anybody asked for it."""
        name = draw.choice(list(self._whole))
        what, content, sealed = damaged(self._whole[name], draw)
        path = self._folder / f"new {self.counts['steps']}.safetensors"
        path.write_bytes(content)
        self._check(path, name, what, sealed or content == self._whole[name])

    def _after(self, draw: random.Random) -> None:
        """A file that was used and is damaged then, with its date unchanged; its pages may be there or not."""
        name = draw.choice(list(self._whole))
        path = self._used(name)
        stat = path.stat()
        what, content, sealed = damaged(self._whole[name], draw)
        path.write_bytes(content)
        if draw.random() < 0.7:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if draw.random() < 0.7:
            self._forget()
        self._check(path, name, what, sealed or content == self._whole[name])

    def _bit(self, draw: random.Random) -> None:
        """One bit flips of what is read again, unless it is remembered; nothing else of the file changes."""
        name = draw.choice(list(self._whole))
        path = self._used(name)
        stat, layer = path.stat(), draw.randrange(2)
        tensor = draw.choice(["counts", "columns.keys", "columns.values", "columns.positions"])
        with path.open("r+b") as file:
            file.write(flipped(self._whole[name], f"layers.{layer}.{tensor}"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        self._forget()
        self._check(path, name, f"a bit of {tensor}", False)

    def _place(self, draw: random.Random) -> None:
        """Something else is where a file belongs, or a folder of saved contexts."""
        name = draw.choice(list(self._whole))
        path, saved = self._used(name), self._folder / "saved"
        what = draw.choice(["gone", "folder", "pipe", "loop", "nowhere", "device", "unreadable", "saved", "owner"])
        if what == "unreadable":
            path.chmod(0)
        elif what in ("saved", "owner"):
            shutil.rmtree(saved, ignore_errors=True)
            if what == "owner":
                saved.mkdir()
            (saved if what == "saved" else saved / draw.choice(["everybody", ".unfinished"])).write_text("a file")
        else:
            instead_of(path, what)
        if draw.random() < 0.5:
            self._forget()
        self.counts[f"place: {what}"] += 1
        assert self._asked(path.stem, save=draw.random() < 0.3) in (None, self._right[name]), what
        body = {"prompt": TEXT[:70], "keepset": {"save": "mine"}, "max_tokens": 2, "temperature": 0}
        assert self._posted(body).status_code == 200
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        for file in [saved, *saved.glob("*")]:
            if file.is_file():
                file.unlink()

    def _used(self, name: str) -> Path:
        """A copy of a file that the server has answered from."""
        path = self._folder / f"used {self.counts['steps']}.safetensors"
        path.write_bytes(self._whole[name])
        assert self._asked(path.stem) == self._right[name]
        return path

    def _check(self, path: Path, name: str, what: str, excused: bool) -> None:
        found = self._asked(path.stem)
        assert excused or found in (None, self._right[name]), f"{what} gave another answer"
        self.counts["refused" if found is None else "answered"] += 1
        path.unlink()

    def _forget(self) -> None:
        assert self._client.post("/reset_prefix_cache").status_code == 200

    def _asked(self, context: str | None, save: bool = False) -> list[int] | None:
        """The answer's tokens; None where it is refused with a sentence."""
        body: dict[str, Any] = {"prompt": QUESTION, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        if context is not None:
            body["keepset"] = {"context": context, **({"save": "mine"} if save else {})}
        answer = self._posted({**body, "return_token_ids": True})
        assert answer.status_code in (200, 400), f"{answer.status_code} {answer.text}"
        assert str(self._folder) not in answer.text, answer.text
        if answer.status_code == 400:
            assert context is not None and answer.json()["error"]["message"].endswith("."), answer.text
            return None
        tokens = answer.json()["choices"][0]["token_ids"]
        assert len(tokens) == ANSWER
        return [int(token) for token in tokens]

    def _posted(self, body: dict[str, Any]) -> httpx.Response:
        return self._client.post("/v1/completions", json={"model": "tiny", **body})


def instead_of(path: Path, what: str) -> None:
    """Put something in the place of a file."""
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what != "gone":
        path.symlink_to({"loop": path, "nowhere": path.with_name("nothing"), "device": "/dev/zero"}[what])


def prove(seed: int, steps: range, minutes: float | None = None, show: bool = False) -> Counter[str]:
    """Start a server and take steps, as `take_steps` says; return what was counted."""
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "contexts"
        save_model(model, initializer_range=0.3)  # so that answers depend on all that it attends to
        folder.mkdir()
        whole = written(model, folder)
        more: dict[str, Any] = {"contexts": folder, "save_bytes": 10**6, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
        with served(model, RECIPE, **more) as (server, client):
            proof = Proof(client, folder, whole)
            try:
                take_steps(proof.step, proof.counts, seed, steps, minutes, show)
            except AssertionError as error:
                raise AssertionError("\n".join([str(error), *server.last_lines()])) from error
            return proof.counts


@torch.no_grad()
def written(model: Path, folder: Path) -> dict[str, bytes]:
    """The contents of whole files."""
    loaded, whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), {}
    for name, recipe in CONTEXTS.items():
        cache = keepset.Cache(loaded, recipe)
        loaded(torch.tensor([TEXT]), past_key_values=cache)
        cache.save(folder / "whole", force=True)
        whole[name] = (folder / "whole").read_bytes()
    (folder / "whole").unlink()
    return whole


def test_damaged_files_are_refused_and_nobody_else_notices() -> None:
    counts = prove(1, range(STEPS))
    assert counts["steps"] == STEPS and counts["refused"] > counts["answered"] > 0


if __name__ == "__main__":
    by_hand(lambda seed, steps, minutes: prove(seed, steps, minutes, show=True))
