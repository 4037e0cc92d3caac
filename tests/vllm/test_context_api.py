"""The server's middleware, without a server: what it answers, rewrites and passes on."""

from __future__ import annotations

import asyncio
import json
import os
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
from keepset.hf import saved
from keepset.serving.context_api import HONOURED, ContextMiddleware
from keepset.vllm import owned_contexts as owned
from keepset.vllm import signing, stats
from keepset.vllm.request_options import MAX_BYTES, MAX_RANGES, RequestOptions, from_signed, parse_options
from tests.hf.damage import flipped
from tests.vllm.asgi import call, text_of


@pytest.fixture(autouse=True)
def signing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.SIGNING_KEY, signing.new_key())


@pytest.fixture(scope="module")
def folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contexts")
    for name, recipe in (("manual", "knorm(keep=0.25)"), ("eight bits", "int8(knorm, keep=0.25)")):
        cache = keepset.Cache(tiny_model, recipe)
        with torch.no_grad():
            tiny_model(torch.arange(100)[None], past_key_values=cache)
        cache.save(folder / f"{name}.safetensors")
    content = (folder / "manual.safetensors").read_bytes()
    (folder / "flipped.safetensors").write_bytes(flipped(content, "layers.0.columns.keys"))
    return folder


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


def server(
    folder: Path,
    model: PreTrainedModel,
    inner: Any,
    recipe: str | None = None,
    limit: int = 0,
    answers: list[Any] | None = None,
) -> Any:
    model_config = SimpleNamespace(
        model=model.config.name_or_path,
        architecture="LlamaForCausalLM",
        hf_text_config=model.config,
        dtype=torch.float32,
        max_model_len=512,
        get_head_size=lambda: model.config.head_dim,
        get_vocab_size=lambda: model.config.vocab_size,
    )
    more = {"keepset": recipe} if recipe else {}
    more = {**more, "keepset_save_bytes": limit} if limit else more
    said = {"keepset_contexts": str(folder), "keepset_signed": True, **more}
    config = SimpleNamespace(additional_config=said, model_config=model_config)
    middleware, app = ContextMiddleware(inner), SimpleNamespace(state=SimpleNamespace(vllm_config=config))

    def asked(method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        text = json.dumps(body).encode() if not isinstance(body, bytes) else body
        sent = call(middleware, method, path, text, key, app=app)
        if answers is not None:
            answers.extend(sent)
        return sent[0]["status"], json.loads(text_of(sent))

    return asked


def test_what_is_said_goes_on_signed_as_an_argument_of_vllm(folder: Path, tiny_model: PreTrainedModel) -> None:
    inner = Inner()
    ask = server(folder, tiny_model, inner)
    for path in HONOURED:
        request = {"prompt": "What?", "keepset": {"context": "manual"}, "vllm_xargs": {"more": 1}}
        assert ask("POST", path, request)[0] == 200
        assert inner.bodies[-1].keys() == {"prompt", "vllm_xargs"} and inner.bodies[-1]["vllm_xargs"]["more"] == 1
        assert inner.said() == RequestOptions(context="manual")
        assert ask("POST", path, {"prompt": "What?", "keepset": {"off": True}})[0] == 200
        assert inner.said() == RequestOptions(off=True)
        assert ask("POST", path, {"prompt": "What?"})[0] == 200
        assert inner.bodies[-1] == {"prompt": "What?"}


def test_why_the_engine_refuses_is_the_answer(
    folder: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    stats._array.cache_clear()
    pieces = [b'{"error": {"message": "Internal server error", "code": 500}}']
    chunks = [
        b'data: {"choices": []}\n\n',
        b'data: {"error": {"message": "Internal server error"}}\n\n',
        b"data: [DONE]",
    ]

    def refuse(body: Any, status: int, pieces: list[bytes]) -> Any:
        ticket = from_signed(body["vllm_xargs"]["keepset"]).ticket
        stats.refused(ticket, f"Context {str(folder / 'saved' / 'one' / 'chat@12-ab.safetensors')!r} is too long.")
        return status, pieces

    request = {"keepset": {"off": True}}
    for status, said in ((500, pieces), (200, chunks[1:])):
        ask = server(folder, tiny_model, Inner(partial(refuse, status=status, pieces=said)))
        assert ask("POST", "/v1/completions", request)[0] == 400
        assert ask("POST", "/v1/completions", request)[1]["error"]["message"] == "Context 'chat' is too long."
    answers: list[Any] = []
    ask = server(folder, tiny_model, Inner(partial(refuse, status=200, pieces=chunks)), answers=answers)
    with pytest.raises(json.JSONDecodeError):
        ask("POST", "/v1/completions", request)
    assert [piece["type"] for piece in answers] == ["http.response.start"] + ["http.response.body"] * 2
    assert json.loads(answers[2]["body"].removeprefix(b"data: "))["error"]["message"] == "Context 'chat' is too long."
    assert answers[2]["more_body"] is False
    # An error that is not the engine's refusal stays what it is.
    assert server(folder, tiny_model, Inner(lambda body: (500, pieces)))("POST", "/v1/completions", request)[0] == 500
    stats._array.cache_clear()


def test_no_client_sees_a_signature(folder: Path, tiny_model: PreTrainedModel) -> None:
    inner = Inner(lambda body: (400, [json.dumps(body).encode()]))
    status, answer = server(folder, tiny_model, inner)("POST", "/v1/completions", {"keepset": {"off": True}})
    signature = inner.bodies[-1]["vllm_xargs"]["keepset"].split()[0]
    assert status == 400 and len(signature) == 64 and signature not in json.dumps(answer)


def test_only_the_front_ends_signature_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = RequestOptions(save="a", owner="1" * 32).to_signed()
    assert from_signed(sealed) == RequestOptions(save="a", owner="1" * 32)
    signature, _, text = sealed.partition(" ")
    forged = [
        text,
        f" {text}",
        f"{signature} {text.replace('1', '2')}",
        f"{signature[:-1]} {text}",
        "",
        7,
        None,
        [text],
    ]
    forged += [{"save": "a"}, "\ud800 " + text, signature]
    for said in forged:
        with pytest.raises(KeepsetError, match="does not check it"):
            from_signed(said)
    for words in ({"save": "a", "owner": "1" * 32}, {"ticket": "a"}, json.dumps({"owner": "everybody"})):
        with pytest.raises(KeepsetError, match=r"leave (owner|ticket) out"):
            parse_options(words)
    monkeypatch.setenv(signing.SIGNING_KEY, signing.new_key())
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
        ({"keep": True}, "give a number"),
        ({"protect": [[0, 2**63]]}, "no pair of tokens"),
        ({"protect": [[0, 1.5]]}, "no pair of tokens"),
        ({"protect": {}}, "give ranges of tokens"),
        ({"protect": 7}, "give ranges of tokens"),
        ([1], "give one or more of"),
        (7, "give one or more of"),
        ("[" * 5000, "give one or more of"),
    ],
)
def test_a_request_says_no_more_than_is_right(said: Any, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence) as refused:
        parse_options(said)
    assert len(str(refused.value)) < 500


