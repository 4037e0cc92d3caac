"""The server's middleware, without a server: what it answers, rewrites and passes on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from keepset import KeepsetError
from keepset.contexts import file as context_files
from keepset.serving import conversations
from keepset.serving.middleware import HONOURED, RequestMiddleware
from keepset.vllm import contexts as served_contexts
from keepset.vllm import request_options, stats
from keepset.vllm.questions import Question, question_of
from keepset.vllm.request_options import MAX_BYTES, MAX_RANGES, RequestOptions, from_signed, parse_options
from tests.hf.damage import flipped
from tests.vllm.test_routes import call, text_of

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def signing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(request_options.SIGNING_KEY, request_options.new_key())


@pytest.fixture(scope="module")
def folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contexts")
    for name, recipe in (("manual", "knorm(keep=0.25)"), ("goes on", "knorm(keep=40, every=8)")):
        cache = keepset.Cache(tiny_model, recipe)
        with torch.no_grad():
            tiny_model(torch.arange(100)[None], past_key_values=cache)
        cache.save(folder / f"{name}.safetensors")
    content = (folder / "manual.safetensors").read_bytes()
    (folder / "flipped.safetensors").write_bytes(flipped(content, "layers.0.columns.keys"))
    return folder


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder for counters and refusals."""
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    stats._array.cache_clear()
    yield
    stats._array.cache_clear()


class Inner:
    """A server that remembers what it was told; its `answer` is what it is asked to say of a request."""

    def __init__(self, answer: Any = None) -> None:
        self.bodies: list[Any] = []
        self.answer = answer or (lambda body: (200, [b"{}"]))

    def said(self) -> RequestOptions:
        """The options of the newest request, as the engine gets them."""
        return replace(from_signed(self.bodies[-1]["vllm_xargs"]["keepset"]), ticket="")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        gone = asyncio.ensure_future(receive())  # vLLM waits for the client to go while it answers
        await asyncio.sleep(0)
        assert not gone.done()
        gone.cancel()
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        self.bodies.append(json.loads(message["body"]))
        status, pieces = self.answer(self.bodies[-1])
        await send({"type": "http.response.start", "status": status, "headers": []})
        for number, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < len(pieces)})


Start = Callable[..., Any]


@pytest.fixture
def model_config(tiny_model: PreTrainedModel) -> SimpleNamespace:
    """The part of vLLM's configuration that says what the model is."""
    config = tiny_model.config
    sizes = {"get_head_size": lambda: config.head_dim, "get_vocab_size": lambda: config.vocab_size}
    named = {"model": config.name_or_path, "architecture": "LlamaForCausalLM", "hf_text_config": config}
    named |= {"hf_config": config, "quantization": None}
    return SimpleNamespace(**named, **sizes, dtype=torch.float32, max_model_len=512)


