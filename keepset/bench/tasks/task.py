"""`Task`: a benchmark's examples, and how an answer to them is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Question:
    """What is asked of a context.

    Attributes:
        text: what follows the context, verbatim: with all white space that stands between the two.
        target: what `Task.judge` compares an answer with; only the task knows its type.
        prefix: how the model's answer begins, given to it.
        choices: continuations whose likelihoods are compared, instead of an answer that is generated.
    """

    text: str
    target: Any
    prefix: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A context and what is asked of it.

    Attributes:
        id: the same in every run with the same data, settings and seed, and only this example's.
        context: the text that can be compressed before a question is known; without one, the text that comes first.
        questions: at least one; each is asked of the same context.
        facts: what figures are drawn over, such as the depth of a needle.
    """

    id: str
    context: str
    questions: tuple[Question, ...]
    facts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """How an answer is generated.

    Attributes:
        tokens: at most so many.
        until: texts that end an answer and do not belong to it, beside the model's own end.
    """

    tokens: int
    until: tuple[str, ...] = ()


Reply = str | list[tuple[float, bool]]
"""A generated answer, or of every choice its log-likelihood and whether greedy decoding would say it."""


class Task(ABC):
    """A benchmark.

    Attributes:
        name: as it was asked for, with `@` and the length where a task has lengths: `niah_single_1@4096`.
        metric: which of the judge's scores tables show.
        generation: how answers are generated.
        decodes: answers are long, and what a recipe is worth shows while decoding.
    """

    name: str
    metric: str
    generation: Generation
    decodes: bool = False

    @abstractmethod
    def examples(
        self, tokenizer: transformers.PreTrainedTokenizerBase, *, limit: int | None = None, seed: int = 0
    ) -> Sequence[Example]:
        """The first `limit` examples, or all; generated ones are drawn by the seed, whatever the limit.

        Raises:
            KeepsetError: the data are missing or damaged.
        """

    @abstractmethod
    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """The reply's scores by name, from 0 to 1; higher is better."""
