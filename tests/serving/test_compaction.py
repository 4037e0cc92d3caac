"""Compaction items: what they stand for reaches vLLM, nothing else does, and clients get what their schemas say."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import tracemalloc
import zlib
from typing import Any

import pytest

from keepset.serving.compaction import MAX_COMPACTIONS, MAX_CONTENT, VERSION
from keepset.serving.middleware import MAX_BODY
from tests.serving.front_end import FrontEnd
from tests.tiers import FULL

RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"


def said(role: str, text: str) -> dict[str, Any]:
    """A message as codex writes it."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


RULES, PLACE = (
    said("developer", "Ask before you write."),
    said("user", "<environment_context>/home</environment_context>"),
)
CALL = {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "a.py\nb.py"}
HISTORY = [RULES, PLACE, said("user", "What is here?"), CALL, RESULT, said("assistant", "Two files.")]
NEXT = said("user", "Which is larger?")


def compacted(front: FrontEnd, items: Any = HISTORY, key: str = "", model: str = "base") -> dict[str, Any]:
    """The compaction item of some input."""
    status, answer = front.post(COMPACT, {"model": model, "input": items}, key)
    assert status == 200
    (item,) = answer["output"]
    return dict(item)


def seen(front: FrontEnd, items: list[Any], key: str = "", model: str = "base") -> Any:
    """The input that vLLM gets in place of another."""
    assert front.post(RESPONSES, {"model": model, "input": items}, key)[0] == 200
    return front.said(RESPONSES)["input"]


def refusal(front: FrontEnd, body: Any, key: str = "", path: str = RESPONSES) -> str:
    """The sentence of a refusal, of which vLLM sees nothing."""
    before = len(front.asked)
    status, answer = front.post(path, body, key)
    sentence = answer["error"]["message"]
    assert status == 400 and len(front.asked) == before
    assert sentence.endswith(".") and "\n" not in sentence and ". " not in sentence and len(sentence) < 400
    return str(sentence)


def test_an_item_stands_for_all_that_was_said() -> None:
    front = FrontEnd()
    item = compacted(front)
    assert front.asked == []  # nothing is computed
    assert seen(front, [item, NEXT]) == [*HISTORY, NEXT]
    again = compacted(front, [item, NEXT])
    assert seen(front, [again]) == [*HISTORY, NEXT]
    assert seen(front, [compacted(front, "What is here?"), NEXT]) == [
        {"role": "user", "content": "What is here?"},
        NEXT,
    ]
    odd = [said("user", "\ud800 \u2028 ü \x00"), {"type": "message", "role": "user", "content": "plain"}]
    assert seen(front, [compacted(front, odd)]) == odd


def test_items_in_front_that_it_holds_are_left_out() -> None:
    """Codex repeats the user's messages there, and what the SDK returns has ids."""
    front = FrontEnd()
    item, more = compacted(front), said("system", "Be brief.")
    repeated = [PLACE | {"id": "msg_1", "status": "completed"}, {"role": "user", "content": "What is here?"}, CALL]
    assert seen(front, [more, *repeated, item, NEXT]) == [more, *HISTORY, NEXT]
    assert seen(front, [more, item, *repeated]) == [more, *HISTORY, *repeated]
    newer = compacted(front, [item, NEXT])
    assert seen(front, [*HISTORY, item, NEXT, newer, RULES]) == [*HISTORY, NEXT, RULES]


