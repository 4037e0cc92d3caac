"""`Playground`: asks the full cache and a compressed one the same question about a text, and holds a chat."""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.observation import Observation
from keepset.defaults import SHORT, default_for_chats
from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.conversation import Conversation
from keepset.hf.model_support import check_logits
from keepset.hf.recipe_notes import what_stays
from keepset.lab.generation import Checked, end_tokens
from keepset.lab.images import Pictured, decode_image, image_chat_parts, image_grids
from keepset.lab.memory import chat_status, counted_nbytes, dynamic_nbytes
from keepset.lab.texts import TextStreamer, chat_parts, token_texts
from keepset.models import context_length
from keepset.recipe import Recipe

SendUpdate = Callable[[dict[str, Any]], None]
"""Sends the next message to the page; an error that it raises ends the run."""

ANSWER = 48
"""The most tokens of an answer."""
CHAT_ANSWER = 200
"""The most tokens of an answer in a chat."""
ROLES = ("user", "assistant")
IMAGE_BYTES = 4 * 2**20
"""The most bytes of an image's file."""
_MOST = 4096
"""The most tokens of a text, whatever the model's limit, so that nobody waits for minutes."""


@dataclass(frozen=True)
class RunRequest:
    """A request of the page.

    Attributes:
        text: the text that is read and compressed.
        question: the question that is asked afterwards; blank for none.
        recipe: the recipe's text; a recipe without a budget takes `budget`.
        budget: a share of a full 16-bit cache's bytes, or entries per KV head.
        image: the bytes of an image's file; empty for none.
    """

    text: str
    question: str
    recipe: str
    budget: str
    image: bytes = b""

    @classmethod
    def of(cls, fields: Any) -> RunRequest:
        """Return the request of the page's JSON; raise `KeepsetError` if it is not what the page sends."""
        names = ("text", "question", "recipe", "budget")
        if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in names):
            raise KeepsetError(f"A request is a JSON object with the texts {', '.join(names)}.")
        for name in names:
            _check_characters(name, fields[name])
        return cls(*(fields[name] for name in names), image=_image_of(fields.get("image", "")))

    def parsed(self) -> Recipe:
        """Return the recipe with its budget; raise `KeepsetError` if either is invalid."""
        recipe = Recipe.parse(self.recipe)
        text = self.budget.strip()
        if text and not recipe.budget.is_given:
            try:
                number = int(text) if text.isdecimal() else float(text)
            except ValueError:
                raise KeepsetError(
                    f"The budget {text!r} is no number: use a share of bytes such as 0.25, or entries per head."
                ) from None
            recipe = recipe.with_budget(keep=number) if isinstance(number, int) else recipe.with_budget(bytes=number)
        return recipe.require_budget()


@dataclass(frozen=True)
class ChatRequest:
    """A request of the page for an answer in a chat.

    Attributes:
        history: the messages, the user's and the model's in turn; the user's last one is answered.
    """

    history: list[str]

    @classmethod
    def of(cls, fields: Any) -> ChatRequest:
        """Return the request of the page's JSON; raise `KeepsetError` if it is not what the page sends."""
        history: Any = fields.get("history") if isinstance(fields, dict) else None
        if not isinstance(history, list) or not all(isinstance(text, str) for text in history) or len(history) % 2 == 0:
            raise KeepsetError(
                "A turn is a JSON object with the texts of its history, of which the last is the user's."
            )
        for text in history:
            _check_characters("message", text)
        if not history[-1].strip():
            raise KeepsetError("The message is empty: write some text.")
        return cls(history)