@pytest.fixture
def start(folder: Path, model_config: SimpleNamespace) -> Start:
    """Starts servers of the model: what asks one, for status and answer; all messages go to `answers`."""

    def started(
        inner: Any,
        folder: Path = folder,
        answers: list[Any] | None = None,
        client: Any = None,
        engines: int = 1,
        **more: Any,
    ) -> Any:
        said = {"keepset_contexts": str(folder), "keepset_signed": True, **more}
        parallel_config = SimpleNamespace(data_parallel_size=engines)
        vllm_config = SimpleNamespace(
            additional_config=said, model_config=model_config, parallel_config=parallel_config
        )
        state = SimpleNamespace(vllm_config=vllm_config, engine_client=client)
        middleware, app = RequestMiddleware(inner), SimpleNamespace(state=state)

        def asked(method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
            text = json.dumps(body).encode() if not isinstance(body, bytes) else body
            sent = call(middleware, method, path, text, key, app=app)
            if answers is not None:
                answers.extend(sent)
            return sent[0]["status"], json.loads(text_of(sent))

        return asked

    return started


def posted(ask: Any, words: Any, key: str = "") -> tuple[int, str]:
    """The status of a request with these words, and the sentence of a refusal."""
    status, answer = ask("POST", COMPLETIONS, {"prompt": "", "keepset": words}, key)
    return status, answer["error"]["message"] if status >= 400 else ""


def test_what_is_said_goes_on_signed_as_an_argument_of_vllm(start: Start) -> None:
    inner = Inner()
    ask = start(inner)
    for path in HONOURED:
        request = {"prompt": "What?", "keepset": {"context": "manual"}, "vllm_xargs": {"more": 1}}
        assert ask("POST", path, request)[0] == 200
        assert inner.bodies[-1].keys() == {"prompt", "vllm_xargs"} and inner.bodies[-1]["vllm_xargs"]["more"] == 1
        assert inner.said() == RequestOptions(context="manual")
        assert ask("POST", path, {"prompt": "What?", "keepset": {"off": True}})[0] == 200
        assert inner.said() == RequestOptions(off=True)
        assert ask("POST", path, {"prompt": "What?"})[0] == 200
        assert inner.bodies[-1] == {"prompt": "What?"}


def test_why_the_engine_refuses_is_the_answer(folder: Path, start: Start, counted: None) -> None:
    error = b'{"error": {"message": "Internal server error", "code": 500}}'
    chunks = [b'data: {"choices": []}\n\n', b"data: %b\n\n" % error, b"data: [DONE]"]

    def refuse(body: Any, status: int, pieces: list[bytes]) -> Any:
        ticket = from_signed(body["vllm_xargs"]["keepset"]).ticket
        stats.refused(ticket, f"Context {str(folder / 'saved' / 'one' / 'chat@12-ab.safetensors')!r} is too long.")
        return status, pieces

    for status, said in ((500, [error]), (200, chunks[1:])):
        ask = start(Inner(partial(refuse, status=status, pieces=said)))
        assert posted(ask, {"off": True}) == (400, "Context 'chat' is too long.")
    answers: list[Any] = []
    ask = start(Inner(partial(refuse, status=200, pieces=chunks)), answers=answers)
    with pytest.raises(json.JSONDecodeError):
        posted(ask, {"off": True})
    assert [piece["type"] for piece in answers] == ["http.response.start"] + ["http.response.body"] * 2
    assert json.loads(answers[2]["body"].removeprefix(b"data: "))["error"]["message"] == "Context 'chat' is too long."
    assert answers[2]["more_body"] is False
    # An error that is not the engine's refusal stays what it is.
    assert posted(start(Inner(lambda body: (500, [error]))), {"off": True})[0] == 500


def test_no_client_sees_a_signature(start: Start) -> None:
    inner = Inner(lambda body: (400, [json.dumps(body).encode()]))
    status, answer = start(inner)("POST", COMPLETIONS, {"keepset": {"off": True}})
    signature = inner.bodies[-1]["vllm_xargs"]["keepset"].split()[0]
    assert status == 400 and len(signature) == 64 and signature not in json.dumps(answer)


def test_only_the_front_ends_signature_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = RequestOptions(save="a", owner="1" * 32).to_signed()
    assert from_signed(sealed) == RequestOptions(save="a", owner="1" * 32)
    signature, _, text = sealed.partition(" ")
    forged = [text, f" {text}", f"{signature} {text.replace('1', '2')}", f"{signature[:-1]} {text}", signature]
    for said in (*forged, "", "\ud800 " + text, 7, None, [text], {"save": "a"}):
        with pytest.raises(KeepsetError, match="does not check it"):
            from_signed(said)
    for words in ({"save": "a", "owner": "1" * 32}, {"ticket": "a"}, json.dumps({"owner": "everybody"})):
        with pytest.raises(KeepsetError, match=r"leave (owner|ticket) out"):
            parse_options(words)
    monkeypatch.setenv(request_options.SIGNING_KEY, request_options.new_key())
    with pytest.raises(KeepsetError, match="does not check it"):
        from_signed(sealed)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"protect": [[2 * i, 2 * i + 1] for i in range(MAX_RANGES + 1)]}, f"give at most {MAX_RANGES}"),
        ({"protect": [[0, 1]] * 20_000}, f"give at most {MAX_BYTES}"),
        ('{"keep": 5' + " " * MAX_BYTES + "}", f"give at most {MAX_BYTES}"),
        ({"save": "a" * 5000}, "has 5000 characters"),
        ({"keep": 10**30}, "64 bits"),
        ({"keep": float("inf")}, "64 bits"),
        ({"keep": float("nan")}, "64 bits"),
        ({"keep": "half"}, "give a number"),
        ({"bytes": 10**30}, "bytes is no number of 64 bits"),
        ({"bytes": float("nan")}, "bytes is no number of 64 bits"),
        ({"bytes": "half"}, "bytes is 'half': give a number"),
        ({"bytes": [0.5]}, "give a number"),
        ({"forget": 1}, "forget is 1: give true or false"),
        ({"off": True, "bytes": 0.5}, "with off nothing is dropped: leave keep, bytes and protect out"),
        ({"context": "manual", "bytes": 0.5}, "a context has a recipe of its own: leave keep, bytes,"),
        ({"keep": True}, "give a number"),
        ({"off": 1}, "off is 1: give true or false"),
        ({"context": 7}, "context is 7: give a name"),
        ({"off": True, "keep": 3}, "with off nothing is dropped: leave keep, bytes and protect out"),
        ({"context": "manual", "keep": 3}, "a context has a recipe of its own"),
        *((said, "give one or more of") for said in ([1], 7, "[" * 5000, {}, None, "manual")),
        (
            {"kepe": 512},
            "keepset has no option 'kepe'; did you mean 'keep'\\? There are: bytes, context, conversation, forget",
        ),
        ({"more": 1}, "keepset has no option 'more'"),
        ({"x" * 5000: 1}, "keepset has no option 'xxx"),
        ({"protect": [[0, 2**63]]}, "no pair of tokens"),
        ({"protect": [[0, 1.5]]}, "no pair of tokens"),
        ({"protect": {}}, "give ranges of tokens"),
        ({"protect": 7}, "give ranges of tokens"),
    ],
)
def test_a_request_says_no_more_than_is_right(said: Any, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence) as refused:
        parse_options(said)
    assert len(str(refused.value)) < 500


