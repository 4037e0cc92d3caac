"""RULER (Hsieh et al. 2024, arXiv:2404.06654): thirteen synthetic tasks at any length."""

from collections.abc import Callable, Sequence
from functools import partial

from keepset.bench.tasks.catalogue import Settings
from keepset.bench.tasks.data import seeded
from keepset.bench.tasks.fit import fit, measure, room
from keepset.bench.tasks.ruler_documents import read
from keepset.bench.tasks.ruler_draws import CommonWords, Draws, FrequentWords, Variables
from keepset.bench.tasks.ruler_files import draws_of
from keepset.bench.tasks.ruler_needles import Needles
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task, Tokenizer
from keepset.errors import KeepsetError

EXAMPLES = 500
"""So many there are where no limit is given: as in the paper."""

_TASKS: dict[str, tuple[int, Callable[[int, Settings], Draws]]] = {
    "niah_single_1": (128, lambda length, settings: Needles("noise")),
    "niah_single_2": (128, lambda length, settings: Needles("essays")),
    "niah_single_3": (128, lambda length, settings: Needles("essays", value="uuids")),
    "niah_multikey_1": (128, lambda length, settings: Needles("essays", keys=4)),
    "niah_multikey_2": (128, lambda length, settings: Needles("needles")),
    "niah_multikey_3": (128, lambda length, settings: Needles("needles", key="uuids", value="uuids")),
    "niah_multivalue": (128, lambda length, settings: Needles("essays", values=4)),
    "niah_multiquery": (128, lambda length, settings: Needles("essays", keys=4, queries=4)),
    "ruler_vt": (30, lambda length, settings: Variables()),
    "ruler_cwe": (120, lambda length, settings: CommonWords(length)),
    "ruler_fwe": (50, lambda length, settings: FrequentWords(length)),
    "ruler_qa_squad": (32, lambda length, settings: read("squad", settings.data)),
    "ruler_qa_hotpot": (32, lambda length, settings: read("hotpot", settings.data)),
}
NAMES = (*_TASKS, "ruler")
PARTS = {
    "needles": tuple(name for name in _TASKS if name.startswith("niah")),
    "aggregation": ("ruler_cwe", "ruler_fwe"),
    "QA": ("ruler_qa_squad", "ruler_qa_hotpot"),
}
"""Kinds of tasks, as KVCompose (section 4.1) shows them; there is one more, of the variables alone."""


def make(name: str, settings: Settings) -> list[Task]:
    """One task for every length; `ruler` is all thirteen."""
    names = list(_TASKS) if name == "ruler" else [name]
    return [RulerTask(one, length, settings) for one in names for length in settings.lengths]


class RulerTask(Task):
    """One of RULER's tasks at one length: tokens of the whole prompt, a chat template's and the answer's included.

    Prompts and answers are those of lm-evaluation-harness, made longer until they fill the length. The same index and
    seed have the same needles at every length.
    """

    def __init__(self, name: str, length: int, settings: Settings) -> None:
        self.name = f"{name}@{length}"
        self.metric, self._base = "match", name
        tokens, self._draws = _TASKS[name]
        self.generation = Generation(tokens)
        self._any = name.startswith("ruler_qa")
        self.length, self._settings = length, settings

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """The user's own, or such as are made. Made ones refuse a length that is too short.

        Questions whose own documents do not fit are left out.
        """
        own = draws_of(self._settings.data, self._base, self.length)
        if own is not None:
            return [self._made(index, *draw) for index, draw in enumerate(own[:limit])]
        draws = self._draws(self.length, self._settings)
        space = room(tokenizer, self.length, self.generation.tokens)
        examples: list[Example] = []
        count = partial(measure, tokenizer)
        index, guess, wanted = 0, None, EXAMPLES if limit is None else limit
        while len(examples) < wanted and index != draws.questions:
            make = partial(self._example, draws, index, seed)
            fitted = fit(make, count, space, smallest=draws.smallest, largest=draws.largest, guess=guess)
            if fitted is not None:
                guess, example = fitted
                examples.append(example)
            elif draws.questions is None or (index == draws.questions - 1 and not examples):
                least = count(make(draws.smallest)) + self.length - space
                raise KeepsetError(
                    f"{self.name} is too short: such an example takes {least} tokens with this tokenizer, its answer "
                    "and a chat template included; ask for a longer one."
                )
            index += 1
        return examples

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """The share of the answers that are in the reply, in any case; of several answers to a question one is enough.

        That is the paper's metric. lm-evaluation-harness asks for all answers to a question.
        """
        text = str(reply).lower()
        hits = [float(answer.lower() in text) for answer in question.target]
        return {"match": max(hits) if self._any else sum(hits) / len(hits)}

    def _example(self, draws: Draws, index: int, seed: int, size: int) -> Example:
        with seeded(f"{index} {seed}"):
            return self._made(index, *draws.draw(size, index, seed))

    def _made(self, index: int, context: str, question: Question) -> Example:
        return Example(str(index), context, (question,), {"length": self.length})
