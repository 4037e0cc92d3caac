"""`keepset serve` becomes the right `vllm serve`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keepset
from keepset.defaults import ANSWERED_AT_ONCE
from keepset.lab import embedded
from keepset.recipe import Recipe
from keepset.serving import command, start_checks
from keepset.vllm.request_options import SIGNING_KEY
from tests.lab.cli.conftest import Run


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The words of the process that a command became."""
    taken: list[list[str]] = []

    def execvp(file: str, words: list[str]) -> None:
        assert file == words[0] == sys.executable
        assert words[1:4] == ["-P", "-m", "keepset.serving.supervisor"] and float(words[4]) >= 10
        taken.append(words[5:])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    monkeypatch.setattr(start_checks, "check_installed", lambda *_: None)
    monkeypatch.setattr(command, "_program", lambda model: [sys.executable, "-m", "vllm", "serve", model])
    monkeypatch.setattr(embedded, "embedded_folder", lambda: tmp_path / "embedded")
    (tmp_path / "embedded").mkdir()
    (tmp_path / "embedded" / "config.json").write_text("{}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv(SIGNING_KEY, "")
    return taken


def test_recipe_and_options(run: Run, became: list[list[str]]) -> None:
    rest = ["--enforce-eager", "--dtype=float32", "-tp", "2", "-O3", "--port", "0", "--no-such-option"]
    done = run("serve", "a/model", "--block-size", "32", "--recipe", "snapkv(keep=512,every=256)", *rest)
    assert (done.code, done.out) == (0, "")
    (words,) = became
    assert words[1:5] == ["-m", "vllm", "serve", "a/model"]
    said = json.loads(words[words.index("--additional-config") + 1])
    assert said == {"keepset": "snapkv(keep=512, every=256)", "keepset_signed": True}
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[-len(rest) - 2 :] == ["--block-size", "32", *rest]
    assert "serve a/model" in done.err and done.err.count("\n") == 1  # nothing is compiled


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", "hunter2"],
        ["--api-key=hunter2"],
        ["--api_key", "hunter2", "hunter3", "--enforce-eager"],
        ["--api-ke=hunter2", "--hf_token", "hunter3"],
        ["--hf-to=hunter2", "--api-k", "hunter3", "-hunter4"],
        ["--watermark-config", '{"key": "hunter2"}', "--watermark_config.key=hunter3"],
    ],
)
def test_keys_are_handed_on_and_not_shown(
    options: list[str], run: Run, became: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter5")
    done = run("serve", "m", "--recipe", "tova(keep=512)", "--port", "0", *options, "--max-model-len", "1024")
    assert done.code == 0 and "hunter" not in done.out + done.err and "***" in done.err
    assert became[0][-2 - len(options) : -2] == options and "--max-model-len 1024" in done.err


def test_a_start_has_its_own_signing_key(run: Run, became: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for _ in range(2):
        monkeypatch.setenv(SIGNING_KEY, "")
        done = run("serve", "m", "--recipe", "tova(keep=512)", "--port", "0")
        keys.append(os.environ[SIGNING_KEY])
        assert len(keys[-1]) == 64 and keys[-1] not in done.out + done.err + "".join(became[-1])
    assert keys[0] != keys[1]


def test_the_embedded_model_is_served_under_its_name(run: Run, became: list[list[str]], tmp_path: Path) -> None:
    options = ["--max-model-len", "1024"]
    for words in ([], options, ["--", *options], ["SmolLM2-135M-Instruct"]):  # also by options alone
        assert run("serve", *words).code == 0
        assert became[-1][4] == str(tmp_path / "embedded")
        assert became[-1][became[-1].index("--served-model-name") + 1] == "SmolLM2-135M-Instruct"
    assert became[1] == became[2] and became[1][-2:] == options
    run("serve", "a/model", "--port", "0")
    assert "--served-model-name" not in became[-1]


def test_the_embedded_models_statistics_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's processes know no others; of another model, or under a name of their own, they stay as they are."""
    file = tmp_path / "statistics.safetensors"
    monkeypatch.setattr(embedded, "embedded_folder", lambda: tmp_path)
    monkeypatch.setattr(embedded, "embedded_statistics", lambda: file)
    recipe, without = Recipe.parse("match(pool(distilled), keep=0.25)"), Recipe.parse("snapkv(keep=64)")
    named = Recipe.parse(f"match(pool(distilled(stats={str(file)!r})), keep=0.25)")
    assert embedded.name_statistics(recipe, None) == named == embedded.name_statistics(named, None)
    assert embedded.name_statistics(recipe, "a/model") == recipe
    assert embedded.name_statistics(without, None) == without


def test_without_a_recipe_it_is_the_default(run: Run, became: list[list[str]], tmp_path: Path) -> None:
    done = run("serve", "a/model", "--port", "0")
    said = json.loads(became[0][became[0].index("--additional-config") + 1])
    assert said["keepset"] == ANSWERED_AT_ONCE and "--no-enable-prefix-caching" in became[0]
    why, whole, line, compiles = done.err.splitlines()
    assert whole == "Prompts of fewer than 256 tokens stay whole."
    assert f"the default is taken: {ANSWERED_AT_ONCE}, because there are no networks" in why
    assert ANSWERED_AT_ONCE in line and compiles.startswith("The first start with a model and options takes minutes")
    run("serve", "a/model", "--port", "0", "--contexts", str(tmp_path))
    said = json.loads(became[1][became[1].index("--additional-config") + 1])
    assert "keepset" not in said and said["keepset_contexts"] == str(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            "snapkv(keep=64)",
            "Nothing is chosen: snapkv(keep=64) always keeps the newest 64, which is the whole budget.",
        ),
        ("snapkv(keep=65)", None),
        ("snapkv(bytes=0.25)", "Short prompts are compressed too, though they can spare little: short=256 leaves them"),
        ("snapkv(keep=0.25, short=100)", "Prompts of fewer than 100 tokens stay whole."),
        ("snapkv(keep=1.0)", None),
    ],
)
def test_what_recipes_do_to_prompts_is_said(run: Run, became: list[list[str]], recipe: str, said: str | None) -> None:
    first = run("serve", "a/model", "--port", "0", "--block-size", "32", "--recipe", recipe).err.splitlines()[0]
    assert first.startswith(said) if said else " serve a/model " in first