def test_budgets_are_checked_against_the_servers_recipe(start: Start) -> None:
    plain, every = (start(Inner(), **more) for more in ({}, {"keepset": "snapkv(keep=99, every=9)"}))
    assert "compresses no prompts" in posted(plain, {"keep": 0.5})[1]
    assert "does not go with every=9" in posted(every, {"keep": 0.5})[1]
    assert "does not go with every=9" in posted(every, {"bytes": 0.5})[1]
    assert "both say how much stays" in posted(every, {"bytes": 0.5, "keep": 9})[1]
    assert "bytes=1.5 is out of range" in posted(every, {"bytes": 1.5})[1]
    assert posted(every, {"keep": 70, "protect": [[0, 5]]})[0] == 200


def test_nobody_says_whose_contexts_they_are(start: Start) -> None:
    ask = start(Inner(), keepset_save_bytes=10**6)
    assert posted(ask, {"save": "a", "owner": served_contexts.owner_of("secret")})[0] == 400
    assert ask("POST", COMPLETIONS, {"vllm_xargs": {"keepset": '{"save": "a"}'}})[0] == 400
    assert posted(ask, {"save": "../a"})[0] == 400
    assert posted(ask, {"save": "a"})[0] == 200


def test_who_keeps_conversations_has_no_contexts(start: Start) -> None:
    for said in ({"save": "a"}, {"context": "a"}):
        assert posted(start(Inner(), **TALKS), said) == (
            400,
            "This server keeps conversations, and no contexts: leave context and save out.",
        )


CACHED = {"prompt_tokens_details": {"cached_tokens": 96}}
USAGES: dict[str, tuple[Any, Any]] = {
    "completions": (
        {"usage": {"prompt_tokens": 36, "completion_tokens": 5, "total_tokens": 41} | CACHED},
        {"usage": {"prompt_tokens": 136, "completion_tokens": 5, "total_tokens": 141} | CACHED},
    ),
    "responses": (
        {"response": {"usage": {"input_tokens": 36, "output_tokens": 5, "total_tokens": 41}}},
        {"response": {"usage": {"input_tokens": 136, "output_tokens": 5, "total_tokens": 141}}},
    ),
    "messages": (
        {"message": {"usage": {"input_tokens": 0, "output_tokens": 5, "cache_read_input_tokens": 96}}},
        {"message": {"usage": {"input_tokens": 40, "output_tokens": 5, "cache_read_input_tokens": 96}}},
    ),
    "nothing": ({"usage": None, "text": 'of "usage"'}, {"usage": None, "text": 'of "usage"'}),
}


