"""An OpenAI client and an agent framework talk to a server of conversations: each turn computes only what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import httpx2 as httpx
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from keepset.lab.embedded import embedded_folder
from tests.vllm.served import CALLS, served_chats

pytestmark = pytest.mark.full

OPTIONS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
# Or the small model would write spaces for ever.
OPTIONS += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}"""
TEMPLATE += CALLS
"""A chat template with tools, of which the embedded model's own knows nothing."""
SYSTEM = {"role": "system", "content": "You are a patient teacher. " * 6}
ADA = (
    "My name is Ada. I have sailed since I was a child, first with my aunt in the north, and later on my own, with an "
)
ADA += "old boat that leaks a little. Now I would like to buy another one. What is a sloop?"
BOB = (
    "I am Bob, a carpenter from the hills. Most of my days go by with doors, stairs and tables, but this winter I want "
)
BOB += "to build a bed for my daughter, who is nearly four. What is oak good for?"
QUESTIONS = {
    "sea": [ADA, "And a ketch?", "And a yawl?", "What is my name?"],
    "wood": [BOB, "And pine?", "And ash?", "What do I do?"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_chats(tmp_path_factory.mktemp("template"), TEMPLATE, OPTIONS) as server:
        yield f"{server}/v1"


def test_the_openai_client_talks(url: str) -> None:
    """Two conversations at once, every other turn as a stream. A turn that is asked for again has the same answer."""
    openai = pytest.importorskip("openai", reason="The OpenAI client is not installed.")
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    client = openai.OpenAI(base_url=url, api_key="none")
    chats: dict[str, list[dict[str, str]]] = {name: [SYSTEM] for name in QUESTIONS}
    shared = len(tokenizer.apply_chat_template([SYSTEM], chat_template=TEMPLATE)["input_ids"]) + 8
    before = dict.fromkeys(QUESTIONS, (0, shared))  # at least and at most so much is there of a conversation

    def said(messages: list[dict[str, str]]) -> tuple[str, Any]:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=40, temperature=0)
        return answer.choices[0].message.content, answer.usage

    def streamed(messages: list[dict[str, str]]) -> tuple[str, Any]:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=40,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        return "".join(choice.delta.content or "" for one in chunks for choice in one.choices), chunks[-1].usage

    for turn in range(4):
        ask, again = (streamed, said) if turn % 2 else (said, streamed)
        for name, messages in chats.items():
            messages.append({"role": "user", "content": QUESTIONS[name][turn]})
            text, usage = ask(messages)
            prompt = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True)
            assert usage.prompt_tokens == len(prompt["input_ids"])
            least, most = before[name]
            assert least <= usage.prompt_tokens_details.cached_tokens <= most
            text_again, usage_again = again(messages)
            assert text_again == text
            assert usage_again.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
            before[name] = usage.prompt_tokens, usage.total_tokens
            messages.append({"role": "assistant", "content": text})


def test_an_answer_says_what_it_has_of_its_conversation(url: str) -> None:
    """On every route, streamed or not, and whatever ends it."""
    openai = pytest.importorskip("openai", reason="The OpenAI client is not installed.")
    client = openai.OpenAI(base_url=url, api_key="none")
    said = list(range(1000, 1150))

    def ask(prompt: list[int], **more: Any) -> tuple[dict[str, int], list[int]]:
        told = {"return_token_ids": True, "ignore_eos": True}
        more = {"model": "tiny", "max_tokens": 8, "temperature": 0} | more
        answer = client.completions.create(prompt=prompt, extra_body=told, **more)
        figures, cached = answer.model_extra["keepset"], answer.usage.prompt_tokens_details.cached_tokens
        if "n" not in more:
            assert (figures["computed"], figures["reused"]) == (len(prompt) - cached, cached)
        return figures, answer.choices[0].model_extra["token_ids"]

    first, answer = ask(said)
    assert first == {"computed": 150, "reused": 0, "dropped": 0, "held": 0}
    # All but the newest token of the answer were computed; 20 of the others are left out.
    said = [*said[:40], *said[60:], *answer, *range(2000, 2010)]
    second, answer = ask(said)
    assert (second["computed"], second["reused"], second["dropped"]) == (11, 137, 20)
    assert 0.25 * 157 < second["held"] <= 0.25 * 157 + 3 * 32 and not second["held"] % 32
    again, _ = ask(said)
    assert (again["computed"], again["reused"], again["dropped"]) == (1, 147, 8)
    several, _ = ask(list(range(3000, 3100)), n=2, temperature=1)
    assert several == {"computed": 200, "reused": 0, "dropped": 0, "held": 0}
    words = [{"role": "user", "content": "Where does the river end, and where does it begin? " * 4}]
    more: dict[str, Any] = {"model": "tiny", "temperature": 0}
    stopped = client.chat.completions.create(messages=words, max_tokens=20, stop=["e"], **more)
    responded = client.responses.create(input=words, max_output_tokens=20, **more)
    *_, completed = client.responses.create(input=words, max_output_tokens=20, stream=True, **more)
    with httpx.Client(base_url=url) as plain:
        message = plain.post("/messages", json={**more, "messages": words, "max_tokens": 20}).json()
    assert stopped.choices[0].finish_reason == "stop"
    told = [stopped.model_extra, responded.model_extra, completed.response.model_extra, message]
    assert [list(one["keepset"]) for one in told] == [["computed", "reused", "dropped", "held"]] * 4
    for one, usage in ((stopped, stopped.usage.prompt_tokens), (responded, responded.usage.input_tokens)):
        assert one.model_extra["keepset"]["computed"] + one.model_extra["keepset"]["reused"] == usage


