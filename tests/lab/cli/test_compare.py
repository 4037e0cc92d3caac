import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import defaults
from keepset.hf.prompt_session import CachedPrompt
from keepset.lab.cli import checks
from keepset.lab.cli.checks import offered_recipes
from keepset.lab.cli.compare import BUDGETS as DEFAULT_BUDGETS
from keepset.lab.compare import decode
from keepset.lab.compare.prompt import PromptComparer
from tests.lab.cli.conftest import Run, load_json

RECIPES = ["tova", "snapkv(window=8)", "quantized(adakv(h2o))"]
BUDGETS = ["bytes=0.5", "keep=20"]
COMPARE = (
    *("compare", "--text", "text", "--prompt-tokens", "200", "--continuation", "16"),
    *("--recipes", ", ".join(RECIPES), "--budgets", "0.5,20"),
)
CANONICAL = [
    recipe[:-1] + f", {budget})" if "(" in recipe else f"{recipe}({budget})" for recipe in RECIPES for budget in BUDGETS
]
ROW = {
    "recipe",
    "method",
    "requested",
    "keep",
    "share",
    "counted_bytes",
    "kv_bytes",
    "kv_bytes_full",
    "kl",
    "kl_low",
    "kl_high",
} | {
    *("nll_delta", "top1"),
    *("prefill_seconds", "prefill_seconds_full", "select_seconds", "decode_tokens_per_second"),
}
FULL = {"counted_bytes", "kv_bytes", "fixed_bytes", "nll", "prefill_seconds", "decode_tokens_per_second"}
ASKED = {"answer", "needle_found"}

KEYS_AND_VALUES = 2 * 2 * 8 * 2 * 4
"""Bytes of one token in the tiny model: keys and values, 2 KV heads of 8 numbers, 2 layers, float32."""
POSITIONS = 2 * 2 * 4
"""Bytes of a kept token's positions: 2 KV heads, 2 layers, int32."""

pytestmark = pytest.mark.usefixtures("tiny", "text")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small budgets are nothing to note."""
    monkeypatch.setattr(checks, "_FEW", 1)


def figures() -> Any:
    return load_json(Path("figures").read_text(encoding="utf-8"))


def test_figures_page_and_table(run: Run) -> None:
    done = run(*COMPARE, "--json", "figures", "--html", "page.html")
    assert (done.code, done.err) == (0, "figures: figures\nreport: page.html\n")
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and all(text in page for text in CANONICAL)
    comparison = figures()
    assert comparison["model"] == "SmolLM2-135M-Instruct"
    assert comparison["tokens"] == 200 and comparison["continuation_tokens"] == 16
    assert comparison["needle"] is None
    full, rows = comparison["full"], comparison["rows"]
    assert set(full) == FULL
    assert full["kv_bytes"] == 200 * KEYS_AND_VALUES == 2 * full["counted_bytes"] and full["fixed_bytes"] == 0
    assert full["nll"] > 0 and full["prefill_seconds"] > 0 and full["decode_tokens_per_second"] > 0

    assert [row["recipe"] for row in rows] == CANONICAL
    assert [row["method"] for row in rows] == [str(keepset.Recipe.parse(text)) for text in RECIPES for _ in BUDGETS]
    for row, budget in zip(rows, BUDGETS * 3, strict=True):
        assert set(row) == ROW and row["requested"] == budget
        # On a model of 16 bits an entry of a head takes 32 bytes and its position, or 16 and two scales and a position.
        entry = 24 if "quantized" in row["recipe"] else 36
        kept = 20 if budget == "keep=20" else 200 * 32 // (2 * entry)
        assert row["share"] == kept * entry / (200 * 32) <= 0.5
        assert row["counted_bytes"] == 4 * kept * entry
        assert row["keep"] == kept / 200
        assert row["kv_bytes_full"] == full["kv_bytes"]
        # In 8 bits a quarter, and two scales in each of four heads.
        whole, in_8_bits = KEYS_AND_VALUES, KEYS_AND_VALUES // 4 + 4 * 2 * 4
        assert row["kv_bytes"] == kept * (POSITIONS + (in_8_bits if "quantized" in row["recipe"] else whole))
        assert row["kl"] > 1e-6 and 0 <= row["top1"] <= 1
        assert row["prefill_seconds_full"] == full["prefill_seconds"]
        assert 0 < row["select_seconds"] < row["prefill_seconds"] - row["prefill_seconds_full"] + 1e-9
        assert row["decode_tokens_per_second"] > 0
        assert str(keepset.Recipe.parse(row["recipe"])) == row["recipe"]
    # The best first under each budget, and a conclusion.
    first, header, full_cache, *lines, allocated, last = done.out.splitlines()
    assert first == "SmolLM2-135M-Instruct: 200 tokens of prompt, 16 after it."
    assert header.split() == ["recipe", "MB", "of", "16-bit", "KL", "top-1", "prefill"]
    assert full_cache.split() == ["full", "cache", "0.026", "100.0%", "0.000", "100%", "x1.00"]
    assert [lines[0].strip(), lines[4].strip()] == BUDGETS
    for budget, shown in zip(BUDGETS, (lines[1:4], lines[5:]), strict=True):
        order = sorted((row for row in comparison["rows"] if row["requested"] == budget), key=lambda row: row["kl"])
        assert all(line.strip().startswith(f"{row['method']} ") for line, row in zip(shown, order, strict=True))
        assert [line.split()[-3] for line in shown] == [f"{row['kl']:.3f}" for row in order]
        shares = [f"{row['share']:.1%}" for row in order]
        assert [line.split()[-5] for line in shown] == [f"{row['counted_bytes'] / 1e6:.2g}" for row in order]
        assert [line.split()[-4] for line in shown] == shares
    most = max(row["kv_bytes"] for row in rows) / 1e6
    assert allocated.startswith("Allocated: 0.1 MB for the full cache, ")
    assert allocated.endswith(f" to {most:.2g} MB under recipes.") or most >= 0.05
    assert last == "Nothing can be concluded from a text of 200 tokens: give one of at least 256."


def test_json_with_a_question(run: Run) -> None:
    """About the essay; `test_images.py` asks about a text of one's own."""
    done = run("compare", "--prompt-tokens", "200", "--recipes", "knorm(keep=0.5)", "--json", "-")
    assert done.code == 0
    comparison = load_json(done.out)
    assert set(comparison["needle"]) == {"question", "answer"} and set(comparison["full"]) == FULL | ASKED
    (row,) = comparison["rows"]
    assert set(row) == ROW | ASKED
    assert row["needle_found"] is (comparison["needle"]["answer"].lower() in row["answer"].lower())


