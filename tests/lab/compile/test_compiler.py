"""From contexts to tables: what was planted is found, and an interrupted compilation ends where a whole one does."""

import dataclasses
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset import KeepsetError
from keepset.core.tables import Tables, neutral, save
from keepset.lab.compile import compiler
from keepset.lab.compile.compiler import CompileSettings, compile_tables, risk_bins, stratified, with_edges
from keepset.lab.compile.cql import THRESHOLDS, WEIGHTS, draw
from keepset.lab.compile.judge import Judge, Verdict
from keepset.lab.compile.log import Log, Trial
from keepset.methods.compilerkv import CompilerKV
from tests.hf.models import tiny
from tests.lab.compile.conftest import CONTINUATION, TOKENS, corpus

WINDOW = 5


def options(**other: Any) -> CompileSettings:
    sizes = dict(budgets=(8, 12), contexts=2, tokens=TOKENS, continuation=CONTINUATION)
    return CompileSettings(
        **{"method": CompilerKV(window=WINDOW), "seed": 0, "weights": (1.0, 0.5, 2.0), **sizes, **other}
    )


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "HEAD_ROWS", 3)
    monkeypatch.setattr(compiler, "GATE_ROWS", 2)


class Planted(Judge):
    """A world in which one head of every layer should be trusted, and thresholds be low where perplexity is high."""

    def __init__(self, model: Any, method: CompilerKV, context: Any) -> None:
        number = int(context.name.split()[-1])
        self.risk = 1.0 + number % 5, 2.0 if number % 2 else 50.0
        self.number = number

    def verdict(self, tables: Tables, keep: int, *, elastic: bool) -> Verdict:
        layers = tables.weights.shape[1]
        if elastic:
            thresholds = tables.gate[0, :, 0, 0]
            worth = -float(thresholds.sum()) if self.risk[1] > 10 else float(thresholds.sum())
        else:
            # KV head 0 at odd layers, 1 at even ones.
            right = torch.tensor([[layer % 2 == 1] * 2 + [layer % 2 == 0] * 2 for layer in range(layers)])
            worth = float((tables.weights[0].log() * (right.float() - 0.5)).sum())
        return Verdict(worth + self.number, 2 * worth - self.number, float(keep), float(keep))