def test_a_codex_exchange() -> None:
    """As codex writes and reads it: one item, whatever is before it, and then `response.completed`."""
    front = FrontEnd()
    request = {"model": "base", "instructions": "You are codex.", "store": False, "stream": True, "include": []}
    request |= {"tools": [{"type": "function", "name": "shell", "parameters": {}}], "tool_choice": "auto"}
    request |= {"parallel_tool_calls": False, "prompt_cache_key": "thread"}
    status, events = front.post(RESPONSES, request | {"input": [*HISTORY, {"type": "compaction_trigger"}]})
    assert status == 200 and front.asked == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    *_, completed = events
    assert completed["type"] == "response.completed" and completed["response"]["output"] == done
    assert completed["response"]["id"] and completed["response"]["usage"]["total_tokens"] == 0
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    (item,) = done
    # What codex keeps: the user's own messages, the item, and the context of the session anew.
    kept = [said("user", "What is here?"), {"type": "compaction", "encrypted_content": item["encrypted_content"]}]
    front.events = [{"type": "response.completed", "response": {"id": "1", "output": [], "usage": None}}]
    _, events = front.post(RESPONSES, request | {"input": [*kept, RULES, PLACE, NEXT]})
    assert events == front.events
    assert front.said(RESPONSES) == request | {"input": [*HISTORY, RULES, PLACE, NEXT]}
    # In the middle of a turn codex puts the context before the newest message.
    assert seen(front, [RULES, PLACE, *kept]) == HISTORY
    older = {"type": "compaction_summary", "encrypted_content": item["encrypted_content"]}
    assert seen(front, [older, NEXT]) == [*HISTORY, NEXT]


REQUIRED = {"id", "object", "output", "created_at", "usage"}
REQUIRED_OF_RESPONSES = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""
"""What Open Responses requires of the two resources, in its schema of 2026-04-24."""


def test_answers_have_what_the_schemas_require() -> None:
    front = FrontEnd()
    answer, response, events = told(front)
    assert answer.keys() == REQUIRED and answer["object"] == "response.compaction"
    assert response.keys() == set(REQUIRED_OF_RESPONSES.split()) and response["temperature"] == 0.5
    assert events[-1]["response"].keys() == response.keys()
    assert "names no model" in refusal(front, {"input": HISTORY}, path=COMPACT)


@pytest.mark.full
def test_the_openai_client_reads_the_answers() -> None:
    responses = pytest.importorskip("openai.types.responses", reason="The OpenAI client is not installed.")
    from pydantic import TypeAdapter

    answer, response, events = told(FrontEnd())
    responses.CompactedResponse.model_validate(answer, strict=True)
    responses.Response.model_validate(response)
    validator = TypeAdapter(responses.ResponseStreamEvent)
    kinds = [type(validator.validate_python(event)).__name__ for event in events]
    assert kinds == [
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseOutputItemDoneEvent",
        "ResponseCompletedEvent",
    ]


def told(front: FrontEnd) -> tuple[Any, Any, Any]:
    """What is answered to a compaction, to a trigger, and to a trigger in a stream."""
    asked = {"model": "base", "input": [*HISTORY, {"type": "compaction_trigger"}], "temperature": 0.5}
    _, answer = front.post(COMPACT, {"model": "base", "input": HISTORY, "instructions": "Be brief."})
    _, response = front.post(RESPONSES, asked)
    _, events = front.post(RESPONSES, asked | {"stream": True})
    return answer, response, events