def test_budgets_are_checked_against_the_servers_recipe(folder: Path, tiny_model: PreTrainedModel) -> None:
    plain, every = (server(folder, tiny_model, Inner(), recipe=recipe) for recipe in (None, "snapkv(keep=99, every=9)"))
    assert (
        "compresses no prompts" in plain("POST", "/v1/completions", {"keepset": {"keep": 0.5}})[1]["error"]["message"]
    )
    assert (
        "does not go with every=9"
        in every("POST", "/v1/completions", {"keepset": {"keep": 0.5}})[1]["error"]["message"]
    )
    assert every("POST", "/v1/completions", {"keepset": {"keep": 70, "protect": [[0, 5]]}})[0] == 200


def test_nobody_says_whose_contexts_they_are(folder: Path, tiny_model: PreTrainedModel) -> None:
    ask = server(folder, tiny_model, Inner(), limit=10**6)
    owner = owned.owner_of("secret")
    assert ask("POST", "/v1/completions", {"keepset": {"save": "a", "owner": owner}})[0] == 400
    assert ask("POST", "/v1/completions", {"vllm_xargs": {"keepset": '{"save": "a"}'}})[0] == 400
    assert ask("POST", "/v1/completions", {"keepset": {"save": "../a"}})[0] == 400
    assert ask("POST", "/v1/completions", {"keepset": {"save": "a"}})[0] == 200
    assert server(folder, tiny_model, Inner())("POST", "/v1/completions", {"keepset": {"save": "a"}})[0] == 400


