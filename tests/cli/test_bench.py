"""`keepset bench serve`, against small servers that speak as vLLM does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keepset.serving import command as commands
from keepset.serving import prompts, start_checks
from keepset.serving.prompts import TextSource
from tests.bench.sweep.asked import letters
from tests.cli.conftest import Forked, Run, load_json
from tests.serving.conftest import bench, fake
from tests.serving.fake_vllm import Fake

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "serving" / "fake_vllm.py"
RECIPE = ("--recipe", "snapkv(keep=512,every=256)")
SIZES = ("--requests", "6", "--prompt-tokens", "5", "--output-tokens", "4")
BENCH = ("bench", "serve", *RECIPE, *SIZES)

__all__ = ["bench", "fake"]  # The fixtures.


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch, bench: None) -> None:
    """A letter is a token."""
    tokenizer = letters()
    alphabet = tokenizer("".join(map(chr, range(65, 123))))["input_ids"]
    monkeypatch.setattr(prompts, "text_source", lambda folder: TextSource(tokenizer, alphabet))
    monkeypatch.setattr(start_checks, "check_installed", lambda recipe: None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """How servers were started; those with the word --will-not-start take it only with a recipe."""
    started: list[list[str]] = []

    def command(
        model: str | None, recipe: Any, options: Sequence[str], forced: Sequence[str], contexts: Path | None = None
    ) -> list[str]:
        saved = [] if contexts is None else sorted(path.name for path in contexts.iterdir())
        started.append([str(model), str(recipe), *options, *saved])
        words = [word for word in options if word != "--will-not-start"]
        crash = ["--crash"] if recipe is not None and len(words) < len(options) else []
        return [sys.executable, str(FAKE), *words, *crash, *forced]

    monkeypatch.setattr(commands, "command", command)
    return started


def test_plain_against_recipe(run: Run, servers: list[list[str]], tmp_path: Path) -> None:
    done = run(*BENCH, "--rounds", "2", "--json", "a.json", "--html", "a.html", "a/model", "--", "--dtype", "float32")
    assert done.code == 0
    assert servers == [
        ["a/model", "None", "--dtype", "float32"],
        ["a/model", "snapkv(keep=512, every=256)", "--dtype", "float32"],
    ]
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "a/model: 6 requests of 5 + 4 tokens, at most 6 at once, 2 rounds."
    assert lines[1:3] == ["recipe: snapkv(keep=512, every=256)", "plain recipe ratio"]
    assert "requests answered 12 12 x1.00" in lines
    assert any(line.startswith("keepset: entries kept ") for line in lines)
    first, *others = done.err.splitlines()
    assert first.startswith("Two servers, one after the other") and "6 requests of 5 + 4 tokens, 2 times" in first
    assert others == ["figures: a.json", "report: a.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]

    result = load_json((tmp_path / "a.json").read_text("utf-8"))
    assert list(result) == ["model", "recipe", "load", "options", "keepset", "servers"]
    assert result["load"]["requests"] == 6 and result["load"]["rounds"] == 2
    assert [server["name"] for server in result["servers"]] == ["plain", "recipe"]
    assert [server["recipe"] for server in result["servers"]] == [None, "snapkv(keep=512, every=256)"]
    for server in result["servers"]:
        assert server["summary"]["requests"] == 12 and server["summary"]["failed"] == 0
        assert server["summary"]["output_tokens"] == 48
        assert [len(request["chunks"]) for request in server["requests"]] == [4] * 12
        assert len(server["samples"]) >= 2


@pytest.mark.full
def test_questions_to_documents(
    run: Run, servers: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servers are sent documents with their questions; the second finds the contexts by their first tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=256, head_dim=8
    )
    tiny = LlamaForCausalLM(config).eval()
    monkeypatch.setattr("keepset.models.load", lambda folder, dtype: (tiny, None))
    sizes = ("--requests", "3", "--prompt-tokens", "40", "--question-tokens", "7", "--output-tokens", "4")
    recipe = ("--recipe", "second_pass(sinks=1, recent=1, keep=10)")  # which no vLLM computes
    done = run("bench", "serve", *recipe, *sizes, "--contexts", "--rounds", "2", "--json", "a.json", "a/model")
    before, first, *others = done.err.splitlines()
    assert before == "First 3 documents of 40 tokens are compressed, one after the other."
    assert done.code == 0 and first.startswith("Two servers, one after the other") and others == ["figures: a.json"]
    assert servers == [["a/model", "None"], ["a/model", "None", *(f"document-{i}.safetensors" for i in range(3))]]
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "a/model: 3 documents of 40 + 7 + 4 tokens, at most 3 at once, 2 rounds."
    assert lines[2] == "plain contexts ratio"
    # 40 blocks of 4 tokens: 10 for a document; of 10 entries of every head two pages of 4 are full, and a last one.
    assert "documents that the pool holds 4 20 x5.00 better" in lines
    plain, contexts = load_json((tmp_path / "a.json").read_text("utf-8"))["servers"]
    assert plain["summary"]["prompt_tokens"] == contexts["summary"]["prompt_tokens"] == 2 * 3 * 47
    block_bytes = 2 * 2 * 4 * 2 * 8 * 4  # layers, heads, entries, keys and values, numbers, bytes
    assert (plain["documents"]["nbytes"], contexts["documents"]["nbytes"]) == (10 * block_bytes, 2 * block_bytes)
    assert contexts["documents"]["first_token_seconds"]["later"]["p50"] > 0


def test_a_server_that_runs_already(run: Run, fake: Fake) -> None:
    done = run("bench", "serve", "--url", fake.url + "/", *SIZES, "--concurrency", "2")
    assert (done.code, done.err) == (0, "")
    assert "fake: 6 requests of 5 + 4 tokens, at most 2 at once." in done.out
    assert " ratio" not in done.out
    assert len(fake.asked) == 7 and fake.most <= 2


@pytest.mark.full
def test_two_servers_that_run_already(run: Run, fake: Fake) -> None:
    urls = ("--url", fake.url, "--url", fake.url.replace("127.0.0.1", "localhost"))
    done = run("bench", "serve", *urls, *SIZES)
    assert (done.code, done.err) == (0, "")
    assert " ratio" in done.out and "localhost:" in done.out and len(fake.asked) == 14


@pytest.mark.full
def test_failed_requests_are_shown(run: Run, servers: list[list[str]], tmp_path: Path) -> None:
    done = run(*BENCH, "--json", "a.json", "--", "--fail")
    assert done.code == 1
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "requests failed 1 1 x1.00" in lines
    assert any(line.startswith("plain: ") and "503" in line for line in lines)
    assert load_json((tmp_path / "a.json").read_text("utf-8"))["servers"][1]["summary"]["failed"] == 1


@pytest.mark.full
def test_a_server_that_does_not_start(run: Run, servers: list[list[str]], tmp_path: Path) -> None:
    done = run(*BENCH, "--json", "a.json", "--", "--will-not-start")
    assert (done.code, done.out) == (1, "")
    assert len(servers) == 2
    assert done.err.splitlines()[-1] == "keepset: The server stopped with exit code 7."
    assert "| line 99" in done.err.splitlines()
    assert "| �[31m[red]out of memory[/red]?" in done.err.splitlines()
    assert "\x1b" not in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_server_that_takes_too_long(run: Run, servers: list[list[str]]) -> None:
    done = run(*BENCH, "--start-timeout", "0.5", "--", "--silent")
    assert done.code == 1
    assert done.err.endswith("keepset: The server did not answer within 0.5 s.\n")


def test_a_load_that_does_not_fit(run: Run, servers: list[list[str]], fake: Fake) -> None:
    done = run("bench", "serve", *RECIPE, "--prompt-tokens", "4000", "--output-tokens", "97")
    assert (done.code, done.out) == (2, "")
    assert "do not fit the server's context of 4096" in done.err and done.err.count("\n") == 2
    done = run("bench", "serve", "--url", fake.url, "--prompt-tokens", "4000", "--output-tokens", "97")
    assert done.code == 2 and fake.asked == []


def test_what_a_server_says_is_text(run: Run, servers: list[list[str]], fake: Fake, tmp_path: Path) -> None:
    fake.models = {"data": [{"id": "</script><b>\x1b[31m[red]"}]}
    done = run("bench", "serve", "--url", fake.url, *SIZES, "--html", "a.html")
    assert done.code == 0
    assert done.out.startswith("</script><b>�[31m[red]: 6 requests")
    assert "\x1b" not in done.out
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "</script><b>" not in page and "\\u003c/script\\u003e\\u003cb\\u003e" in page


@pytest.mark.parametrize("missing", ["httpx2", "prometheus_client.parser", "pandas"])
def test_a_library_that_is_not_installed(run: Run, fake: Fake, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = run("bench", "serve", "--url", fake.url, *SIZES)
    assert (done.code, done.out) == (2, "")
    assert 'is not installed: run `pip install "keepset[serve]"`.' in done.err


@pytest.mark.full
@pytest.mark.usefixtures("interrupts", "servers")
@pytest.mark.parametrize(("how", "number"), [("--slow", signal.SIGINT), ("--silent", signal.SIGTERM)])
def test_interrupted(how: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests run, and while the server starts."""
    monkeypatch.chdir(tmp_path)
    process = Forked(*BENCH, "--json", "a.json", "--html", "a.html", "--", how)
    until = time.monotonic() + 60
    while not (children := servers_of(process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2.0)
    done = process.interrupt(number)
    assert (done.code, done.out) == (128 + number, "")
    assert "Traceback" not in done.err
    first, *others = done.err.splitlines()
    assert first.startswith("Two servers, one after the other")
    assert others == (["interrupted: nothing is reported"] if number == signal.SIGINT else [])
    assert not list(tmp_path.iterdir())
    assert children and all(not Path(f"/proc/{child}").exists() for child in children)


def servers_of(pid: int) -> list[int]:
    """The small servers among a process's children."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    pids = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [child for child in pids if FAKE.name in Path(f"/proc/{child}/cmdline").read_text()]