def test_row_that_fails(run: Run) -> None:
    words = ["compare", "--text", "text", "--prompt-tokens", "200", "--continuation", "16", "--budgets", "0.5,8"]
    recipes = ["--recipes", "tova, snapkv, tova(keep=30, every=8)"]
    done = run(*words, *recipes, "--json", "figures")
    assert (done.code, done.err) == (1, "figures: figures\n")
    rows = figures()["rows"]
    grid = [f"{name}({budget})" for name in ("tova", "snapkv") for budget in ("bytes=0.5", "keep=8")]
    assert [row["recipe"] for row in rows] == [*grid, "tova(keep=30, every=8)"]
    assert [set(row) for row in rows] == [ROW] * 3 + [{"recipe", "method", "requested", "error"}] * 2
    assert rows[3]["error"].startswith("keep=8 is below the 64 entries that always stay")
    assert done.out.count("keep=8 is below the 64 entries that always stay") == 1
    assert (
        done.out.index("\nbytes=0.5") < done.out.index("\nkeep=8") < done.out.index("snapkv(keep=8): keep=8 is below")
    )


@pytest.mark.full
def test_demo(run: Run, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shorter text and fewer recipes than the demo's own, which `make demo` has."""
    command = sys.modules["keepset.lab.cli.compare"]
    monkeypatch.setattr(command, "_PROMPT_TOKENS", 320)
    monkeypatch.setattr(command, "_CONTINUATION", 8)
    monkeypatch.setattr(defaults, "COMPARED", ("random", "kvzip"))
    done = run("demo")
    assert done.code == 0 and done.err.endswith("report: keepset-demo.html\n")
    assert "Asked after compression: What is the secret number of Oslo?" in done.out
    for recipe in offered_recipes(tiny[0]):
        assert done.out.count(f"  {recipe} ") == len(DEFAULT_BUDGETS.split(","))
    assert (tmp_path / "keepset-demo.html").is_file()


# --- decoding

DECODE = ("compare", "--decode", "--text", "text", "--prompt-tokens", "100")
DECODE += ("--recipes", "tova, knorm(keep=30, every=7)")


def test_decode_figures_table_and_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DRIFT_TOKENS", 32)
    words = ("--continuation", "60", "--budgets", "20,40", "--every", "16", "--json", "figures", "--html", "page.html")
    done = run(*DECODE, *words)
    assert (done.code, done.err) == (0, "figures: figures\nreport: page.html\n")
    assert "MB of 16-bit peak MB KL top-1 prefill" in " ".join(done.out.splitlines()[1].split())
    assert "  tova(every=16) " in done.out and "Fidelity against bytes" in Path("page.html").read_text(encoding="utf-8")
    comparison = figures()
    assert (comparison["tokens"], comparison["continuation_tokens"], comparison["drift_tokens"]) == (100, 60, 32)
    assert set(comparison["full"]) == FULL | {"kv_bytes_peak"}
    assert comparison["full"]["kv_bytes_peak"] == 160 * KEYS_AND_VALUES
    # The mean over 60 tokens, of which the last is the 160th.
    assert comparison["full"]["counted_bytes"] == 130.5 * KEYS_AND_VALUES / 2
    recipes = ["tova(keep=20, every=16)", "tova(keep=40, every=16)", "knorm(keep=30, every=7)"]
    assert [row["recipe"] for row in comparison["rows"]] == recipes
    for row, keep, every in zip(comparison["rows"], (20, 40, 30), (16, 16, 7), strict=True):
        assert set(row) == ROW | {"kv_bytes_peak", "kl_drift"}
        assert row["keep"] == (keep + 60 % every) / 160
        assert keep * 4 * 36 <= row["counted_bytes"] < (keep + every) * 4 * 36
        assert row["kv_bytes"] <= row["kv_bytes_peak"] < (keep + every + 64) * (KEYS_AND_VALUES + POSITIONS)
        assert row["kv_bytes_full"] == comparison["full"]["kv_bytes"]
        assert len(row["kl_drift"]) == 2 and min(row["kl_drift"]) > 1e-6


@pytest.mark.full
def test_decode_what_the_model_generated(run: Run, tiny: Any) -> None:
    model, tokenizer = tiny
    done = run(*DECODE, "--generate", "40", "--budgets", "4096", "--json", "-")
    assert done.code == 0
    comparison = load_json(done.out)
    assert (comparison["tokens"], comparison["continuation_tokens"]) == (100, 40)
    ids = tokenizer(Path("text").read_text(), add_special_tokens=True, return_tensors="pt")["input_ids"][:, :100]
    said = model.generate(ids, do_sample=False, max_new_tokens=40, min_new_tokens=40)
    with torch.no_grad():
        logits = model(said).logits[0, 100:-1]
    nll = torch.nn.functional.cross_entropy(logits, said[0, 101:])
    assert comparison["full"]["nll"] == pytest.approx(float(nll), abs=1e-4)
    assert comparison["rows"][0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.full
def test_decode_runs_what_it_chooses_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["keepset.lab.cli.compare"], "DECODING_BUDGETS", "128")
    done = run("compare", "--decode", "--prompt-tokens", "100", "--continuation", "70", "--json", "-")
    assert done.code == 0
    assert [row["keep"] < 0.8 for row in load_json(done.out)["rows"]] == [True] * 9  # of 170 tokens 128


# --- Ctrl-C


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second row."""
    measure = PromptComparer._measure

    def row(self: PromptComparer, *args: Any) -> Any:
        if self.comparison.rows:
            raise KeyboardInterrupt
        return measure(self, *args)

    monkeypatch.setattr(PromptComparer, "_measure", row)


@pytest.mark.usefixtures("interrupted")
def test_what_is_done_is_there_after_an_interrupt(run: Run) -> None:
    words = (*COMPARE[:4], "300", *COMPARE[5:])  # long enough to conclude something
    done = run(*words, "--html", "page.html", "--json", "figures")
    assert done.code == 130 and done.err.endswith("interrupted after 1 of 6 rows: nothing is concluded\n")
    assert [row["recipe"] for row in figures()["rows"]] == CANONICAL[:1] and figures()["conclusion"] == ""
    *_, budget, row, _ = done.out.splitlines()
    assert budget.strip() == BUDGETS[0] and row.split()[0] == "tova"
    page = Path("page.html").read_text(encoding="utf-8")
    assert CANONICAL[0] in page and CANONICAL[1] not in page


def test_a_small_budget_may_be_meant_as_a_percentage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done = run(*COMPARE, "--budgets", "0.5,3,1")
    assert done.err.splitlines()[:2] == [
        "The budget 3 is 3 entries of every head; 3 % of the bytes are 0.03.",
        "The budget 1 is one entry of every head; did you mean 1.0, all bytes?",
    ]


@pytest.mark.parametrize("where", [(CachedPrompt, "follow"), (PromptComparer, "_measure")])
def test_interrupt_before_the_first_row(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, interrupt)
    done = run(*COMPARE, "--html", "page.html")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
    assert not (tmp_path / "page.html").exists()