def test_a_key_sees_its_own(folder: Path, tiny_model: PreTrainedModel) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    inner = Inner()
    ask = server(folder, tiny_model, AuthenticationMiddleware(inner, tokens=["one", "two"]), limit=10**6)
    one = owned.OwnedContexts(folder, owned.owner_of("one"))
    path = one.unfinished("mine")
    path.parent.mkdir(parents=True)
    path.write_bytes((folder / "manual.safetensors").read_bytes())
    one.commit(path, 10**6, ())
    names = {key: [each["id"] for each in ask("GET", "/v1/contexts", key=key)[1]["data"]] for key in ("one", "two")}
    assert "mine" in names["one"] and "mine" not in names["two"]
    assert ask("POST", "/v1/completions", {"prompt": "", "keepset": {"save": "a"}}, key="one")[0] == 200
    assert inner.said() == RequestOptions(save="a", owner=owned.owner_of("one"))
    refused = ask("POST", "/v1/completions", {"prompt": "", "keepset": {"context": "mine"}}, key="two")
    assert refused[0] == 400 and "There is no context 'mine'" in refused[1]["error"]["message"]
    assert ask("POST", "/v1/completions", {"prompt": "", "keepset": {"context": "mine"}}, key="one")[0] == 200
    assert inner.said() == RequestOptions(context="mine", owner=owned.owner_of("one"))


def test_an_owners_contexts_stay_within_the_limit(tmp_path: Path) -> None:
    mine, other = (owned.OwnedContexts(tmp_path, owned.owner_of(key)) for key in ("one", "two"))

    def save(who: Any, name: str, size: int, used: Any = ()) -> Path:
        path = who.unfinished(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        who.commit(path, 100, used)
        return who.folder / path.name

    first, second = save(mine, "a", 40), save(mine, "b", 40)
    save(other, "a", 90)
    mine.touch(first)
    third = save(mine, "c", 40)
    assert mine.newest() == {"a": first, "c": third} and not second.exists() and set(other.newest()) == {"a"}
    again = save(mine, "a", 20, used={first})  # who loads the old version goes on loading it
    assert mine.newest()["a"] == again and first.exists()
    mine.sweep(100, ())
    assert not first.exists() and mine.newest() == {"a": again, "c": third}
    with pytest.raises(KeepsetError, match="has 101 bytes"):
        save(mine, "d", 101)
    assert mine.newest() == {"a": again, "c": third} and not list(again.parent.parent.glob(".unfinished/*"))


def test_without_a_limit_nothing_is_deleted(tmp_path: Path) -> None:
    mine = owned.OwnedContexts(tmp_path, owned.EVERYBODY)
    for name in ("a", "a", "b", "c"):
        path = mine.unfinished(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(40))
        mine.folder.mkdir(exist_ok=True)
        path.rename(mine.folder / path.name)
    mine.sweep(None, ())
    assert len(list(mine.folder.iterdir())) == 4
    mine.sweep(1000, ())
    assert len(list(mine.folder.iterdir())) == 3


def test_only_unfinished_files_that_nobody_writes_to_are_cleared_away(tmp_path: Path) -> None:
    mine = owned.OwnedContexts(tmp_path, owned.EVERYBODY)
    names = ["team.newsletter-42", "a.new", "a.newer.new", "x.unfinished", "a-new-b"]
    paths = []
    for name in names:
        owned.check_save(100, name)
        path = mine.unfinished(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9))
        mine.commit(path, 100, ())
        paths.append(mine.folder / path.name)
    (tmp_path / "report.newest.safetensors").write_bytes(bytes(9))
    abandoned, written = mine.unfinished("b"), mine.unfinished("c")
    for path in (abandoned, written):
        path.write_bytes(bytes(9))
    for path in (*paths, abandoned, tmp_path / "report.newest.safetensors"):
        os.utime(path, (0, 0))
    mine.clear_unfinished(tmp_path)
    assert set(mine.newest()) == set(names) and all(path.exists() for path in paths)
    assert (tmp_path / "report.newest.safetensors").exists() and written.exists() and not abandoned.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": "nowhere"}, "There is no context 'nowhere' on this server; it has eight bits, flipped, manual."),
        ({"context": "../manual"}, "There is no context '../manual' on this server"),
        ({"context": "flipped"}, "is damaged: build it again."),
        ({"context": "eight bits"}, "its entries are in 8 bits (leave int8(...) around its recipe out)"),
        ({"context": 7}, "keepset: context is 7: give a name."),
        ({"off": 1}, "keepset: off is 1: give true or false."),
        ({"off": True, "keep": 3}, "with off nothing is dropped: leave keep and protect out."),
        ({"context": "manual", "keep": 3}, "a context has a recipe of its own"),
        ({"save": "a"}, "This server saves no contexts: start it with --save-bytes."),
        ({"protect": [[3, 2]]}, "compresses no prompts"),
        ({"more": 1}, "keepset is {'more': 1}: give"),
        ({}, "keepset is {}: give"),
        (None, "keepset is None: give"),
        ("manual", "keepset is 'manual': give"),
    ],
)
def test_what_is_wrong_is_answered_with_a_sentence(
    options: Any, sentence: str, folder: Path, tiny_model: PreTrainedModel
) -> None:
    inner = Inner()
    status, answer = server(folder, tiny_model, inner)("POST", "/v1/chat/completions", {"keepset": options})
    assert status == answer["error"]["code"] == 400 and sentence in answer["error"]["message"]
    assert not inner.bodies and str(folder) not in answer["error"]["message"]