def test_an_answer_beyond_the_threshold_has_an_item() -> None:
    """Which holds the answer, too; the next comes when as much is new again."""
    reply = said("assistant", "Zoë said: b.py is larger.")
    managed = {"model": "base", "context_management": [{"type": "compaction", "compact_threshold": 100}]}

    def answered(items: list[Any], tokens: int, stream: bool) -> list[Any]:
        front.answer = {"id": "1", "output": [reply], "usage": {"input_tokens": tokens, "total_tokens": tokens + 5}}
        front.events = [
            {
                "type": "response.output_text.delta",
                "delta": 'A "response.completed"\n\nin a text',
                "sequence_number": 7,
            },
            {"type": "response.completed", "response": front.answer, "sequence_number": 8},
        ]
        status, answer = front.post(RESPONSES, managed | {"input": items, "stream": stream})
        assert status == 200 and "context_management" not in front.said(RESPONSES)
        if not stream:
            return list(answer["output"])
        assert answer[0] == front.events[0]
        told = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        output = answer[-1]["response"]["output"]
        assert [event["sequence_number"] for event in answer] == list(range(7, 9 + 2 * len(told)))
        assert output == [reply, *told]
        assert [event["output_index"] for event in answer[1:-1]] == [1] * (2 * len(told))
        return list(output)

    for stream in (False, True):
        for size in (1, 7, 10**6):
            front = FrontEnd(size=size)
            assert answered(HISTORY, 100, stream) == [reply]
            output = answered(HISTORY, 101, stream)
            assert output[0] == reply and len(output) == 2
            chained = [*HISTORY, *output, NEXT]
            assert answered(chained, 206, stream) == [reply]
            assert front.said(RESPONSES)["input"] == [*HISTORY, reply, NEXT]
            assert len(answered(output[1:], 207, stream)) == 2
            assert front.said(RESPONSES)["input"] == [*HISTORY, reply]
    _, answer = front.post(RESPONSES, managed | {"input": HISTORY, "previous_response_id": "resp_1"})
    assert answer["output"] == [reply]  # vLLM has stored what was said, and goes on with it
    for entry in (
        {"type": "truncation"},
        {"type": "compaction", "compact_threshold": -1},
        {"type": "compaction", "n": 1},
    ):
        assert "write it so" in refusal(front, {"model": "base", "input": HISTORY, "context_management": [entry]})


def test_what_cannot_be_compacted_is_refused() -> None:
    front = FrontEnd()
    item, trigger = compacted(front), {"type": "compaction_trigger"}
    for path, body, sentence in (
        (COMPACT, {"input": []}, "send what was said"),
        (COMPACT, {}, "send what was said"),
        (COMPACT, {"input": [7]}, "send what was said"),
        (COMPACT, {"input": HISTORY, "model": "other"}, "no model 'other' here: ask for one of base, adapter"),
        (COMPACT, {"input": HISTORY, "previous_response_id": "resp_1"}, "send all that was said as input"),
        (COMPACT, {"input": [said("user", "a" * MAX_CONTENT)]}, "compact at most"),
        (RESPONSES, {"input": [trigger]}, "send what was said"),
        (RESPONSES, {"input": [trigger, NEXT]}, "not the last one"),
        (RESPONSES, {"input": [NEXT, trigger], "previous_response_id": "resp_1"}, "send all that was said as input"),
        (RESPONSES, {"input": [item, NEXT], "previous_response_id": "resp_1"}, "leave one of them out"),
        (RESPONSES, {"input": [item] * (MAX_COMPACTIONS + 1)}, "257 compaction items: send the newest one"),
    ):
        assert sentence in refusal(front, {"model": "base"} | body, path=path)


def test_other_requests_reach_vllm_as_they_are() -> None:
    plain = FrontEnd("adakv(snapkv, bytes=0.25)")
    item = {"type": "compaction", "encrypted_content": "?"}
    for front, path, body in (
        (plain, RESPONSES, {"input": [item]}),
        (plain, COMPACT, {"input": HISTORY}),
        (FrontEnd(), RESPONSES, {"input": HISTORY}),
        (FrontEnd(), RESPONSES, {"input": "What is compaction?", "model": "other", "temperature": 0.1}),
        (FrontEnd(), "/v1/chat/completions", {"messages": [item]}),
    ):
        assert front.post(path, body)[0] == 200 and front.said(path) == body


def forged(content: bytes, key: str = "", version: int = VERSION) -> str:
    """An item as the server makes it, with any content."""
    compressor = zlib.compressobj(9, wbits=-15)
    packed = compressor.compress(content) + compressor.flush()
    secret = hashlib.sha256(b"keepset compaction " + key.encode()).digest()
    digest = hmac.digest(secret, bytes([version]) + packed, "sha256")
    return base64.urlsafe_b64encode(bytes([version]) + digest + packed).decode()


