"""`Task`: a benchmark's examples, and how an answer to them is judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import transformers

Tokenizer: TypeAlias = "transformers.PreTrainedTokenizerBase"
"""Of transformers, which nobody has to load for its name."""


@dataclass(frozen=True)
class Question:
    """What is asked of a context."""

    text: str
    """What follows the context, verbatim: with all white space that stands between the two."""
    target: Any
    """What `Task.judge` compares an answer with; only the task knows its type."""
    prefix: str = ""
    """How the model's answer begins, given to it."""
    choices: tuple[str, ...] = ()
    """Continuations whose likelihoods are compared, instead of an answer that is generated."""


@dataclass(frozen=True)
class Example:
    """A context and what is asked of it."""

    id: str
    """The same in every run with the same data, settings and seed, and only this example's."""
    context: str
    """What can be compressed before a question is known; without one, the text that comes first."""
    questions: tuple[Question, ...]
    """At least one; each is asked of the same context."""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """What figures are drawn over, such as the depth of a needle."""


@dataclass(frozen=True)
class Generation:
    """How an answer is generated: `tokens` at most, ended by a text of `until`, which does not belong to it."""

    tokens: int
    until: tuple[str, ...] = ()


Reply = str | list[tuple[float, bool]]
"""A generated answer, or of every choice its log-likelihood and whether greedy decoding would say it."""


class Task(ABC):
    """A benchmark."""

    name: str
    """As it was asked for, with `@` and the length where a task has lengths: `niah_single_1@4096`."""
    metric: str
    """Which of the judge's scores tables show."""
    generation: Generation
    decodes: bool = False
    """Answers are long, and what a recipe is worth shows while decoding."""
    chat: bool = True
    """Whether it is asked in the model's chat template, where there is one."""

    @abstractmethod
    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """The first `limit` examples, or all; generated ones are drawn by the seed, whatever the limit."""

    @abstractmethod
    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """The reply's scores by name, from 0 to 1; higher is better."""