@pytest.mark.parametrize("cut", [1, 10**6, 7], ids=["bytes", "whole", "pieces"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", USAGES)
def test_usage_counts_the_tokens_of_a_context(name: str, streams: bool, cut: int, start: Start, counted: None) -> None:
    """The engine puts 100 tokens in front of a prompt of 36, and vLLM's front end says 36."""
    given, expected = USAGES[name]

    def answer(body: Any) -> tuple[int, list[bytes]]:
        for _ in range(body.get("n", 1)):  # vLLM counts the prompt of several answers once
            stats.in_front(from_signed(body["vllm_xargs"]["keepset"]).ticket, 100, 136)
        text = json.dumps(given)
        if streams:
            text = f'event: a\ndata: {{"text": "é"}}\n\ndata: {text}\n\ndata: [DONE]\n\n'
        whole = text.encode()
        return 200, [whole[first : first + cut] for first in range(0, len(whole), cut)]

    sent: list[Any] = []
    ask = start(Inner(answer), answers=sent)
    for more in ({}, {"n": 3}):
        sent.clear()
        try:
            ask("POST", COMPLETIONS, {"prompt": "", "keepset": {"context": "manual"}, **more})
        except ValueError:  # a stream is no JSON
            assert streams
        text = text_of(sent)
        lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert (lines[1] if streams else json.loads(text)) == expected
        if streams:
            assert lines[0] == {"text": "é"} and text.endswith("\n\ndata: [DONE]\n\n")
        assert not more or name != "nothing" or text


TURN = {"computed": 5, "reused": 31, "dropped": 4, "held": 16}


@pytest.mark.parametrize("cut", [1, 10**6], ids=["bytes", "whole"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", USAGES)
def test_an_answer_says_what_its_request_has_of_its_conversation(
    name: str, streams: bool, cut: int, start: Start, counted: None
) -> None:
    """Beside each usage, for clients that ask for nothing; figures of several prompts are added up."""
    given, _ = USAGES[name]

    def answer(body: Any) -> tuple[int, list[bytes]]:
        for _ in range(body.get("n", 1)):
            stats.turn(from_signed(body["vllm_xargs"]["keepset"]).ticket, **TURN)
        stats.turn("0" * 32, **TURN)  # another request's
        text = json.dumps(given)
        whole = (f'data: {{"text": "é"}}\n\ndata: {text}\n\ndata: [DONE]\n\n' if streams else text).encode()
        return 200, [whole[first : first + cut] for first in range(0, len(whole), cut)]

    sent: list[Any] = []
    inner = Inner(answer)
    ask = start(inner, answers=sent, keepset="knorm(keep=0.5, turns=True)")
    for number in (1, 3):
        sent.clear()
        with suppress(ValueError):  # a stream is no JSON
            ask("POST", COMPLETIONS, {"prompt": "", "n": number})
        lines = [json.loads(line.removeprefix("data: ")) for line in text_of(sent).splitlines() if "{" in line]
        expected = json.loads(json.dumps(given))
        for part in (expected, expected.get("response"), expected.get("message")):
            if part and part.get("usage"):
                part["keepset"] = {figure: number * count for figure, count in TURN.items()}
        assert lines == ([{"text": "é"}] if streams else []) + [expected]
        assert inner.said() == RequestOptions()


class EngineClient:
    """vLLM's client of an engine in which each owner has conversations of these names."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {served_contexts.owner_of(key): known for key, known in names.items()}

    async def notify_kv_transfer_request_rejected(self, request_id: str, kv_transfer_params: Any) -> None:
        asked = question_of(kv_transfer_params)
        assert asked is not None and question_of({**kv_transfer_params, "keepset": "forged"}) is None
        known = self.names[asked.owner]
        if asked.delete is None:
            stats.answer(asked.ticket, known)
        else:
            stats.answer(asked.ticket, asked.delete in known)
            self.names[asked.owner] = [name for name in known if name != asked.delete]


TALKS = {"keepset": "knorm(keep=0.5, turns=True)"}


def test_a_key_lists_and_deletes_its_own_conversations(start: Start, counted: None, tmp_path: Path) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app = AuthenticationMiddleware(Inner(), tokens=["one", "two"])
    ask = start(app, client=EngineClient(one=["a", "é/b", "n" * 255], two=["a"]), **TALKS)
    listing = "/v1/conversations"
    assert ask("GET", listing, key="one") == (200, {"object": "list", "data": ["a", "é/b", "n" * 255]})
    assert ask("GET", listing)[0] == ask("DELETE", f"{listing}/a")[0] == 401
    for name in ("a", "é/b", "n" * 255):
        deleted = {"id": name, "object": "conversation.deleted", "deleted": True}
        assert ask("DELETE", f"{listing}/{name}", key="one") == (200, deleted)
        status, answer = ask("DELETE", f"{listing}/{name}", key="one")
        assert status == answer["error"]["code"] == 404
    for name in ("", "n" * 256):
        assert ask("DELETE", f"{listing}/{name}", key="one")[0] == 400
    assert [ask("GET", listing, key=key)[1]["data"] for key in ("one", "two")] == [[], ["a"]]
    assert not list(tmp_path.glob("*answer-*"))


def test_conversations_are_told_where_there_are_some(
    start: Start, counted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = start(Inner())("GET", "/v1/conversations")
    assert status == 404 and "start it with turns=True" in answer["error"]["message"]
    status, answer = start(Inner(), engines=2, **TALKS)("DELETE", "/v1/conversations/a")
    assert status == 400 and "servers with one engine" in answer["error"]["message"]

    class Silent:
        async def notify_kv_transfer_request_rejected(self, *_: Any) -> None:
            return

    monkeypatch.setattr(conversations, "_SECONDS", 0.05)
    status, answer = start(Inner(), client=Silent(), **TALKS)("GET", "/v1/conversations")
    assert status == 503 and "does not answer" in answer["error"]["message"]


def test_no_client_asks_the_engine(start: Start) -> None:
    for said in ({"keepset": {"question": {}}}, {"keepset": "text"}):
        body = {"prompt": "", "kv_transfer_params": said}
        status, answer = start(Inner(), **TALKS)("POST", COMPLETIONS, body)
        assert status == 400 and "at the top of the body" in answer["error"]["message"]
    sealed = RequestOptions(owner="1" * 32, ticket="0" * 32).to_signed()
    for said in ("text", {"keepset": 7}, {"keepset": sealed}, {"keepset": {"question": {}}}, None, ["keepset"]):
        assert question_of(said) is None
    asked = Question("0" * 32, "1" * 32, "a").to_parameters()
    assert question_of(asked) == Question("0" * 32, "1" * 32, "a")
    with pytest.raises(TypeError):
        from_signed(asked["keepset"])


def test_a_key_sees_its_own(folder: Path, start: Start) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    inner = Inner()
    ask = start(AuthenticationMiddleware(inner, tokens=["one", "two"]), keepset_save_bytes=10**6)
    path = written(served_contexts.OwnedContexts(folder, served_contexts.owner_of("one")), "mine", 0)
    path.write_bytes((folder / "manual.safetensors").read_bytes())
    names = {key: [each["id"] for each in ask("GET", "/v1/contexts", key=key)[1]["data"]] for key in ("one", "two")}
    assert "mine" in names["one"] and "mine" not in names["two"]
    assert posted(ask, {"save": "a"}, key="one")[0] == 200
    assert inner.said() == RequestOptions(save="a", owner=served_contexts.owner_of("one"))
    status, sentence = posted(ask, {"context": "mine"}, key="two")
    assert status == 400 and "There is no context 'mine'" in sentence
    assert posted(ask, {"context": "mine"}, key="one")[0] == 200
    assert inner.said() == RequestOptions(context="mine", owner=served_contexts.owner_of("one"))
    # Who has no key is told nothing.
    assert ask("GET", "/v1/contexts")[0] == 401
    assert ask("POST", COMPLETIONS, {"keepset": {"context": "nowhere"}})[0] == 401


def written(who: Any, name: str, size: int, used: Any = ()) -> Path:
    """A version of an owner's context, of so many bytes, and of 100 all together."""
    path = who.unfinished(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    who.commit(path, 100, used)
    return who.newest()[name]


def test_an_owners_contexts_stay_within_the_limit(tmp_path: Path) -> None:
    mine, other = (served_contexts.OwnedContexts(tmp_path, served_contexts.owner_of(key)) for key in ("one", "two"))
    first, second = written(mine, "a", 40), written(mine, "b", 40)
    written(other, "a", 90)
    mine.touch(first)
    third = written(mine, "c", 40)
    assert mine.newest() == {"a": first, "c": third} and not second.exists() and set(other.newest()) == {"a"}
    again = written(mine, "a", 20, used={first})  # who loads the old version goes on loading it
    assert mine.newest()["a"] == again and first.exists()
    mine.sweep(None, ())  # without a limit nothing is deleted
    assert first.exists()
    mine.sweep(100, ())
    assert not first.exists() and mine.newest() == {"a": again, "c": third}
    with pytest.raises(KeepsetError, match="has 101 bytes"):
        written(mine, "d", 101)
    assert mine.newest() == {"a": again, "c": third} and not list(again.parent.parent.glob(".unfinished/*"))


def test_a_server_that_saves_deletes_no_context_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another server commits while one reads the folder, only versions that have a newer one may go."""
    one, two = (served_contexts.OwnedContexts(tmp_path, served_contexts.EVERYBODY) for _ in range(2))
    files, saved = one._files, iter("bcdefgh")

    def between() -> list[Path]:
        found = files()
        written(two, next(saved), 10)
        return found

    monkeypatch.setattr(one, "_files", between)
    for _ in range(2):
        written(one, "a", 10)
    assert set(two.newest()) == set("abcdefgh") - set(saved) and len(two.newest()) > 3


def test_the_newest_version_is_the_last_saved_whatever_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = served_contexts.OwnedContexts(tmp_path, served_contexts.EVERYBODY)
    for number, time_ns in enumerate([10**18, 10**18 - 10**15, 10**18 - 10**15, 10**19, 10**18]):
        monkeypatch.setattr("time.time_ns", lambda now=time_ns: now)
        path = written(mine, "chat", number + 1)
        assert path.stat().st_size == number + 1 and list(mine.folder.iterdir()) == [path]


def test_a_version_that_another_server_replaces_is_looked_for_again(
    folder: Path, model_config: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = served_contexts.OwnedContexts(tmp_path, served_contexts.EVERYBODY)
    whole = (folder / "manual.safetensors").read_bytes()

    def saved() -> Path:
        path = owned.unfinished("chat")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        owned.commit(path, 10**9, ())
        return owned.newest()["chat"]

    config = SimpleNamespace(additional_config={"keepset_contexts": str(tmp_path)}, model_config=model_config)
    library, newest = served_contexts.ContextLibrary(tmp_path, config), served_contexts.OwnedContexts.newest
    first, calls = saved(), []

    def replaced(self: Any) -> dict[str, Path]:
        found = newest(self)
        if not calls:
            calls.append(first)
            calls.append(saved())
        return found

    monkeypatch.setattr(served_contexts.OwnedContexts, "newest", replaced)
    assert library.named("chat", served_contexts.EVERYBODY).path == calls[1] != first and not first.exists()


def test_only_unfinished_files_that_nobody_writes_to_are_cleared_away(tmp_path: Path) -> None:
    mine = served_contexts.OwnedContexts(tmp_path, served_contexts.EVERYBODY)
    names = ["team.newsletter-42", "a.new", "a.newer.new", "x.unfinished", "a-new-b"]
    for name in names:
        served_contexts.check_save(100, name)
    paths = [written(mine, name, 9) for name in names]
    report, abandoned, fresh = tmp_path / "report.newest.safetensors", mine.unfinished("b"), mine.unfinished("c")
    for path in (report, abandoned, fresh):
        path.write_bytes(bytes(9))
    for path in (*paths, abandoned, report):
        os.utime(path, (0, 0))
    mine.clear_unfinished(tmp_path)
    assert set(mine.newest()) == set(names) and all(path.exists() for path in (*paths, report, fresh))
    assert not abandoned.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": "nowhere"}, "There is no context 'nowhere' on this server; it has flipped, goes on, manual."),
        ({"context": "../manual"}, "There is no context '../manual' on this server"),
        ({"context": "flipped"}, "is damaged: build it again."),
        (
            {"context": "goes on"},
            "its requests are compressed further, for which the server's recipe must have its method",
        ),
        ({"save": "a"}, "This server saves no contexts: start it with --contexts and --save-bytes."),
        ({"protect": [[3, 2]]}, "compresses no prompts"),
        (None, "keepset is None: give"),
    ],
)
def test_what_is_wrong_is_answered_with_a_sentence(options: Any, sentence: str, folder: Path, start: Start) -> None:
    inner = Inner()
    status, answer = start(inner)("POST", "/v1/chat/completions", {"keepset": options})
    assert status == answer["error"]["code"] == 400 and sentence in answer["error"]["message"]
    assert not inner.bodies and str(folder) not in answer["error"]["message"]


def test_the_listing_follows_the_folder(folder: Path, start: Start, counted: None) -> None:
    stats.context_used("manual", loaded=True)
    stats.context_used("manual", loaded=False)
    ask, path = start(Inner()), folder / "manual.safetensors"
    flipped_one, manual = ask("GET", "/v1/contexts")[1]["data"]
    assert manual == {
        **{"id": "manual", "object": "context", "saved": False, "tokens": 100, "recipe": "knorm(keep=0.25)"},
        **{"kept": 0.25, "bytes": path.stat().st_size, "requests": 2, "loads": 1},
    }
    assert (flipped_one["id"], flipped_one["requests"]) == ("flipped", 0)
    (folder / "another.safetensors").write_bytes(path.read_bytes())
    assert [each["id"] for each in ask("GET", "/v1/contexts")[1]["data"]] == ["another", "flipped", "manual"]
    (folder / "another.safetensors").unlink()
    assert posted(ask, {"context": "another"})[0] == 400


def test_the_listing_says_why_files_cannot_be_served(folder: Path, start: Start, counted: None, tmp_path: Path) -> None:
    """In the words that a request gets that names one; damage is known once a request did."""
    for name in ("goes on", "flipped", "manual"):
        (tmp_path / f"{name}.safetensors").write_bytes((folder / f"{name}.safetensors").read_bytes())
    (tmp_path / "no.safetensors").write_text("no context")
    ask = start(Inner(), tmp_path)

    def refused() -> dict[str, str]:
        answer = ask("GET", "/v1/contexts")[1]
        assert {each["id"] for each in answer["data"]} == {"goes on", "flipped", "manual", "no"} - {
            each["id"] for each in answer["refused"]
        }
        return {each["id"]: each["reason"] for each in answer["refused"]}

    assert refused().keys() == {"goes on", "no"}
    told = {name: posted(ask, {"context": name})[1] for name in ("goes on", "no", "flipped")}
    assert refused() == told and all(told.values()) and str(tmp_path) not in "".join(told.values())
    assert posted(ask, {"context": "flipped"}) == (400, told["flipped"])
    (tmp_path / "flipped.safetensors").write_bytes((folder / "manual.safetensors").read_bytes())
    assert posted(ask, {"context": "flipped"})[0] == 200 and refused().keys() == {"goes on", "no"}


def test_a_folder_is_no_context_and_neither_is_a_file_that_goes_while_it_is_read(
    folder: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    ask = start(Inner(), tmp_path)
    assert posted(ask, {"context": "folder"}) == (400, "There is no context 'folder' on this server; it has none.")
    assert ask("GET", "/v1/contexts")[1]["data"] == []
    (tmp_path / "manual.safetensors").write_bytes((folder / "manual.safetensors").read_bytes())
    entries = context_files.entries

    def gone(path: Path, digest: str) -> Any:
        path.unlink()
        return entries(path, digest)

    monkeypatch.setattr(context_files, "entries", gone)
    assert posted(ask, {"context": "manual"}) == (400, "There is no context 'manual' on this server; it has none.")


SAVER = """
import sys, time
from pathlib import Path
from keepset.vllm.contexts import EVERYBODY, OwnedContexts
folder, number, skew, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
now = time.time_ns
time.time_ns = lambda: now() + skew * 10**9
mine = OwnedContexts(folder, EVERYBODY)
for turn in range(rounds):
    for name in "abcdef":
        path = mine.unfinished(name)
        path.write_bytes(b"%d %d" % (number, turn))
        mine.commit(path, 10**9, ())
        assert name in mine.newest(), name
"""


@pytest.mark.full
def test_processes_that_save_into_one_folder_lose_nothing(tmp_path: Path) -> None:
    """Each with a clock of its own. Afterwards who saves last wins, though another's clock is an hour ahead."""
    skews = 3600, 0, -3600
    (tmp_path / "saved" / ".unfinished").mkdir(parents=True)

    def start(number: int, skew: int, rounds: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", SAVER, str(tmp_path), str(number), str(skew), str(rounds)]
        return subprocess.Popen(words)

    together = [start(number, skew, 40) for number, skew in enumerate(skews)]
    for process in together:
        assert process.wait(120) == 0
    kept = served_contexts.OwnedContexts(tmp_path, served_contexts.EVERYBODY)
    assert sorted(kept.newest()) == list("abcdef")
    for number, skew in enumerate(skews):
        assert start(number, skew, 1).wait(120) == 0
        assert {path.read_bytes() for path in kept.newest().values()} == {b"%d 0" % number}
    assert set(kept.folder.iterdir()) == set(kept.newest().values())
    assert not list((tmp_path / "saved" / ".unfinished").iterdir())