def hostile(number: int, item: str, draw: random.Random) -> Any:
    """One of several kinds of wrong items."""
    place = draw.randrange(len(item))
    content = {"model": "base", "tokens": 0, "items": HISTORY}
    kinds = [
        lambda: item[:place],
        lambda: item[:place] + draw.choice("AZ09-_") * 2 + item[place + 1 :],
        lambda: item[:place] + draw.choice("\n é!\ud800") + item[place:],
        lambda: item[: place // 4 * 4] + item[place // 4 * 4 + 4 :] if place < len(item) - 8 else item[4:],
        lambda: forged(json.dumps(content).encode(), "other"),
        lambda: forged(json.dumps(content | {"model": "adapter"}).encode(), "one"),
        lambda: forged(json.dumps(content).encode(), "one", version=draw.choice([0, 2, 255])),
        lambda: draw.choice([None, 7, [item], {}, "", True, "A" * 10_000_000, "A" * 40_000_000]),
        lambda: forged(draw.choice([b"", b"[]", b"7", b"\xff", b"{", b"[" * 100_000, b'{"items": []}']), "one"),
        lambda: forged(
            json.dumps(content | {"items": draw.choice([[7], "text", [{"type": "compaction"}]])}).encode(), "one"
        ),
        lambda: forged(json.dumps(content | {"items": [{}] * 70_000}).encode(), "one"),
    ]
    return kinds[number % len(kinds)]()


def test_hostile_items_are_refused_in_a_sentence() -> None:
    front = FrontEnd(keys=True)
    item = compacted(front, key="one")["encrypted_content"]
    draw = random.Random(0)
    for number in range(220 if FULL else 22):
        wrong = hostile(number, item, draw)
        if wrong != item:
            body = {"model": "base", "input": [{"type": "compaction", "encrypted_content": wrong}, NEXT]}
            refusal(front, body, key="one")
    good = [{"type": "compaction", "encrypted_content": item}, NEXT]
    for key, model, words in (("two", "base", "another API key"), ("one", "adapter", "for the model 'base'")):
        assert words in refusal(front, {"model": model, "input": good}, key=key)
    assert "version 2" in refusal(
        front,
        {"model": "base", "input": [{"type": "compaction", "encrypted_content": forged(b"", "one", 2)}]},
        key="one",
    )
    assert seen(front, good, key="one") == [*HISTORY, NEXT]
    # The forger knows how: without the faults its item is right.
    right = forged(json.dumps({"model": "base", "tokens": 0, "items": HISTORY}).encode(), "one")
    assert seen(front, [{"type": "compaction", "encrypted_content": right}], key="one") == HISTORY


@pytest.mark.full
def test_a_small_item_cannot_hold_much() -> None:
    """Nor can many of them."""
    front = FrontEnd()
    bomb = forged(b" " * 2**28)
    half = forged(
        json.dumps({"model": "base", "tokens": 0, "items": [said("user", "a" * (MAX_CONTENT // 2))]}).encode()
    )
    assert len(bomb) < 400_000 and len(half) < 20_000
    for texts in ([bomb], [half, half]):
        body = {"model": "base", "input": [{"type": "compaction", "encrypted_content": text} for text in texts]}
        tracemalloc.start()
        try:
            assert f"hold more than {MAX_CONTENT} bytes" in refusal(front, body)
            assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BODY
        finally:
            tracemalloc.stop()


@pytest.mark.full
def test_an_item_has_at_most_3_bytes_a_token() -> None:
    """Chats of essays, told to an assistant that answers with tools."""
    from transformers import AutoTokenizer

    from keepset.lab.embedded import embedded_folder
    from keepset.lab.texts import essay, essays

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    front = FrontEnd()
    for name in essays()[:4]:
        parts = essay(name).split("\n\n")[:60]
        items: list[Any] = []
        for number, part in enumerate(parts):
            call = CALL | {"call_id": f"call_{number}"}
            items += [said("user", part), call, RESULT | {"call_id": f"call_{number}", "output": part[:200]}]
        text = "\n".join(parts) + "\n".join(item.get("output", "") + item.get("arguments", "") for item in items)
        tokens = len(tokenizer(text)["input_ids"])
        size = len(compacted(front, items)["encrypted_content"])
        assert size <= 3 * tokens