def test_small_budgets_are_advised(run: Run, became: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    done = run("serve", "--recipe", "snapkv(keep=96, every=64)")
    assert "add --block-size 32" in done.err.splitlines()[1]
    assert "--block-size" not in " ".join(became[0])


def test_a_server_takes_its_contexts_precision(run: Run, became: list[list[str]], tiny: Any, tmp_path: Path) -> None:
    """Unless it is told another, or its contexts do not agree."""
    folder = tmp_path / "contexts"
    folder.mkdir()

    def dtypes(*words: str) -> list[str]:
        done = run("serve", "--contexts", str(folder), "--port", "0", *words)
        assert done.code == 0
        line = became[-1]
        return [line[at + 1] for at, word in enumerate(line) if word == "--dtype"]

    assert dtypes() == []
    for precision in ("float32", "bfloat16"):
        cache = keepset.Cache(tiny[0].to(getattr(torch, precision)), "knorm(keep=0.5)")
        with torch.no_grad():
            tiny[0](torch.arange(40)[None], past_key_values=cache)
        cache.save(folder / f"{precision}.safetensors")
        assert dtypes() == (["float32"] if precision == "float32" else [])
        assert dtypes("--dtype", "float16") == ["float16"]
    tiny[0].float()


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--recipe", "snapkv"], "does not say how much to keep"),
        (["m", "--recipe", "compilerkv(tables='t', keep=90)"], "There is no file 't' with tables"),
        (["m", "--recipe", "qfilter(stats='absent', keep=9)"], "There is no file 'absent' with statistics"),
        (["./absent"], "'./absent' is neither an existing folder nor the name of a model"),
        (["."], "The folder '.' has no config.json"),
        (["m", "--port", "many"], "--port many is no port"),
        (["m", "--port=70000"], "--port 70000 is no port"),
    ],
)
def test_refused(run: Run, became: list[list[str]], words: list[str], because: str) -> None:
    done = run("serve", *words)
    assert (done.code, done.out) == (2, "")
    assert because in done.err and done.err.count("\n") == 1
    assert became == []


def test_a_port_that_is_taken(run: Run, became: list[list[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", "a/model", "--port", port)
    assert (done.code, became) == (2, []) and f"--port {port} of 127.0.0.1 is not available" in done.err


def test_a_model_too_large(run: Run, became: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    (tmp_path / "embedded" / "model.safetensors").write_bytes(b"x" * 1001)
    done = run("serve", "--port", "0")
    assert done.code == 2 and "take 0 MB, and 0 MB of memory are free" in done.err and became == []


@pytest.mark.parametrize(("free", "space"), [(2**30, 1), (10 * 2**30, 2), (64 * 2**30, 4)])
def test_on_a_cpu_memory_is_asked_for_sparingly(
    run: Run, became: list[list[str]], monkeypatch: pytest.MonkeyPatch, free: int, space: int
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert run("serve", "a/model", "--port", "0", "--gpu-memory-utilization", "0.5").code == 0
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert f"The KV cache gets {space * 2**30 / 1e6:.0f} MB" in run("serve", "a/model", "--port", "0").err
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == str(space)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")


def test_the_recipe_is_read_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks.importlib.util, "find_spec", lambda name: None)
    assert "did you mean" in run("serve", "--recipe", "snapvk").err
    done = run("serve", "--recipe", "snapkv(keep=0.5)")
    assert done.code == 2
    assert done.err.startswith('keepset: vLLM is not installed: run `pip install "vllm') and done.err.endswith('"`.\n')


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    heavy = {"torch", "transformers", "vllm", "httpx2", "prometheus_client", "plotly"}
    code = f"import sys, keepset.lab.cli, keepset.serving; print(sorted({heavy!r} & set(sys.modules)))"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
