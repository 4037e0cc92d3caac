from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from keepset.defaults import ANSWERED_AT_ONCE
from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.serving.command import command, default_for, has_option, split
from keepset.serving.start_checks import block_size_hint, check_installed
from keepset.vllm.recipe_support import objections

RECIPE = Recipe.parse("snapkv(keep=64, every=64, window=8)")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")


def additional(words: list[str]) -> Any:
    """What the words say there, besides that the engine takes only what the front end signs."""
    assert words.count("--additional-config") == 1 and "--middleware" in words
    said = json.loads(words[words.index("--additional-config") + 1])
    assert said.pop("keepset_signed") is True
    return said


def test_words() -> None:
    words = command("a/model", RECIPE, ["--port", "9", "-tp", "2"])
    assert words[:6] == [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "a/model"]
    assert additional(words) == {"keepset": str(RECIPE)}
    assert words[-6:] == ["--host", "127.0.0.1", "--port", "9", "-tp", "2"]
    assert command("a/model", None, [])[5:] == ["a/model", "--host", "127.0.0.1"]  # plain vLLM


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [
        ("snapkv(keep=64)", ["--kv-transfer-config"]),
        ("pyramid(snapkv, keep=64)", ["--kv-transfer-config", "--no-enable-prefix-caching"]),
        ("pool(snapkv, keep=64)", ["--kv-transfer-config", "--no-enable-prefix-caching"]),
        ("gvote", ["--kv-transfer-config", "--no-enable-prefix-caching", "--enforce-eager"]),
        ("int8(snapkv, keep=64)", ["--kv-transfer-config", "--kv-cache-dtype", "int8_per_token_head"]),
    ],
)
def test_vllm_is_told_what_a_recipe_needs(recipe: str, needed: list[str]) -> None:
    options = ["--no-enable-prefix-caching", "--kv-transfer-config", "--enforce-eager", "--kv-cache-dtype"]
    options.append("int8_per_token_head")
    words = command("a/model", Recipe.parse(recipe), [])
    assert [word for word in words if word in options] == needed
    words = command("a/model", Recipe.parse("int8(snapkv, keep=64)"), ["--kv-cache-dtype=fp8"])
    assert words[-1] == "--kv-cache-dtype=fp8"  # which the engine refuses in a sentence


@pytest.mark.parametrize(
    ("options", "model_type", "recipe", "missing"),
    [
        ([], "llama", ANSWERED_AT_ONCE, ""),
        (["-tp", "1", "--kv-cache-dtype", "int8_per_token_head"], "qwen3", ANSWERED_AT_ONCE, ""),
        (["--tensor_parallel_size=2"], "llama", "quantized(prompt_queries, bytes=0.25, short=256)", "pool"),
        (["-pp", "2"], "llama", "quantized(prompt_queries, bytes=0.25, short=256)", "pool"),
        (["--speculative-config", "{}"], "unheard-of", "quantized(prompt_queries, bytes=0.25, short=256)", "pool"),
        (["--speculative-config", "{}", "--no-async-scheduling"], "llama", ANSWERED_AT_ONCE, ""),
        (["--kv-cache-dtype", "fp8"], "unheard-of", "pool(prompt_queries, bytes=0.25, short=256)", "quantized"),
        ([], "gemma3_text", "quantized(pool(snapkv), bytes=0.25, short=256)", "prompt_queries"),
        ([], "deepseek_v3", "pool(prompt_queries, bytes=0.25, short=256)", "quantized"),
        (
            ["-tp", "2", "--kv-cache-dtype=fp8"],
            "gemma3_text",
            "snapkv(bytes=0.25, short=256)",
            "quantized, pool, prompt_queries",
        ),
    ],
)
def test_without_a_recipe_a_server_has_the_default_less_what_it_cannot_serve(
    options: list[str], model_type: str, recipe: str, missing: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    taken, why = default_for(str(tmp_path), "mine", options)
    assert str(taken) == recipe
    assert why.startswith(f"No recipe is named, so the default is taken: {ANSWERED_AT_ONCE}, because there are no")
    ending = f" This server cannot serve {missing} and takes {recipe}." if missing else "names them."
    assert why.endswith(ending)
    assert [*objections(taken)] == []


def test_contexts_take_a_connector_and_middleware(tmp_path: Path) -> None:
    words = command("a/model", None, ["--additional-config", '{"more": 1}'], contexts=tmp_path)
    assert additional(words) == {"more": 1, "keepset_contexts": str(tmp_path)}
    assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector"] == "ContextConnector"
    module, name = words[words.index("--middleware") + 1].rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)


def test_contexts_are_a_folder_that_may_be_saved_to(tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match=r"There is no folder '.*nowhere': make it"):
        command("a/model", None, [], contexts=tmp_path / "nowhere")
    with pytest.raises(KeepsetError, match="name their folder with --contexts"):
        command("a/model", RECIPE, [], save_bytes=9)
    both = {"keepset": str(RECIPE), "keepset_contexts": str(tmp_path), "keepset_save_bytes": 9}
    assert additional(command("a/model", RECIPE, [], contexts=tmp_path, save_bytes=9)) == both