def test_conversations_are_listed_deleted_and_forgotten(url: str) -> None:
    openai = pytest.importorskip("openai", reason="The OpenAI client is not installed.")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    said, other = list(range(4000, 4100)), list(range(5000, 5100))

    def cached(prompt: list[int], **options: Any) -> int:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body={"keepset": options}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    def names() -> dict[str, Any]:
        listed = client.get("/conversations", cast_to=object)
        assert isinstance(listed, dict) and listed["object"] == "list"
        return {each["id"]: each for each in listed["data"]}

    assert [cached(text, conversation=name) for text, name in ((said, "a"), (other, "b/é"), (said, "a"))] == [0, 0, 99]
    assert {"a", "b/é"} <= names().keys() and names()["a"]["tokens"] == 107 and names()["a"]["held"] == 128
    gone = client.delete("/conversations/b%2F%C3%A9", cast_to=object)
    assert gone == {"id": "b/é", "object": "conversation.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError, match="There is no conversation of this name"):
        client.delete("/conversations/b%2F%C3%A9", cast_to=object)
    assert "a" in names() and "b/é" not in names()
    assert [cached([*other, 7], conversation="b/é") for _ in range(2)] == [0, 100]
    # A span is left out: without `forget` the rest goes on as it was read.
    assert cached([*said[:40], *said[60:], 7], conversation="a") == 80
    assert cached([*said[:40], *said[70:], 7], conversation="a", forget=True) == 0
    assert cached([*said[:40], *said[70:], 7], conversation="a") == 70


class Verdict(BaseModel):
    """What the agent answers in the end: so little that even a small model gets it right."""

    verdict: Literal["safe", "unsafe"]


@pytest.mark.parametrize(("api", "question"), [("chat", "How deep is it here?"), ("responses", "What is the depth?")])
def test_an_agent_uses_a_tool(api: str, question: str, url: str) -> None:
    """The small model is made to call the tool, and to end its answers."""
    agents = pytest.importorskip("agents", reason="The OpenAI agents SDK is not installed: openai-agents.")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    places = []

    @agents.function_tool
    def depth(place: Literal["harbour", "bay"]) -> str:
        """Return the depth of the water at a place.

        Args:
            place: where.
        """
        places.append(place)
        return "4 metres"

    async def talk() -> list[Any]:
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            calls = agents.ModelSettings(temperature=0, max_tokens=80, tool_choice="depth", include_usage=True)
            pilot = agents.Agent(
                name="pilot",
                instructions="You help sailors.",
                model=kind(model="tiny", openai_client=client),
                tools=[depth],
                model_settings=calls,
                tool_use_behavior="stop_on_first_tool",
            )
            judge = pilot.clone(
                output_type=Verdict,
                model_settings=agents.ModelSettings(
                    temperature=0, max_tokens=80, tool_choice="none", include_usage=True
                ),
            )
            called = await agents.Runner.run(pilot, question)
            assert called.final_output == "4 metres"
            history = [*called.to_input_list(), {"role": "user", "content": "May I anchor?"}]
            judged = await agents.Runner.run(judge, history)
            history = [*judged.to_input_list(), {"role": "user", "content": "And in a storm?"}]
            streams = agents.Runner.run_streamed(judge, history)
            async for _ in streams.stream_events():
                pass
            assert isinstance(judged.final_output, Verdict) and isinstance(streams.final_output, Verdict)
            return [response.usage for run in (called, judged, streams) for response in run.raw_responses]

    usages = asyncio.run(talk())
    assert len(places) == 1 and len(usages) == 3
    assert usages[0].input_tokens_details.cached_tokens == 0
    for earlier, usage in pairwise(usages):
        assert earlier.input_tokens <= usage.input_tokens_details.cached_tokens <= earlier.total_tokens
