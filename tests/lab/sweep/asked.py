"""Stand-ins for what asks: a task, a tokenizer of letters, a model that says what it is told, and its calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keepset.lab.record import Record
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task

LETTERS = [chr(code) for code in (10, *range(32, 127), *range(0xC0, 0xC0 + 101))]
CHAT = "<bos>U:{{ messages[0]['content'] }}.\nA:"


def letters(template: str | None = None) -> PreTrainedTokenizerFast:
    """Every letter is a token, and three more are for padding, beginning and end."""
    names = ["<pad>", "<bos>", "<eos>", *LETTERS]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


class Exact(Task):
    """An answer is right if it is the target; of choices the likeliest must be."""

    name, metric = "exact", "right"

    def __init__(self, tokens: int = 8, until: tuple[str, ...] = (), decodes: bool = False) -> None:
        self.generation, self.decodes = Generation(tokens, until), decodes

    def examples(self, tokenizer: Any, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        return []

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        said = reply if isinstance(reply, str) else max(range(len(reply)), key=lambda index: reply[index][0])
        return {"right": float(said == question.target), "length": len(reply) / 100}


@contextmanager
def scripted(model: Any, text: Sequence[int], prompt: int) -> Iterator[list[int]]:
    """The model says these tokens after a prompt of so many tokens; gives the lengths of all its calls."""
    calls: list[int] = []

    def script(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        calls.append(int((args[0] if args else kwargs["input_ids"]).shape[1]))
        at = next(iter(kwargs["past_key_values"].managed_layers.values())).logical - prompt
        logits = torch.full_like(output.logits, -10.0)
        logits[:, -1, text[at] if at < len(text) else 3] = 10.0
        return replace(output, logits=logits)

    handle = model.register_forward_hook(script, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def watched(model: Any, stop: Any = lambda calls: None) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of every call of the model; `stop` may raise an error when it has seen them."""
    calls: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(tuple((args[0] if args else kwargs["input_ids"]).shape))
        stop(calls)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def timeless(cell: Record) -> Record:
    """The cell without what may differ: its seconds, beside how many others it was made, and digits of a correlation.

    Its masses are sums of attention, which a batch adds up in another order.
    """
    if cell.error is not None:
        return cell
    seconds = dict(prefill_seconds=0.0, select_seconds=0.0, decode_seconds=0.0)
    correlation = {name: round(cell.figures[name], 4) for name in ("length_by_mass",) if name in cell.figures}
    return replace(cell, figures={**cell.figures, **seconds, **correlation, "batch": 1.0})
