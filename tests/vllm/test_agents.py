"""Official clients compact and edit a conversation in a server of vLLM's, and go on with what it has kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from keepset.lab.embedded import name_statistics
from keepset.recipe import Recipe
from tests.vllm.served import CALLS, served_chats

pytestmark = pytest.mark.full

TEMPLATE = """
{%- for message in messages %}
{%- if message.reasoning %}<|im_start|>think
{{ message.reasoning }}<|im_end|>
{% endif %}<|im_start|>{{ message.role }}"""
TEMPLATE += CALLS + "{#- 'developer' is a role like others #}"
"""A chat template that shows reasoning and tools' results, of which the embedded model's own knows nothing.

Special tokens are around both. Where there are none, the tokens beside what is left out may change. The comment is for
vLLM, which moves developers' messages to the front of a prompt if a template does not have that word in quotes.
"""
ADA = (
    "My name is Ada. I have sailed since I was a child, first with my aunt in the north, and later on my own, with an "
    "old boat that leaks a little. Now I would like to buy another one. What is a sloop?"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    recipe = name_statistics(Recipe.parse("pool(distilled, bytes=0.25, turns=True)"), None)
    options = ["--num-gpu-blocks-override", "512"]
    with served_chats(tmp_path_factory.mktemp("template"), TEMPLATE, options, str(recipe)) as url:
        yield url


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_compacted_conversation_goes_on(url: str) -> None:
    """By the endpoint, by the trigger, and beyond a threshold; an item that nobody's pages stand for is computed."""
    openai = pytest.importorskip("openai", reason="The OpenAI client is not installed.")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(items: list[Any], **more: Any) -> Any:
        return client.responses.create(model="tiny", input=items, max_output_tokens=30, temperature=0, **more)

    def goes_on(items: list[Any], whole: list[Any], before: Any) -> Any:
        """The answer to compacted input, which is the one to the whole input: that has nothing left to compute."""
        response, again = ask(items), ask(whole)
        cached = response.usage.input_tokens_details.cached_tokens
        assert before.usage.input_tokens <= cached <= before.usage.total_tokens
        assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
        assert again.usage.input_tokens == response.usage.input_tokens and again.output_text == response.output_text
        return response

    whole: list[Any] = [user(ADA)]
    response = ask(whole)
    whole += [*response.output, user("And a ketch?")]
    compacted = client.responses.compact(model="tiny", input=whole[:-1])
    response = goes_on([*compacted.output, whole[-1]], whole, response)

    whole += [*response.output, user("And a yawl?")]
    trigger = {"type": "compaction_trigger"}
    events = list(ask([*compacted.output, *whole[-3:-1], trigger], stream=True))
    (item,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].type == "response.completed" and events[-1].response.output == [item]
    response = goes_on([whole[0], item, whole[-1]], whole, response)

    whole += [*response.output, user("What is my name?")]
    managed = [{"type": "compaction", "compact_threshold": 10}]
    *_, added, done, completed = ask([item, *whole[-3:]], stream=True, context_management=managed)
    assert [added.type, done.type] == ["response.output_item.added", "response.output_item.done"]
    response = completed.response
    *answer, newest = response.output
    assert newest == done.item and newest.type == "compaction"
    whole += [*answer, user("And where have I sailed?")]
    goes_on([newest, whole[-1]], whole, response)

    unknown = [user("I am Bob, a carpenter from the hills, and want to build a bed. What is oak good for?")]
    compacted = client.responses.compact(model="tiny", input=unknown)
    response = ask([*compacted.output])
    assert response.usage.input_tokens_details.cached_tokens < 8 and response.output_text == ask(unknown).output_text
    with pytest.raises(openai.BadRequestError, match="was changed, or made for another API key"):
        ask([{"type": "compaction", "encrypted_content": compacted.output[0].encrypted_content[:-8]}])
    with pytest.raises(openai.BadRequestError, match="no model 'other' here: ask for one of tiny"):
        client.responses.compact(model="other", input=unknown)


