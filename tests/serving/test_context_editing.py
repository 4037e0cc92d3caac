"""Context editing: what vLLM sees of a history, and what a client is told of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.serving.front_end import MOST, FrontEnd, words_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def use(number: int, tool: str = "read") -> dict[str, Any]:
    """An assistant's message that thinks three words and uses a tool."""
    call = {"type": "tool_use", "id": f"use_{number}", "name": tool, "input": {"path": f"{number}.py and more"}}
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": "I shall look", "signature": "x"}, call]}


def result(number: int, words: int) -> dict[str, Any]:
    """A tool's result of so many words."""
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": f"use_{number}", "content": "word " * words}],
    }


def history(*words: int, tools: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A question, and one use of a tool after the other with results of so many words."""
    names = [*tools, *["read"] * len(words)]
    pairs = [(use(number, names[number]), result(number, size)) for number, size in enumerate(words)]
    return [{"role": "user", "content": "What is it about?"}, *(message for pair in pairs for message in pair)]


def asked(front: FrontEnd, messages: Any, *edits: Any, path: str = MESSAGES, **more: Any) -> Any:
    """The answer to a request, of which vLLM gets everything but the edits."""
    front.answer = {"type": "message", "content": [], "usage": {}} if path == MESSAGES else {"input_tokens": 0}
    body = {"model": "base", "messages": messages, "context_management": {"edits": list(edits)}} | more
    before = copy.deepcopy(body)
    status, answer = front.post(path, body)
    assert status == 200 and body == before and front.asked[-1][0] == path
    assert front.said(path).keys() == body.keys() - {"context_management"}
    return answer


def applied(*args: Any, **more: Any) -> Any:
    """The edits that were applied."""
    return asked(*args, **more)["context_management"]["applied_edits"]


def emptied(messages: list[dict[str, Any]], results: set[int], inputs: set[int] = frozenset()) -> list[dict[str, Any]]:
    """The messages without some results and inputs."""
    edited = copy.deepcopy(messages)
    for number in results:
        edited[2 + 2 * number]["content"][0]["content"] = ""
    for number in inputs:
        edited[1 + 2 * number]["content"][1]["input"] = {}
    return edited


def tool_uses(trigger: int = 2, keep: int = 1, kind: str = "tool_uses", **more: Any) -> dict[str, Any]:
    """An edit that clears tool results."""
    kept = {"type": "tool_uses", "value": keep}
    return {"type": TOOL_USES, "trigger": {"type": kind, "value": trigger}, "keep": kept, **more}


def at_least(tokens: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": tokens}


def test_old_results_are_emptied_beyond_the_trigger() -> None:
    front = FrontEnd()
    short, long = history(10, 20), history(10, 20, 30, 0)
    assert applied(front, short, tool_uses()) == []
    assert front.said(MESSAGES)["messages"] == short and len(front.asked) == 1  # nothing had to be counted
    cleared = {"type": TOOL_USES, "cleared_tool_uses": 3, "cleared_input_tokens": 60}
    assert applied(front, long, tool_uses()) == [cleared]
    assert front.said(MESSAGES)["messages"] == emptied(long, {0, 1, 2})
    assert applied(front, long, tool_uses(keep=0))[0]["cleared_tool_uses"] == 3  # the last one is empty
    assert applied(front, long, tool_uses(keep=9)) == []
    # More was said: the same is cleared, and more.
    longer = [*long, use(4), result(4, 5)]
    assert applied(front, longer, tool_uses())[0]["cleared_tool_uses"] == 3
    assert front.said(MESSAGES)["messages"] == emptied(longer, {0, 1, 2, 3})


def test_what_is_counted_are_the_tokens_of_the_whole_history() -> None:
    front = FrontEnd()
    messages = history(100, 50, 25, 5)
    answer = asked(front, messages, path=COUNT)
    assert answer["context_management"] == {"original_input_tokens": answer["input_tokens"]}
    whole = words_of(messages)
    for trigger, number in ((whole - 1, 3), (whole, 0)):
        told = applied(front, messages, tool_uses(trigger, kind="input_tokens"))
        assert [edit["cleared_tool_uses"] for edit in told] == [number] * bool(number)
    for least, number in ((175, 3), (176, 0)):
        told = applied(front, messages, tool_uses(clear_at_least=at_least(least)))
        assert [edit["cleared_input_tokens"] for edit in told] == [175] * bool(number)
        assert front.said(MESSAGES)["messages"] == (emptied(messages, {0, 1, 2}) if number else messages)
    # The whole history may be more than the model takes. Then all is cleared that may be.
    long = history(MOST, 50, 25, 5)
    told = applied(front, long, tool_uses(10**6, keep=3, kind="input_tokens"))
    assert told == []
    told = applied(front, history(600, MOST, 25), tool_uses(10**6, keep=2, kind="input_tokens"))
    assert told == [{"type": TOOL_USES, "cleared_tool_uses": 1, "cleared_input_tokens": 600}]
    # By default 100,000 tokens are too many, and three tool uses stay.
    assert applied(front, messages, {"type": TOOL_USES}) == []
    huge = history(100_000, *[1] * 4)
    assert applied(front, huge, {"type": TOOL_USES}) == [
        {"type": TOOL_USES, "cleared_tool_uses": 2, "cleared_input_tokens": 100_001}
    ]
    assert front.said(MESSAGES)["messages"] == emptied(huge, {0, 1})


def test_tools_are_excluded_and_inputs_cleared_by_name() -> None:
    front = FrontEnd()
    messages = history(10, 20, 30, 40, tools=("note", "read", "write"))
    assert applied(front, messages, tool_uses(exclude_tools=["note"]))[0]["cleared_tool_uses"] == 2
    assert front.said(MESSAGES)["messages"] == emptied(messages, {1, 2})
    (told,) = applied(front, messages, tool_uses(clear_tool_inputs=True))
    assert front.said(MESSAGES)["messages"] == emptied(messages, {0, 1, 2}, {0, 1, 2})
    assert told == {"type": TOOL_USES, "cleared_tool_uses": 3, "cleared_input_tokens": 60 + 3 * 4}
    applied(front, messages, tool_uses(clear_tool_inputs=["write"]))
    assert front.said(MESSAGES)["messages"] == emptied(messages, {0, 1, 2}, {2})


def test_old_thinking_goes_by_turns() -> None:
    """A turn begins with what the user says, not with a tool's result."""
    front = FrontEnd()
    again = {"role": "user", "content": [{"type": "text", "text": "And now?"}]}
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    messages = [*history(1, 1), again, use(2), result(2, 1), {"role": "user", "content": "Well?"}, redacted, again]
    messages.append(use(3))

    def without(*places: int) -> list[dict[str, Any]]:
        edited = copy.deepcopy(messages)
        for place in places:
            edited[place]["content"] = [one for one in edited[place]["content"] if "thinking" not in one["type"]]
        return edited

    for keep, number, places in (
        (None, 3, (1, 3, 6, 9)),
        ({"type": "thinking_turns", "value": 1}, 3, (1, 3, 6, 9)),
        ({"type": "thinking_turns", "value": 2}, 2, (1, 3, 6)),
        ({"type": "thinking_turns", "value": 3}, 1, (1, 3)),
        ({"type": "thinking_turns", "value": 4}, 0, ()),
        ({"type": "all"}, 0, ()),
        ("all", 0, ()),
    ):
        edit = {"type": THINKING} | ({} if keep is None else {"keep": keep})
        tokens = 3 * len(set(places) - {9})  # what is redacted has no text
        cleared = {"type": THINKING, "cleared_thinking_turns": number, "cleared_input_tokens": tokens}
        assert applied(front, messages, edit) == [cleared] * bool(number)
        assert front.said(MESSAGES)["messages"] == without(*places)
    both = applied(front, messages, {"type": THINKING}, tool_uses())
    assert [edit["type"] for edit in both] == [THINKING, TOOL_USES]


def test_streams_and_counts_tell_it_too() -> None:
    front, messages = FrontEnd(), history(10, 20, 30)
    front.events = [
        {"type": "message_start", "message": {"usage": {}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": '"message_delta"\n\n'}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    events = asked(front, messages, tool_uses(), stream=True)
    cleared = {"type": TOOL_USES, "cleared_tool_uses": 2, "cleared_input_tokens": 30}
    told = {"context_management": {"applied_edits": [cleared]}}
    assert events == [*front.events[:2], front.events[2] | told, front.events[3]]
    front.answer = {}
    counted = asked(front, messages, tool_uses(), path=COUNT)
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"] + 30}


@pytest.mark.full
def test_the_anthropic_client_reads_the_answers() -> None:
    beta = pytest.importorskip("anthropic.types.beta", reason="The Anthropic client is not installed.")
    front, messages = FrontEnd(), history(10, 20, 30)
    edits = [{"type": THINKING}, tool_uses()]
    usage = {"input_tokens": 1, "output_tokens": 1}
    answer = asked(front, [*messages, {"role": "user", "content": "Go on."}, use(4)], *edits)
    answer |= {"id": "msg_1", "role": "assistant", "model": "base", "usage": usage}
    message = beta.BetaMessage.model_validate(answer)
    assert [type(edit).__name__ for edit in message.context_management.applied_edits] == [
        "BetaClearThinking20251015EditResponse",
        "BetaClearToolUses20250919EditResponse",
    ]
    front.events = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}]
    (event,) = asked(front, messages, *edits, stream=True)
    delta = beta.BetaRawMessageDeltaEvent.model_validate(event)
    assert delta.context_management.applied_edits[0].cleared_tool_uses == 2
    counted = beta.BetaMessageTokensCount.model_validate(asked(front, messages, *edits, path=COUNT))
    assert counted.context_management.original_input_tokens == counted.input_tokens + 30


def test_wrong_edits_are_refused_in_a_sentence() -> None:
    front = FrontEnd()
    for value, words in (
        ([], "write it so"),
        ({"edit": []}, "write it so"),
        ({"edits": [7]}, "write it so"),
        ({"edits": [{"type": "compact_20260112"}]}, "There is no edit 'compact_20260112' here"),
        ({"edits": [{"type": "x" * 10_000}]}, "There is no edit 'xxx"),
        ({"edits": [{}]}, "There is no edit 'None' here"),
        ({"edits": [{"type": TOOL_USES}] * 2}, "several edits of one type"),
        ({"edits": [tool_uses(more=1)]}, "has no option 'more'"),
        ({"edits": [tool_uses(-1)]}, "trigger is something else than"),
        ({"edits": [tool_uses(keep=True)]}, "keep is something else than"),
        ({"edits": [tool_uses(kind="turns")]}, "trigger is something else than"),
        ({"edits": [tool_uses(clear_at_least=5)]}, "clear_at_least is something else than"),
        ({"edits": [tool_uses(exclude_tools="read")]}, "exclude_tools is no list"),
        ({"edits": [tool_uses(clear_tool_inputs=3)]}, "clear_tool_inputs is no list"),
        ({"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}]}, "at least 1"),
    ):
        for path in (MESSAGES, COUNT):
            status, answer = front.post(path, {"model": "base", "messages": [], "context_management": value})
            sentence = answer["error"]["message"]
            assert status == 400 and answer["type"] == "error" and words in sentence
            assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 400
    assert front.asked == []


def test_other_requests_reach_vllm_as_they_are() -> None:
    edits = {"edits": [tool_uses()]}
    for front, body in (
        (FrontEnd("adakv(snapkv, bytes=0.25)"), {"messages": history(9, 9, 9), "context_management": edits}),
        (FrontEnd(), {"messages": history(9, 9, 9)}),
    ):
        assert front.post(MESSAGES, body)[0] == 200 and front.said(MESSAGES) == body
    front = FrontEnd()
    for messages in (None, 7, "text", [7, {"content": 7}, {"role": "user", "content": [7, {"type": "tool_result"}]}]):
        asked(front, messages, tool_uses(0, 0), {"type": THINKING})
        assert front.said(MESSAGES)["messages"] == messages
    assert front.post(MESSAGES, {"messages": [], "context_management": None}) == (200, front.answer)
