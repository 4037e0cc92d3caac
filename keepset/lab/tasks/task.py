"""`Task`: a benchmark's examples, and how answers to them are judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    import transformers

Tokenizer: TypeAlias = "transformers.PreTrainedTokenizerBase"
"""A tokenizer of transformers; the name does not import transformers."""


@dataclass(frozen=True)
class TaskSettings:
    """The settings of tasks: a user's folder with `<task>.jsonl`, and lengths of prompts in tokens."""

    data: Path | None = None
    lengths: tuple[int, ...] = (4096,)

    def __post_init__(self) -> None:
        if self.data is not None and not self.data.is_dir():
            raise KeepsetError(f"There is no folder {str(self.data)!r} to take data from: give one that exists.")
        if not self.lengths or min(self.lengths) < 1:
            raise KeepsetError(f"lengths={self.lengths} are no lengths in tokens: give whole numbers such as 4096.")


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    text: str
    """The text that follows the context, verbatim, with all white space between the two."""
    target: Any
    """The target with which `Task.judge` compares an answer; only the task knows its type."""
    prefix: str = ""
    """The given beginning of the answer."""
    choices: tuple[str, ...] = ()
    """Continuations whose likelihoods are compared, in place of a generated answer."""


@dataclass(frozen=True)
class Example:
    """A context, and questions about it."""

    id: str
    """A unique id, the same in every run with the same data, settings and seed."""
    context: str
    """The text that can be compressed before a question is known; empty if there is none."""
    questions: tuple[Question, ...]
    """The questions, at least one; all are about the same context."""
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """Facts over which figures are drawn, such as the depth of a needle."""


@dataclass(frozen=True)
class Generation:
    """How an answer is generated: at most `tokens`, ended by any text of `until`, which is not part of it."""

    tokens: int
    until: tuple[str, ...] = ()


Reply = str | list[tuple[float, bool]]
"""A generated answer, or for every choice its log-likelihood and whether greedy decoding would generate it."""


class Task(ABC):
    """A benchmark."""

    name: str
    """The requested name, with `@` and the length if the task has lengths: `niah_single_1@4096`."""
    metric: str
    """The name of the score of `judge` that tables show."""
    generation: Generation
    decodes: bool = False
    """Whether answers are long, so that compression while decoding has an effect."""
    chat: bool = True
    """Whether questions use the model's chat template, if there is one."""

    @abstractmethod
    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """Return the first examples.

        Args:
            tokenizer: the model's tokenizer.
            limit: how many; None for all.
            seed: draws generated examples, which do not depend on the limit.
        """

    @abstractmethod
    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Return the reply's scores by name, from 0 to 1; higher is better.

        Args:
            question: the question.
            reply: the model's answer to it.
        """