def test_codex_goes_on_from_a_compacted_conversation(url: str) -> None:
    """As codex writes its requests: each answer is that of a conversation apart from it which is never compacted."""
    openai = pytest.importorskip("openai", reason="The OpenAI client is not installed.")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    context = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        user("<environment_context>/home/ada</environment_context>"),
    ]
    questions = [ADA, "And a ketch?", "What is my name?", "And a yawl?"]

    def ask(items: list[Any], salt: str) -> Any:
        more = {"instructions": "You are codex.", "store": False, "temperature": 0, "max_output_tokens": 30}
        return list(
            client.responses.create(model="tiny", input=items, stream=True, extra_body={"cache_salt": salt}, **more)
        )

    def exchange(salt: str, *, compacting: bool) -> tuple[list[str], list[tuple[int, int, int]]]:
        """The answers, and tokens of each turn: of the prompt, reused of it, and of prompt and answer."""
        items, answers, tokens = [*context], [], []
        for number, question in enumerate(questions):
            items.append(user(question))
            response = ask(items, salt)[-1].response
            usage = response.usage
            answers.append(response.output_text)
            tokens.append((usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.total_tokens))
            items += response.output
            if number == 1:
                if compacting:
                    # Codex keeps the user's messages and the item.
                    events = ask([*items, {"type": "compaction_trigger"}], salt)
                    (item,) = [event.item for event in events if event.type == "response.output_item.done"]
                    items = [*map(user, questions[:2]), item]
                items += context  # of the session, which it sends anew
        return answers, tokens

    answers, tokens = exchange("compacted", compacting=True)
    assert (answers, tokens) == exchange("whole", compacting=False)
    assert all(prompt <= reused < said for (prompt, _, said), (_, reused, _) in pairwise(tokens))
    assert "Ada" in answers[2]


def test_a_conversation_goes_on_without_what_was_cleared(url: str) -> None:
    """Old results of tools and old thinking: their entries go, and nothing is computed again."""
    anthropic = pytest.importorskip("anthropic", reason="The Anthropic client is not installed.")
    client = anthropic.Anthropic(base_url=url, auth_token="none", api_key=None)
    logs = [" ".join(f"{hour} o'clock: wind {7 * hour % 13} from the {side}." for hour in range(12)) for side in SIDES]

    def ask(messages: list[Any], *edits: Any) -> Any:
        managed = {"context_management": {"edits": list(edits)}} if edits else {}
        more = {
            "model": "tiny",
            "max_tokens": 24,
            "extra_body": {"temperature": 0},
            "betas": ["context-management-2025-06-27"],
        }
        return client.beta.messages.create(messages=messages, **more, **managed)

    def tokens(messages: list[Any], *edits: Any) -> Any:
        managed = {"context_management": {"edits": list(edits)}} if edits else {}
        return client.beta.messages.count_tokens(model="tiny", messages=messages, **managed)

    messages: list[Any] = [user(f"{ADA} And you have a tool that reads the log of a place. How is the wind?")]
    for number, log in enumerate(logs):
        use = {"type": "tool_use", "id": f"use_{number}", "name": "log", "input": {"place": f"the harbour {number}"}}
        thinking = {"type": "thinking", "thinking": "The log will tell, since it is kept by hour.", "signature": "x"}
        found = {"type": "tool_result", "tool_use_id": f"use_{number}", "content": log}
        messages += [{"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [found]}]
        first = ask(messages)
        messages += [{"role": "assistant", "content": first.content[-1].text}, user(f"And now, by log {number + 1}?")]
    whole = ask(messages)
    messages += [{"role": "assistant", "content": whole.content[-1].text}, user("Then I shall go. Is it far?")]
    edits = [
        {"type": "clear_thinking_20251015"},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": 200},
            "keep": {"type": "tool_uses", "value": 1},
        },
    ]
    counted, exact = tokens(messages, *edits), tokens(messages)
    # What the template puts around thinking is not counted with it: 5 tokens each time.
    assert abs(counted.context_management.original_input_tokens - exact.input_tokens) <= 5 * (len(logs) - 1) + 2
    answer = ask(messages, *edits)
    thinking, uses = answer.context_management.applied_edits
    assert (thinking.cleared_thinking_turns, uses.cleared_tool_uses) == (len(logs) - 1, len(logs) - 1)
    computed, reused = answer.usage.input_tokens, answer.usage.cache_read_input_tokens
    assert computed + reused == counted.input_tokens < exact.input_tokens - 200
    # What is new: the newest answer's last token, and the question.
    assert computed < 40
    with client.beta.messages.stream(
        model="tiny", max_tokens=8, messages=messages, betas=[], context_management={"edits": edits}
    ) as stream:
        final = stream.get_final_message()
    assert final.context_management == answer.context_management
    assert final.usage.cache_read_input_tokens == computed + reused - 1
    # A history that the model cannot take by itself.
    long = [{**messages[2], "content": [{**messages[2]["content"][0], "content": "word " * 3000}]}]
    with pytest.raises(anthropic.BadRequestError, match="2048"):
        ask([*messages[:2], *long, *messages[3:]])
    _, uses = ask([*messages[:2], *long, *messages[3:]], *edits).context_management.applied_edits
    assert uses.cleared_input_tokens > 3000
    with pytest.raises(anthropic.BadRequestError, match="There is no edit 'compact_20260112' here"):
        ask(messages, {"type": "compact_20260112"})


SIDES = ("north", "east", "south")