def test_the_listing_follows_the_folder(
    folder: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    stats._array.cache_clear()
    stats.context_used("manual", loaded=True)
    stats.context_used("manual", loaded=False)
    ask = server(folder, tiny_model, Inner())
    (flipped_one, manual) = ask("GET", "/v1/contexts")[1]["data"]
    path = folder / "manual.safetensors"
    assert manual == {
        "id": "manual",
        "object": "context",
        "saved": False,
        "tokens": 100,
        "recipe": "knorm(keep=0.25)",
        "kept": 0.25,
        "bytes": path.stat().st_size,
        "requests": 2,
        "loads": 1,
    }
    assert (flipped_one["id"], flipped_one["requests"]) == ("flipped", 0)
    (folder / "another.safetensors").write_bytes(path.read_bytes())
    assert [each["id"] for each in ask("GET", "/v1/contexts")[1]["data"]] == ["another", "flipped", "manual"]
    (folder / "another.safetensors").unlink()
    assert ask("POST", "/v1/completions", {"keepset": {"context": "another"}})[0] == 400
    stats._array.cache_clear()


def test_a_folder_is_no_context(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    ask = server(tmp_path, tiny_model, Inner())
    status, answer = ask("POST", "/v1/completions", {"keepset": {"context": "folder"}})
    assert status == 400
    assert answer["error"]["message"] == "There is no context 'folder' on this server; it has none."
    assert ask("GET", "/v1/contexts")[1]["data"] == []


def test_a_context_that_goes_while_it_is_read_is_no_context(
    folder: Path, tiny_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entries = tmp_path / "manual.safetensors", saved.entries
    path.write_bytes((folder / "manual.safetensors").read_bytes())

    def gone(path: Path, digest: str) -> Any:
        path.unlink()
        return entries(path, digest)

    monkeypatch.setattr(saved, "entries", gone)
    ask = server(tmp_path, tiny_model, Inner())
    status, answer = ask("POST", "/v1/completions", {"keepset": {"context": "manual"}})
    assert status == 400
    assert answer["error"]["message"] == "There is no context 'manual' on this server; it has none."


def test_who_has_no_key_is_told_nothing(folder: Path, tiny_model: PreTrainedModel) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    ask = server(folder, tiny_model, AuthenticationMiddleware(Inner(), tokens=["secret"]))
    assert ask("GET", "/v1/contexts")[0] == 401
    assert ask("POST", "/v1/completions", {"keepset": {"context": "nowhere"}})[0] == 401
    assert ask("GET", "/v1/contexts", key="secret")[0] == 200
    assert ask("POST", "/v1/completions", {"keepset": {"context": "nowhere"}}, key="secret")[0] == 400