def _check_characters(name: str, text: str) -> None:
    """Refuse a text that is no Unicode.

    Args:
        name: the text's name in the error.
        text: the text.

    Raises:
        KeepsetError: it has half a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KeepsetError(
            f"The {name} has half a character (a lone surrogate) at place {error.start + 1}: leave it out."
        ) from None


def _image_of(field: Any) -> bytes:
    """Return the file of an image that the page sends as base64."""
    try:
        content = base64.b64decode(field, validate=True)
    except (ValueError, TypeError):
        raise KeepsetError("The image is not a file in base64.") from None
    if len(content) > IMAGE_BYTES:
        raise KeepsetError(f"The image has more than {IMAGE_BYTES // 2**20} MB: give a smaller one.")
    return content


class Playground:
    """A model that reads one text at a time, or answers in a chat.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        called: the model's name for the lines to copy; None for the embedded model.
        processor: the processor of images; None for a model that takes no images.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, called: str | None, processor: Any = None
    ) -> None:
        self.processor = processor
        self._model, self._tokenizer, self._called = model, tokenizer, called
        self._ends = {*end_tokens(model), tokenizer.eos_token_id}
        self._conversation: Conversation | None = None
        self._longest = context_length(model) or _MOST + CHAT_ANSWER
        self.limit = min(_MOST, self._longest - ANSWER)

    @torch.no_grad()
    def run(self, request: RunRequest, send: SendUpdate) -> None:
        """Send the messages of a run: the text's tokens, each layer's choice, two answers, figures.

        Args:
            request: what the page asks for.
            send: sends one message to the page.

        Raises:
            KeepsetError: the text is too long, the image is invalid, or the recipe cannot be used.
        """
        recipe = request.parsed()
        if not request.text.strip():
            raise KeepsetError("There is no text: paste one.")
        prompt, question_part = self._prompt(request)
        ids, question = prompt["input_ids"], self._encoded(question_part)
        length = ids.shape[1] + question.shape[1]
        if length > self.limit:
            raise KeepsetError(f"The text has {length} tokens with its question: give at most {self.limit}.")
        shading = _Shading(self._model, recipe, ids.shape[1], send)
        grids = image_grids(self._model, prompt) if request.image else []
        tokens = token_texts(self._tokenizer, ids[0].tolist())
        send({"tokens": tokens, "grids": grids, **self._lines(request, recipe)})
        full = DynamicCache(config=self._model.config)
        full_seconds = self._read(prompt, full)
        send({"full": {"bytes": counted_nbytes(full), "allocated": dynamic_nbytes(full), "read": full_seconds}})
        try:
            seconds = self._read(prompt, shading.cache)
        finally:
            shading.cache.stop_watching()
        cache = shading.cache
        figures = {"bytes": cache.nbytes_counted, "allocated": cache.nbytes, "share": cache.share}
        send({"compressed": {**figures, "read": seconds, "kept": shading.share}})
        if (sentence := what_stays(recipe, self._model, ids.shape[1])) is not None:
            send({"note": sentence})
        elif length < SHORT and shading.share < 1:
            send({"note": f"The prompt has {length} tokens: below {SHORT} dropped entries will be missed."})
        if request.question.strip():
            self._ask(question, {"full": full, "compressed": shading.cache}, send)
        send({"done": True})

    def chat(self, request: ChatRequest, send: SendUpdate) -> None:
        """Send the pieces of an answer, and then all of it with what was computed and is held.

        There is one conversation. A history that it does not go on with is computed anew.

        Args:
            request: what the page asks for.
            send: sends one message to the page.

        Raises:
            KeepsetError: the history is too long, or the model is none for chats.
        """
        if self._conversation is None:
            recipe = default_for_chats(self._model.config.name_or_path or "")
            self._conversation = Conversation(self._model, self._tokenizer, recipe)
        history = [{"role": ROLES[number % 2], "content": text} for number, text in enumerate(request.history)]
        ids = self._tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=True, return_dict=False)
        limit = min(_MOST, self._longest - CHAT_ANSWER)
        if len(ids) > limit:
            raise KeepsetError(f"The chat has {len(ids)} tokens: undo turns until it has at most {limit}.")
        answer = self._conversation.say(
            history,
            streamer=TextStreamer(self._tokenizer, lambda text: send({"text": text})),
            logits_processor=LogitsProcessorList([Checked()]),
            max_new_tokens=CHAT_ANSWER,
            do_sample=False,
        )
        send({"answer": answer, "status": chat_status(self._conversation)})

    def _prompt(self, request: RunRequest) -> tuple[dict[str, Tensor], str]:
        """Return the model's inputs for the image and the text, and the words that follow with the question."""
        if not request.image:
            context, question_part = chat_parts(self._tokenizer, request.text, request.question)
            return {"input_ids": self._encoded(context)}, question_part
        if self.processor is None:
            raise KeepsetError("This model does not look at images: leave the image out.")
        image = decode_image(request.image, "The image")
        question_part = image_chat_parts(self.processor, 1, request.text, request.question)[1]
        return Pictured(self._model, self.processor, [image]).prompt(request.text), question_part

    def _encoded(self, text: str) -> Tensor:
        tokens = self._tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
        return tokens["input_ids"].to(self._model.device)

    def _read(self, prompt: dict[str, Tensor], cache: Any) -> float:
        start = time.perf_counter()
        check_logits(self._model(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)
        return time.perf_counter() - start

    def _ask(self, question: Tensor, caches: dict[str, Any], send: SendUpdate) -> None:
        """Send both answers alternately, token by token, so that a reader sees them side by side.

        Args:
            question: the question's tokens.
            caches: the full and the compressed cache by name.
            send: sends one message to the page.
        """
        answers = {side: self._answer(question, cache) for side, cache in caches.items()}
        while answers:
            for side in list(answers):
                part = next(answers[side], None)
                if part is None:
                    del answers[side]
                else:
                    send({side: part})

    def _answer(self, ids: Tensor, cache: Any) -> Iterator[dict[str, Any]]:
        new: list[int] = []
        shown, seconds = "", 0.0
        while len(new) < ANSWER:
            start = time.perf_counter()
            logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            check_logits(logits)
            ids = logits.argmax(-1, keepdim=True)
            seconds += time.perf_counter() - start
            new.append(int(ids))
            text = str(self._tokenizer.decode(new, skip_special_tokens=True))
            # The last character may be incomplete until the next token comes.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield {"text": text[len(shown) :], "answer": seconds, "answered": len(new)}
                shown = text
            if new[-1] in self._ends:
                return

    def _lines(self, request: RunRequest, recipe: Recipe) -> dict[str, str]:
        model = [] if self._called is None else ["--model", self._called]
        question = request.question.strip() or "Sum it up."
        file = "text.safetensors"
        build = ["keepset", "context", "build", "--text", "text.txt", "--out", file, "--recipe", str(recipe), *model]
        ask = ["keepset", "context", "ask", file, question]
        named = "" if self._called is None else repr(self._called)
        text = f"Path('text.txt').read_text(), {question!r})"
        reads = ("from keepset.lab.texts import chat_parts",)
        makes: tuple[str, ...] = (f"context, rest = chat_parts(tokenizer, {text}",)
        prompt = "tokenizer(context, **options)"
        if request.image:
            build += ["--image", "image.png"]
            reads = ("from keepset.lab.images import encoded, image_chat_parts, read_images",)
            makes = (
                "images, processor = read_images([Path('image.png')]), keepset.models.load_processor(model)",
                f"context, rest = image_chat_parts(processor, 1, {text}",
            )
            prompt = "encoded(model, processor, context, images)"
        python = (
            "from pathlib import Path",
            "import keepset",
            *reads,
            f"model, tokenizer = keepset.models.load({named})",
            *makes,
            "options = {'add_special_tokens': False, 'return_tensors': 'pt'}",
            f"cache = keepset.Cache(model, {str(recipe)!r})",
            f"model.generate(**{prompt}, past_key_values=cache, max_new_tokens=1)",
            "asked = cache.ask(**tokenizer(rest, **options))",
            f"answer = model.generate(**asked, max_new_tokens={ANSWER}, do_sample=False)",
            "print(tokenizer.decode(answer[0]))",
        )
        return {"command": f"{shlex.join(build)}\n{shlex.join(ask)}", "python": "\n".join(python)}


class _Shading:
    """Sends after every layer the share of heads so far that keep each token."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, length: int, send: SendUpdate) -> None:
        self.cache = Cache(model, recipe, observer=self._observe)
        self._send, self._kept, self._heads, self._layers = send, torch.zeros(length, dtype=torch.float32), 0, 0

    @property
    def share(self) -> float:
        """The share of all entries that is kept; 1.0 before an event."""
        return float(self._kept.mean() / self._heads) if self._heads else 1.0

    def _observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        kept = keep_set.layer(observation.layer)
        mask = kept.mask(len(self._kept))[0].cpu()
        self._kept += mask.sum(0)
        self._heads += len(mask)
        self._layers += 1
        shares = (self._kept / self._heads).tolist()
        self._send({"layer": self._layers, "of": len(observation.layers), "shares": [round(x, 3) for x in shares]})
