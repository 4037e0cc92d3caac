"""Conversations of a chat task, under recipes and under what is done without a compressed cache."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from keepset.hf.conversation import Conversation
from keepset.lab.candidate import Candidate
from keepset.lab.compile.corpus import refuse_contaminated
from keepset.lab.generation import Checked
from keepset.lab.memory import CacheMemory, dynamic_nbytes
from keepset.lab.record import FULL, Record
from keepset.lab.tasks.chat import ChatTask
from keepset.lab.tasks.chat_example import SEEN, ChatExample, ChatQuestion, Message, begun, rendered
from keepset.lab.tasks.task import Reply, Tokenizer
from keepset.lab.texts import encode

NEWEST = "newest_turns"
SUMMARY = "summary"

_SUM_UP = (
    "Please sum up all that I have told you and that you have read. Name every fact about people and things, with "
    "names, places and numbers."
)
_SUMMED_UP = "These are all facts that were told before:\n1."
"""The first words of a summary, without which a small model only says again what it has answered before."""


def tokens_of(budget: str, said: int) -> int:
    """Return the tokens that a budget such as `bytes=0.25` or `keep=512` allows when so many were said."""
    number = budget.partition("=")[2]
    return int(number) if number.isdecimal() else int(float(number) * said)


class FullChat:
    """A chat that drops nothing and computes what is new, as a server with prefix caching does.

    Its methods are those of `Conversation`.

    Args:
        model: the model.
        tokenizer: its tokenizer, with a chat template.
        budget: the size of what is held between turns, such as `bytes=0.25` or `keep=512`; None for everything.

    Attributes:
        computed: how many tokens the newest call has computed, those of the answer included.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, budget: str | None = None) -> None:
        self._model, self._tokenizer, self._budget = model, tokenizer, budget
        self.computed = 0
        self._begin_anew()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return dynamic_nbytes(self._cache)

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return len(self._ids)

    def say(self, messages: Sequence[Message], **options: Any) -> str:
        """Answer a history of messages; see `Conversation.say`."""
        prompt = self._prompt(messages)
        self._go_on(prompt)
        ids = torch.tensor([prompt], dtype=torch.long, device=self._model.device)
        generate: Any = self._model.generate
        output = generate(ids, attention_mask=torch.ones_like(ids), past_key_values=self._cache, **options)[0].tolist()
        self._ids = output[: self._cache.get_seq_length()]  # the last token was not fed
        self.computed += len(self._ids) - len(prompt)
        return str(self._tokenizer.decode(output[len(prompt) :], skip_special_tokens=True))

    @torch.no_grad()
    def edit(self, messages: Sequence[Message]) -> None:
        """End a turn: hold what belongs to this history, and nothing else."""
        prompt = rendered(self._tokenizer, messages, asks=False)
        self._go_on(prompt)
        new = torch.tensor([prompt[self.tokens :]], dtype=torch.long, device=self._model.device)
        self._model(new, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._ids = prompt

    def fork(self) -> FullChat:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied._cache = copy.deepcopy(self._cache)
        return copied

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        return rendered(self._tokenizer, messages, asks=True)

    def _go_on(self, prompt: Sequence[int]) -> None:
        """Hold what a prompt begins with, without its last token, and count what is new."""
        pairs = zip(self._ids, prompt[:-1], strict=False)
        matched = next((at for at, (held, asked) in enumerate(pairs) if held != asked), None)
        matched = min(len(self._ids), len(prompt) - 1) if matched is None else matched
        if matched < len(self._ids):
            if all(type(layer) is DynamicLayer for layer in self._cache.layers):
                self._cache.crop(matched)
            else:  # windows and recurrent states cannot go back
                self._begin_anew()
                matched = 0
        self._ids, self.computed = list(prompt[:matched]), len(prompt) - matched

    def _begin_anew(self) -> None:
        self._cache, self._ids = DynamicCache(config=self._model.config), list[int]()


class NewestTurns(FullChat):
    """A chat whose history is cut at every compaction: the newest turns stay that fit the budget, and are read anew."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, budget: str) -> None:
        super().__init__(model, tokenizer, budget)
        self._begin: Sequence[Message] = ()
        """What stands in the place of the first `_replaced` messages."""
        self._replaced = 0

    def edit(self, messages: Sequence[Message]) -> None:
        self.computed = 0
        self._begin, self._replaced = self._shortened(messages, self._room(messages)), len(messages)
        before = self.computed
        self._begin_anew()
        if self._begin:
            super().edit(self._begin)
            self.computed += before

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        return super()._prompt([*self._begin, *messages[self._replaced :]])

    def _room(self, messages: Sequence[Message]) -> int:
        """Return the tokens that the budget allows, of a history of messages."""
        assert self._budget is not None
        return tokens_of(self._budget, self._count(messages))

    def _shortened(self, messages: Sequence[Message], room: int) -> Sequence[Message]:
        for first in (index for index, message in enumerate(messages) if message["role"] == "user"):
            if self._count(messages[first:]) <= room:
                return messages[first:]
        return ()

    def _count(self, messages: Sequence[Message]) -> int:
        return len(rendered(self._tokenizer, messages, asks=False))


class Summary(NewestTurns):
    """A chat whose history gives way at every compaction to the model's own summary, of as many tokens as fit."""

    def _shortened(self, messages: Sequence[Message], room: int) -> Sequence[Message]:
        left = room - self._count(_with_summary(""))
        if left < 1:
            return ()
        asked = [*messages, {"role": "user", "content": _SUM_UP, "begun": _SUMMED_UP}]
        return _with_summary(self.say(asked, **_greedy(self._tokenizer), max_new_tokens=left))


def _with_summary(text: str) -> Sequence[Message]:
    return {"role": "user", "content": _SUMMED_UP + text.rstrip()}, SEEN


_CHATS = {FULL: FullChat, NEWEST: NewestTurns, SUMMARY: Summary}


def baselines(requested: Sequence[str]) -> list[Candidate]:
    """Return what stands beside recipes: the newest turns alone and the model's summary, under each budget.

    Args:
        requested: budgets, such as `bytes=0.25` or `keep=512`.
    """
    return [Candidate(None, f"{name}({size})", name, size) for size in requested for name in (NEWEST, SUMMARY)]


def play(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    task: ChatTask,
    example: ChatExample,
    candidate: Candidate,
    blank: Record,
) -> Record:
    """Hold a conversation under a candidate, and ask its questions.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        task: the task.
        example: the conversation.
        candidate: a recipe, the full cache, or one of `baselines`.
        blank: the cell without figures.

    Raises:
        KeepsetError: the recipe or the model cannot be used.
    """
    begins = begun(tokenizer)
    if candidate.recipe is None:
        chat: Conversation | FullChat = _CHATS[candidate.method](model, begins, candidate.requested)
    else:
        refuse_contaminated(candidate.recipe, example.context)
        chat = Conversation(model, begins, candidate.recipe)
    computed = _hear(chat, task, example, _greedy(tokenizer))
    figures = {**_figures(chat, len(rendered(begins, example.messages, asks=False))), "computed": computed}
    replies = _ask(chat, task, example, tokenizer)
    judged = [task.judge(question, reply)[task.metric] for question, reply in zip(example.asked, replies, strict=True)]
    groups: dict[str, list[float]] = {}
    for question, score in zip(example.asked, judged, strict=True):
        for group in question.groups:
            groups.setdefault(group, []).append(score)
    scores = {task.metric: fmean(judged), **{group: fmean(of_group) for group, of_group in groups.items()}}
    return replace(blank, scores=scores, figures=figures, replies=replies)


def _hear(chat: Conversation | FullChat, task: ChatTask, example: ChatExample, options: Mapping[str, Any]) -> int:
    """Have a chat hear all turns, compressed as often as the task says; return how many tokens were computed."""
    computed, history, turns = 0, list[Message](), len(example.turns)
    ends = task.ends(turns)
    for first, end in zip([0, *ends], ends, strict=False):
        history += [message for turn in example.turns[first:end] for message in turn]
        chat.say(history[:-1], **options, max_new_tokens=1)
        computed += chat.computed
        chat.edit(example.cleared if example.cleared and end == turns else history)
        computed += chat.computed
    return computed


def _ask(chat: Conversation | FullChat, task: ChatTask, example: ChatExample, tokenizer: Tokenizer) -> list[Reply]:
    """Return the answers to all questions, each in a turn of its own or to the same history."""
    history, replies = list(example.cleared or example.messages), list[Reply]()
    for question in example.asked:
        asked = chat if task.stays else chat.fork()
        reply = _answer(asked, [*history, question.message], question, task.generation.tokens, tokenizer)
        replies.append(reply)
        if task.stays:
            own = {"role": "assistant", "content": f"{question.prefix}{reply}"}
            history += [question.message, own if task.answers == "own" else question.answer]
    return replies


def _answer(
    chat: Conversation | FullChat, history: Sequence[Message], question: ChatQuestion, tokens: int, tokenizer: Tokenizer
) -> Reply:
    """Return the answer to a question, or the likelihood of the one that was recorded.

    Args:
        chat: the chat.
        history: all messages, of which the last asks the question.
        question: the question.
        tokens: the most tokens of the answer.
        tokenizer: the model's tokenizer.
    """
    options = _greedy(tokenizer)
    if not question.choices:
        return chat.say(history, **options, max_new_tokens=tokens)
    recorded = Recorded(encode(tokenizer, question.choices[0])[:tokens])
    options["logits_processor"].append(recorded)
    chat.say(history, **options, max_new_tokens=len(recorded.ids))
    return [(recorded.likelihood, recorded.is_greedy)]


class Recorded(LogitsProcessor):
    """Makes `model.generate` say given tokens, and notes how likely they were.

    Args:
        ids: the tokens, without one that ends an answer.

    Attributes:
        likelihood: the log-likelihood of those that were said.
        is_greedy: whether the model would have said them by itself.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.likelihood, self.is_greedy = ids, 0.0, True
        self._said = 0

    def __call__(
        self, input_ids: Int[Tensor, "1 tokens"], scores: Float[Tensor, "1 vocabulary"]
    ) -> Float[Tensor, "1 vocabulary"]:
        token = self.ids[self._said]
        self._said += 1
        self.likelihood += float(scores[0].log_softmax(-1, torch.float32)[token])
        self.is_greedy &= int(scores[0].argmax()) == token
        said = torch.full_like(scores, -torch.inf)
        said[0, token] = 0
        return said


def _figures(chat: Conversation | FullChat, said: int) -> dict[str, float]:
    """Return what a chat holds between two turns, in which so many tokens were said."""
    if isinstance(chat, Conversation):
        memory = CacheMemory(chat.cache, False)
        keep, share, nbytes, nbytes_full = memory.keep, memory.share, memory.nbytes, memory.nbytes_full
    else:
        keep = share = chat.tokens / said
        nbytes, nbytes_full = chat.nbytes, round(chat.nbytes / max(chat.tokens, 1) * said)
    return {"keep": keep, "share": share, "kv_bytes": nbytes, "kv_bytes_full": nbytes_full}


def _greedy(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return options of `generate`, with a token for padding, which one row does not need but the log asks for."""
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "pad_token_id": padding}
    return {**plain, "logits_processor": LogitsProcessorList([Checked()])}


def cost(task: ChatTask, example: ChatExample, candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Return the tokens of a conversation under all candidates, and at most how many are generated.

    Args:
        task: the task.
        example: the conversation.
        candidates: the candidates. What the newest turns take again is not counted.
    """
    generated = len(candidates) * len(example.questions) * task.generation.tokens
    for candidate in candidates:
        if candidate.method == SUMMARY and candidate.requested is not None:
            turns = len(example.turns)
            said = (task.length * end // turns for end in task.ends(turns))
            generated += sum(tokens_of(candidate.requested, tokens) for tokens in said)
    return len(candidates) * task.length, generated