def test_conversations_that_lose_their_pages_go_to_a_folder(tmp_path: Path) -> None:
    talks = Recipe.parse("knorm(keep=0.5, turns=True)")
    with pytest.raises(KeepsetError, match=r"say by save_bytes \(--save-bytes\) how many bytes"):
        command("a/model", talks, [], contexts=tmp_path)
    for recipe, more in ((RECIPE, {"contexts": tmp_path}), (talks, {})):
        with pytest.raises(KeepsetError, match="give turns=True in the recipe, and their folder"):
            command("a/model", recipe, [], conversation_bytes=5, **more)
    for own, limit in ((0, 9), (5, 5)):
        words = command("a/model", talks, [], contexts=tmp_path, save_bytes=9, conversation_bytes=own)
        spills = {"folder": str(tmp_path), "bytes": 9, "owner_bytes": limit}
        assert additional(words) == {"keepset": str(talks), "keepset_conversations": spills}
        assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector"] == "ConversationConnector"


def test_a_model_is_served_under_the_name_that_it_is_given() -> None:
    assert command("a/model", None, [], served_name="mine")[5:8] == ["a/model", "--served-model-name", "mine"]
    words = command("a/model", None, ["--served_model_name=theirs"], served_name="mine")
    assert words[5:] == ["a/model", "--host", "127.0.0.1", "--served_model_name=theirs"]


def test_builds_of_another_name_start_without_the_vllm_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    words = command("a/model", None, [])
    assert words[2:6] == ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "a/model"]


@pytest.mark.parametrize("host", [["--host", "0.0.0.0"], ["--host=0.0.0.0"]])
def test_who_names_a_host_gets_it(host: list[str]) -> None:
    assert "127.0.0.1" not in command("m", None, host)


@pytest.mark.parametrize(
    "options",
    [
        ["--additional-config", '{"a": 1}'],
        ['--additional-config={"a": 1}'],
        ['--additional_config={"a": 1}'],
        ["--additional", '{"a": 1}'],
        ["--additional-config", '{"a": 2}', "--additional-config", '{"a": 1}'],
    ],
)
def test_other_keys_are_merged(options: list[str]) -> None:
    words = command("m", RECIPE, ["--x", *options, "--y"])
    assert additional(words) == {"a": 1, "keepset": str(RECIPE)}
    assert [word for word in words if "additional" in word] == ["--additional-config"]
    assert words[-2:] == ["--x", "--y"]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (["--additional-config", '{"keepset": "tova(keep=1)"}'], "names 'keepset': give the recipe with --recipe only"),
        (['--additional_config={"keepset": null}'], "names 'keepset'"),
        (["--additional-config", "{"], "is no JSON object"),
        (["--additional-config", "[1]"], "is no JSON object"),
        (["--additional-config"], "is no JSON object"),
        (["--additional-config.keepset", "x"], "cannot be joined with a recipe"),
        (["--additional_config.a=1"], "cannot be joined with a recipe"),
        (["--model", "x"], "write the model first"),
    ],
)
def test_refused(options: list[str], because: str) -> None:
    with pytest.raises(KeepsetError) as error:
        command("m", RECIPE, options)
    assert because in str(error.value)


def test_words_after_the_model_are_options() -> None:
    assert split([]) == (None, [])
    assert split(["m", "--a", "1"]) == ("m", ["--a", "1"])
    assert split(["--a", "1"]) == (None, ["--a", "1"])


def test_given() -> None:
    options = ["--block_size=3", "--a-b", "x"]
    assert has_option(options, "--block-size") and has_option(options, "--a-b")
    assert not has_option(options, "--block") and not has_option(options, "x")


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("snapkv(keep=128, window=8)", [], True),
        ("snapkv(keep=255, window=8)", ["--max-model-len", "9"], True),
        ("snapkv(keep=255, window=8)", ["--block_size=32"], False),
        ("snapkv(keep=256, window=8)", [], False),
        ("snapkv(keep=0.1, window=8)", [], False),
    ],
)
def test_small_budgets_want_small_blocks(
    recipe: str, options: list[str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    sentence = block_size_hint(Recipe.parse(recipe), options)
    assert (sentence is not None) == said
    assert sentence is None or ("--block-size 32" in sentence and "\n" not in sentence)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert block_size_hint(Recipe.parse(recipe), options) is None
    assert block_size_hint(None, options) is None


def plugins(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = EntryPoints(EntryPoint(f"p{i}", value, "vllm.general_plugins") for i, value in enumerate(values))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points.select(group=group))


def test_vllm_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KeepsetError, match=r'pip install "vllm'):
        check_installed()


def test_vllm_must_load_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugins(monkeypatch, "other.plugin:register")
    with pytest.raises(KeepsetError, match="would not find keepset's plug-in"):
        check_installed()
    plugins(monkeypatch, "other.plugin:register", "keepset.vllm.plugin:register")
    check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "p0")
    with pytest.raises(KeepsetError, match="VLLM_PLUGINS='p0' keeps vLLM from loading keepset's plug-in: add 'p1'"):
        check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "p0,p1")
    check_installed()