@pytest.mark.full
@pytest.mark.parametrize("gate", ["sum", "table"])
def test_finds_what_was_planted(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Judge", Planted)
    monkeypatch.setattr(compiler, "HEAD_ROWS", 12)
    monkeypatch.setattr(compiler, "GATE_ROWS", 10)
    monkeypatch.setattr(compiler, "BETA", 0.0)
    texts = corpus(20)
    tables = compile_tables(tiny("llama"), texts, options(contexts=20, gate=gate))
    assert tables.weights.shape == (2, 2, 4) and tables.budgets.tolist() == [8, 12]
    for layer in range(2):
        trusted = [0, 1] if layer % 2 else [2, 3]
        for head in range(4):
            assert tables.weights[:, layer, head].tolist() == [2.0 if head in trusted else 0.5] * 2
    risks = torch.tensor([Planted(None, CompilerKV(), context).risk for context in texts.contexts])
    _, of_perplexity = tables.bins(risks[:, 0], risks[:, 1])
    low, high = of_perplexity.min(), of_perplexity.max()
    assert low < high
    if gate == "sum":
        assert tables.gate[:, :, :, high].unique().tolist() == [pytest.approx(0.8)]
        assert tables.gate[:, :, :, low].unique().tolist() == [1.0]
    else:
        # A state has what was tried in it and nothing else: a few rows, of which one may mislead.
        right_high, right_low = (tables.gate[:, :, tables.counts[:, at] > 0, at] for at in (high, low))
        assert (right_high < 0.81).float().mean() > 0.9 and (right_low == 1.0).float().mean() > 0.8
    assert int(tables.counts.sum()) == 20 and sorted(tables.counts.sum(0).tolist()) == [0, 0, 10, 10]
    bellman = [point["bellman"] for point in tables.provenance["curves"]["head"]]
    assert bellman[-1] < bellman[0] / 4


@pytest.mark.full
def test_a_price_makes_thresholds_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where thresholds change nothing else, equation 14 alone decides; at no price the first of equal ones is taken."""

    class Indifferent(Planted):
        def verdict(self, tables: Tables, keep: int, *, elastic: bool) -> Verdict:
            return Verdict(0.0, 0.0, 0.0, float(20 - 10 * tables.gate[0, :, 0, 0].mean()))

    monkeypatch.setattr(compiler, "Judge", Indifferent)
    monkeypatch.setattr(compiler, "HEAD_ROWS", 12)
    monkeypatch.setattr(compiler, "GATE_ROWS", 10)
    monkeypatch.setattr(compiler, "ALPHA", 0.0)
    tables = compile_tables(tiny("llama"), corpus(4), options())
    assert tables.gate.unique().tolist() == [1.0]
    monkeypatch.setattr(compiler, "BETA", 0.0)
    tables = compile_tables(tiny("llama"), corpus(4), options())
    assert tables.gate.unique().tolist() == [pytest.approx(0.8)] and tables.weights.unique().tolist() == [1.0]


@pytest.mark.parametrize("reward", ["said", "expected"])
def test_rewards_are_equation_2(reward: Any) -> None:
    """With lambda = beta / T and equation 14 for thresholds, and lambda = 0 for heads."""
    numbers = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)).double().tolist()
    for kind, price in (("head", 0.0), ("gate", 0.3 / TOKENS)):
        rows = [
            Trial(f"context {i // 4}", kind, (8, 12)[i // 2 % 2], i, bytes([0, 1]), 0.2, *numbers[i]) for i in range(12)
        ]
        _, rewards, budgets = compiler._arrays(rows, kind, options(reward=reward))
        literal = [getattr(row, reward) - price * (row.admitted - row.keep) for row in rows]
        centred = []
        for row, own in zip(rows, literal, strict=True):
            like = [r for r, o in zip(literal, rows, strict=True) if (o.context, o.keep) == (row.context, row.keep)]
            centred.append(own - sum(like) / len(like))
        for i, row in enumerate(rows):
            under = [c for c, other in zip(centred, rows, strict=True) if other.keep == row.keep]
            spread = (sum(c * c for c in under) / len(under)) ** 0.5
            assert float(rewards[i]) == pytest.approx(centred[i] / spread, rel=1e-5)
            assert int(budgets[i]) == (8, 12).index(row.keep)


def test_a_table_tells_what_a_sum_cannot() -> None:
    """A threshold that is best low where both risks are alike, and high where they differ, at the first layer alone."""
    settings = options(budgets=(8,))
    corners = {"low low": 0, "low high": 3, "high low": 76, "high high": 79}
    draw = torch.Generator().manual_seed(0)
    rows = []
    for context, cell in corners.items():
        for number in range(150):
            actions = torch.randint(len(compiler.THRESHOLDS), (2,), generator=draw)
            tau = compiler.THRESHOLDS[int(actions[0])]
            gained = -tau if cell in (0, 79) else tau
            rows.append(Trial(context, "gate", 8, number, bytes(actions.tolist()), 0.2, gained, gained, 8.0, 8.0))
    gate, _ = compiler._gate_table(rows, settings, 2, corners)
    assert [round(float(gate[0, 0, cell // 4, cell % 4]), 2) for cell in corners.values()] == [0.8, 1.0, 1.0, 0.8]
    summed, _ = compiler._gate_table(rows, dataclasses.replace(settings, gate="sum"), 2, corners)
    apart = [round(float(summed[0, 0, cell // 4, cell % 4]), 2) for cell in corners.values()]
    assert apart != [0.8, 1.0, 1.0, 0.8]


def contents(tables: Tables, path: Path) -> bytes:
    save(tables, path)
    return path.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("global_mean", [True, False])
def test_the_same_seed_the_same_tables(global_mean: bool, tmp_path: Path) -> None:
    method = CompilerKV(window=WINDOW, global_mean=global_mean)
    runs = [compile_tables(tiny("llama"), corpus(3), options(method=method)) for _ in range(2)]
    assert contents(runs[0], tmp_path / "a") == contents(runs[1], tmp_path / "b")
    other = compile_tables(tiny("llama"), corpus(3), options(method=method, seed=1))
    assert not torch.equal(other.weights, runs[0].weights)
    alike = torch.equal(runs[0].weights[..., ::2], runs[0].weights[..., 1::2])
    assert alike == global_mean  # heads that share a KV head


@pytest.mark.full
@pytest.mark.parametrize("after", [1, 7])
def test_an_interrupted_compilation_goes_on(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, log = tiny("llama"), tmp_path / "log"
    whole = compile_tables(model, corpus(3), options())
    true, left = Judge.verdict, [after]

    def interrupted(self: Judge, *args: Any, **kwargs: Any) -> Verdict:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return true(self, *args, **kwargs)

    monkeypatch.setattr(Judge, "verdict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_tables(model, corpus(3), options(), log)
    left[0] = 2 * 2 * 5 - after  # not one more than what is missing
    done = []
    again = compile_tables(model, corpus(3), options(), log, lambda what, count: lambda: done.append(what))
    assert left[0] == 0 and done.count("trying actions") == 20 and done.count("looking at contexts") == 3
    assert contents(again, tmp_path / "a") == contents(whole, tmp_path / "b")
    base = sqlite3.connect(log)
    rows = base.execute("SELECT kind, propensity, length(actions) FROM rewards").fetchall()
    base.close()
    assert sorted(set(rows)) == [("gate", 1 / 5, 2), ("head", 1 / 3, 4)]
    with pytest.raises(KeepsetError, match=r"log of another compilation \(seed differ\)"):
        compile_tables(model, corpus(3), options(seed=1), log)
    with pytest.raises(KeepsetError, match=r"log of another compilation \(model differ\)"):
        compile_tables(tiny("llama_mha"), corpus(3), options(), log)


def test_processes_share_a_log(tmp_path: Path) -> None:
    """They write at once, the same trials and others: none is lost, none is there twice, and the first one stays."""
    path, settings = tmp_path / "log", {"seed": 0}
    code = (
        "import sys; from pathlib import Path\n"
        "from keepset.lab.compile.log import Log, Trial\n"
        "log, me = Log(Path(sys.argv[1]), {'seed': 0}), int(sys.argv[2])\n"
        "for n in range(40):\n"
        "    log.add_risk(f'context {n}', (n, 1.0))\n"
        "    log.add(Trial('shared', 'head', 8, n, b'', 0.5, me, 0.0, 0.0, 0.0))\n"
        "    log.add(Trial(f'own {me}', 'head', 8, n, b'', 0.5, me, 0.0, 0.0, 0.0))\n"
        "    assert log.has('shared', 'head', 8, n) and log.has_risk(f'context {n}')\n"
    )
    works = [subprocess.Popen([sys.executable, "-c", code, str(path), str(me)]) for me in (1, 2)]
    assert [work.wait() for work in works] == [0, 0]
    log = Log(path, settings)
    trials, risks = log.trials, log.risks
    first = next(row for row in trials if row.context == "shared")
    log.add(dataclasses.replace(first, said=9.0))
    assert log.trials == trials and not log.has("shared", "gate", 8, 0)
    log.close()
    assert len(risks) == 40 and sorted({row.context for row in trials}) == ["own 1", "own 2", "shared"]
    assert len(trials) == 3 * 40 == len({(row.context, row.number) for row in trials})


def test_what_is_no_log_is_left_alone_and_an_empty_one_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"precious" * 200)
    with pytest.raises(KeepsetError, match="cannot be used as a log"):
        compile_tables(tiny("llama"), corpus(3), options(), path)
    assert path.read_bytes() == b"precious" * 200
    foreign = tmp_path / "foreign"
    base = sqlite3.connect(foreign)
    base.execute("CREATE TABLE precious (a)")
    base.close()
    before = foreign.read_bytes()
    with pytest.raises(KeepsetError, match="it holds other tables"):
        compile_tables(tiny("llama"), corpus(3), options(), foreign)
    assert foreign.read_bytes() == before
    with pytest.raises(KeepsetError, match="cannot be used as a log"):
        compile_tables(tiny("llama"), corpus(3), options(), tmp_path / "absent" / "log")
    path = tmp_path / "new"
    Log(path, {"seed": 0}).close()
    assert not path.exists()
    log = Log(path, {"seed": 0})
    log.add_risk("a text", (1.0, 2.0))
    log.close()
    Log(path, {"seed": 0}).close()
    assert path.exists()


@pytest.mark.parametrize(
    ("other", "because"),
    [
        ({"budgets": ()}, "Budgets must be rising"),
        ({"budgets": (12, 8)}, "Budgets must be rising"),
        ({"budgets": (8, 8)}, "Budgets must be rising"),
        ({"budgets": (8, TOKENS)}, f"A budget of {TOKENS} leaves nothing to decide"),
        ({"weights": (1.0, 1.0)}, "Weights 1, 1 are no choice"),
        ({"weights": (1.0, float("nan"))}, "Weights 1, nan are no choice"),
    ],
)
def test_settings_that_say_nothing(other: dict[str, Any], because: str) -> None:
    with pytest.raises(KeepsetError, match=because):
        options(**other)


# --- bins and actions


def test_contexts_are_taken_evenly_and_a_model_that_keepset_leaves_alone_is_refused() -> None:
    # However many a bin has, none gets a second turn while another waits for its first.
    bins = [0] * 10 + [3] * 2 + [7]
    assert [bins[i] for i in stratified(bins, 3)] == [0, 3, 7]
    assert [bins[i] for i in stratified(bins, 5)] == [0, 0, 3, 3, 7]
    assert [bins[i] for i in stratified(bins, 7)] == [0, 0, 0, 0, 3, 3, 7]
    assert stratified(bins, 99) == list(range(13))
    model = tiny("mistral_window")
    with pytest.warns(UserWarning), pytest.raises(KeepsetError, match="there is nothing to compile"):
        compile_tables(model, corpus(2), dataclasses.replace(options(), contexts=1))


@pytest.mark.parametrize("case", ["spread", "alike", "one", "infinite"])
def test_edges_rise_whatever_the_risks_are(case: str) -> None:
    risks = torch.stack([torch.linspace(2, 5, 30), torch.logspace(0, 3, 30)], 1)
    risks = {"spread": risks, "alike": risks[:1].repeat(4, 1), "one": risks[:1], "infinite": risks + torch.inf}[case]
    tables = with_edges(neutral(1, 1, 0.9), risks)
    assert bool((tables.entropy_edges.diff() > 0).all()) and bool((tables.perplexity_edges.diff() > 0).all())
    assert tables.entropy_edges.isfinite().all() and tables.perplexity_edges.isfinite().all()
    if case == "spread":
        counts = torch.bincount(risk_bins(tables, risks), minlength=80).view(20, 4)
        assert int(counts.sum()) == 30
        assert bool((counts.sum(1) > 0).all()) and bool((counts.sum(0) > 0).all())
        # Equal widths: of what is spread evenly, in nats and in the logarithm, all inner bins have as much.
        assert counts.sum(1)[1:-1].max() - counts.sum(1)[1:-1].min() <= 1


def test_actions_are_all_as_likely_and_do_not_depend_on_one_another() -> None:
    for count, actions in ((12, 3), (8, 5), (1, 3)):
        drawn = torch.stack([draw(count, 7, actions, f"seed {i}") for i in range(600)])
        assert drawn.shape == (600, count, 7)
        each = torch.stack([(drawn == action).sum(1) for action in range(actions)])
        assert int(each.amax(0).max() - each.amin(0).min()) <= 1  # balanced in every decision
        shares = torch.stack([(drawn == action).double().mean(0) for action in range(actions)])
        assert bool((shares - 1 / actions).abs().max() < 0.1)
        together = ((drawn[..., 0] == 0) & (drawn[..., 1] == 0)).double().mean()
        assert abs(float(together) - 1 / actions**2) < 0.03
    assert torch.equal(draw(4, 3, 3, "a"), draw(4, 3, 3, "a"))
    assert not torch.equal(draw(12, 30, 3, "a"), draw(12, 30, 3, "b"))
    assert len(WEIGHTS) == len(set(WEIGHTS)) and WEIGHTS[0] == 1.0
    assert list(THRESHOLDS) == sorted(THRESHOLDS) and (THRESHOLDS[0], THRESHOLDS[-1]) == (0.8, 1.0)
