"""`keepset chat`: a chat in the terminal, whose cache is compressed between turns."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from keepset.defaults import CHATTED, CHATTED_NETWORKS, default_for_chats
from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_fits_context, given_text
from keepset.lab.cli.console import load, note
from keepset.lab.cli.options import ModelOptions, OutputTokens, SamplingSeed, Temperature, takes_options
from keepset.lab.cli.streaming import Sampling, Streamer

if TYPE_CHECKING:
    from keepset.hf.conversation import Conversation

_AGAIN, _UNDO = "/again", "/undo"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions):
    """Options of `keepset chat`."""

    recipe: Annotated[
        str | None,
        Option(
            help="What to keep between turns, with turns=True. "
            f"[default: {CHATTED_NETWORKS} if there are networks for the model, else {CHATTED}]"
        ),
    ] = None
    system: Annotated[str | None, Option(help="A message before the first.")] = None
    output_tokens: OutputTokens = 400
    temperature: Temperature = 0.0
    seed: SamplingSeed = 0


@takes_options
def chat(options: ChatOptions) -> None:
    """Chat with a model whose cache holds a share of all that was said.

    Each line is a message. /again asks for the newest answer once more, /undo takes the newest turn back, and an empty
    line or the end of the input ends the chat. After each answer a line on standard error says how many tokens of the
    history were computed, went on, and were dropped, and what the cache holds.
    """
    from keepset.recipe import Recipe

    requested = None if options.recipe is None else Recipe.parse(options.recipe).require_budget()
    sampling = Sampling(options.output_tokens, options.temperature, options.seed)
    system = given_text("The system message", options.system)

    import torch

    from keepset.hf.conversation import Conversation
    from keepset.lab.memory import chat_status

    loaded, tokenizer = load(options.source)
    if requested is None:
        text = default_for_chats(loaded.config.name_or_path or "")
        note(f"No recipe is named, so the default is taken: {text}.")
        requested = Recipe.parse(text)
    conversation = Conversation(loaded, tokenizer, requested)
    history = [] if system is None else [{"role": "system", "content": system}]
    first = len(history)
    torch.manual_seed(sampling.seed)
    for line in _lines():
        if line in (_AGAIN, _UNDO):
            if len(history) == first:
                note("Nothing was said yet: write a message.")
                continue
            del history[-1 if line == _AGAIN else -2 :]
            if line == _UNDO:
                continue
        else:
            history.append({"role": "user", "content": given_text("The message", line)})
        history.append({"role": "assistant", "content": _answer(conversation, loaded, tokenizer, history, sampling)})
        note(chat_status(conversation))


def _lines() -> Iterator[str]:
    """Yield what the user writes, line by line, until an empty one or the end."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("\n> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise KeepsetError("The message is not UTF-8: write it as UTF-8 text.") from error
        if not line.strip():
            return
        yield line.strip()


def _answer(
    conversation: "Conversation", model: Any, tokenizer: Any, history: list[dict[str, str]], sampling: Sampling
) -> str:
    """Answer a history, and print the answer as it comes."""
    from transformers import LogitsProcessorList

    from keepset.lab.generation import Checked

    length = len(tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=True, return_dict=False))
    check_fits_context(model, length, sampling.tokens)
    options = {**sampling.options, "logits_processor": LogitsProcessorList([Checked()])}
    with Streamer(tokenizer) as streamer:
        return conversation.say(history, streamer=streamer, **options)
