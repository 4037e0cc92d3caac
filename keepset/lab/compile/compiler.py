"""CompilerKV's offline compilation of contexts into tables (Yang et al. 2026, sections 3.2 to 4.4 and B.1)."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

import keepset
from keepset.contexts.fingerprint import fingerprint, sample
from keepset.core.tables import ENTROPY_BINS, PERPLEXITY_BINS, Tables, neutral
from keepset.errors import BudgetError, RecipeError, UnsupportedModelError
from keepset.hf.prompt_session import PromptSession
from keepset.lab.compile.corpus import ContextPool, Passage
from keepset.lab.compile.cql import THRESHOLDS, WEIGHTS, Logged, best, draw, learn
from keepset.lab.compile.judge import Judge
from keepset.lab.compile.log import Log, Trial
from keepset.methods.compilerkv import CompilerKV
from keepset.recipe import Recipe, in_full

ALPHA = 0.1
"""How conservative the learning is; the paper gives no number. Rewards have a standard deviation of 1."""
BETA = 0.3
"""The cost of keeping all entries of a prompt, in nats per following token; the paper gives no number."""
HEAD_ROWS, GATE_ROWS = 12, 8
"""The rewards of a context under one budget, for each table."""
POOL = 2
"""How many contexts are measured for each one that is used, so that rare risks are found."""
_TAIL = 0.05
"""The share of all contexts in the outermost bin of risk of each side."""
Stage = Callable[[str, int], Callable[[], None]]
"""Shows progress: takes a description and a number of steps, and returns a function to call after each step."""
Work = TypeVar("Work")
Reward = Literal["expected", "said"]
Gate = Literal["table", "sum"]


@dataclass(frozen=True)
class CompileSettings:
    """The settings of a compilation, beside model and texts.

    Attributes:
        method: the method for which tables are made, with its window and ablations.
        budgets: entries per KV head, rising.
        contexts: number of contexts on which actions are tried.
        tokens: tokens of a context.
        continuation: tokens after a context, whose predictions decide the reward.
        seed: seed of the contexts' order and of all actions.
        weights: the possible weights of a head; of equally good ones the first is taken.
        reward: the field of `Verdict` that is learned from.
        gate: how the value of a threshold is learned: one number for each pair of layer and risk (`table`), or one for
            the layer plus one for each risk (`sum`).

    Raises:
        KeepsetError: settings contradict one another.
    """

    method: CompilerKV
    budgets: tuple[int, ...]
    contexts: int
    tokens: int
    continuation: int
    seed: int
    weights: tuple[float, ...] = WEIGHTS
    reward: Reward = "said"
    gate: Gate = "table"

    def __post_init__(self) -> None:
        if self.method.tables:
            raise RecipeError(f"{Recipe.of(self.method)} has tables already: leave tables= out.")
        for keep in self.budgets:
            if not self.method.window < keep < self.tokens:
                raise BudgetError(
                    f"A budget of {keep} leaves nothing to decide: contexts have {self.tokens} tokens, of which the "
                    f"newest {self.method.window} always stay, so use whole numbers between these two."
                )
        if not self.budgets or list(self.budgets) != sorted(set(self.budgets)):
            raise BudgetError("Budgets must be rising and different from one another, such as 128,256,512.")
        if not 1 < len(set(self.weights)) == len(self.weights) < 256 or not all(map(math.isfinite, self.weights)):
            raise RecipeError(
                f"Weights {', '.join(f'{weight:g}' for weight in self.weights)} are no choice: give two or more finite "
                "numbers, all different, such as 1,2,0.5,0,-1."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as provenance and log store them."""
        lists = {"budgets": list(self.budgets), "weights": list(self.weights)}
        return {**asdict(self), "method": in_full(str(Recipe.of(self.method))), **lists}


def compile_tables(
    model: PreTrainedModel,
    pool: ContextPool,
    settings: CompileSettings,
    log: Path | None = None,
    stage: Stage = lambda title, count: lambda: None,
) -> Tables:
    """Measure contexts, try joint actions on some of them, and learn both tables from the rewards.

    Actions are logged with their rewards (equations 2 and 3). With a file as `log`, an interrupted compilation can
    continue, and ends with the same tables. Several processes may run the same compilation with the same log: they
    divide the work, and all end with the same tables.

    Args:
        log: the file of the log; None to keep it in memory.

    Raises:
        KeepsetError: the log cannot be used, or the model has no layer to compile for.

    Choices where the paper is silent, or cannot be followed at this size:

    - One reward covers all heads or layers. The paper changes one head and fixes the others: 270 heads would need 270
      times the rewards. In this compilation all heads (or layers) act at random at once, the context's mean is
      subtracted, and Q is a sum over them (see `learn`). So every reward teaches each of them its marginal
      contribution, averaged over the others' actions instead of at one point.
    - The reward may also be the expectation of equation 3 over the full cache's own predictions, which has less
      variance; see `Verdict`.
    - The head table is learned at exact budgets, without thresholds; the gate with `elastic=True` and all weights 1.
    - The penalty (equation 14) has the sign of the paper: entries that layers admit beyond their budget cost, entries
      that they save pay. It is the mean over the layers of a joint action, beta / T for each entry.
    - States share parts of Q. Q of a head is one part for all budgets plus one for its own; Q of a gate is one part for
      the layer, one for layer and budget, and one for the state. So bins without a context have the layer's threshold.
      With `CompileSettings.gate="sum"` the last part is one for each of both bins, so that a risk means the same in all
      layers.
    """
    described = {**settings.to_json(), "corpus": pool.sha256, "pool": len(pool.contexts)}
    # Reward and gate can be chosen after the trials are made.
    logged = {name: value for name, value in described.items() if name not in ("reward", "gate")}
    with closing(Log(log, {**logged, "model": fingerprint(model), "keepset": keepset.__version__})) as rewards_log:
        layers, heads, deciding = _shape(model, pool, settings)
        risks = _measure_risks(model, pool, settings, rewards_log, stage)
        tables = with_edges(neutral(layers, heads, 1.0, settings.budgets), risks)
        at = risk_bins(tables, risks)
        used = stratified(at.tolist(), settings.contexts)
        contexts = [pool.contexts[index] for index in used]
        _try_actions(model, contexts, settings, rewards_log, tables, deciding, stage)
        names = {context.name for context in contexts}
        rows = [row for row in rewards_log.trials if row.context in names]
    where = {context.name: int(at[index]) for context, index in zip(contexts, used, strict=True)}
    weights, head_curve = _head_table(rows, settings, layers, deciding)
    gate, gate_curve = _gate_table(rows, settings, layers, where)
    counts = torch.bincount(at[used], minlength=ENTROPY_BINS * PERPLEXITY_BINS).view(ENTROPY_BINS, PERPLEXITY_BINS)
    return dataclasses.replace(
        tables,
        weights=weights.repeat_interleave(heads // deciding, 2),
        gate=gate,
        counts=counts,
        provenance={
            **_origin(model),
            **described,
            "contexts": len(contexts),
            "rows": {kind: sum(row.kind == kind for row in rows) for kind in ("head", "gate")},
            "curves": {"head": head_curve, "gate": gate_curve},
            "marks": [list(context.marks) for context in contexts],
        },
    )


def _origin(model: PreTrainedModel) -> dict[str, Any]:
    """Return the provenance of tables: the program and the model."""
    name = PureWindowsPath(model.config.name_or_path or "").name
    return {
        "keepset": keepset.__version__,
        "model": {"name": name, **fingerprint(model), "sample": sample(model)},
        "thresholds": list(THRESHOLDS),
        "alpha": ALPHA,
        "beta": BETA,
    }


def _shape(model: PreTrainedModel, pool: ContextPool, settings: CompileSettings) -> tuple[int, int, int]:
    """Return the numbers of compressed layers, of query heads, and of heads in a layer with their own weight.

    With the global mean, the utility of an entry is the same for all query heads that share its KV head, so they share
    a weight. Otherwise each query head has its own.

    Args:
        model: the model.
        pool: contexts, of which one token is run.
        settings: the settings, with the method.
    """
    session = PromptSession(model, pool.contexts[0].ids[None, :1].to(model.device), [Recipe.of(settings.method)])
    observations = session.prefill().observations
    if not observations:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer that keepset compresses: there is nothing to compile."
        )
    first = observations[0]
    assert first.queries is not None
    heads = first.queries.shape[1]
    return len(observations), heads, first.keys.shape[1] if settings.method.global_mean else heads


def _measure_risks(
    model: PreTrainedModel, pool: ContextPool, settings: CompileSettings, log: Log, stage: Stage
) -> Float[Tensor, "contexts 2"]:
    done = stage("looking at contexts", len(pool.contexts))
    for context in _shuffled(pool.contexts):
        if not log.has_risk(context.name):
            log.add_risk(context.name, Judge(model, settings.method, context).risk)
        done()
    risks = log.risks
    return torch.tensor([risks[context.name] for context in pool.contexts], dtype=torch.float64).float()


def _try_actions(
    model: PreTrainedModel,
    contexts: Sequence[Passage],
    settings: CompileSettings,
    log: Log,
    tables: Tables,
    deciding: int,
    stage: Stage,
) -> None:
    layers, heads = tables.weights.shape[1:]
    kinds = {
        "head": (HEAD_ROWS, layers * deciding, torch.tensor(settings.weights, dtype=torch.float32)),
        "gate": (GATE_ROWS, layers, torch.tensor(THRESHOLDS, dtype=torch.float32)),
    }
    trials = [(kind, keep, n) for keep in settings.budgets for kind, (count, *_) in kinds.items() for n in range(count)]
    done = stage("trying actions", len(contexts) * len(trials))
    for context in _shuffled(contexts):
        judge = None
        for kind, keep, number in _shuffled(trials):
            if not log.has(context.name, kind, keep, number):
                judge = judge or Judge(model, settings.method, context)
                count, decisions, values = kinds[kind]
                actions = draw(count, decisions, len(values), f"{settings.seed} {context.name} {kind} {keep}")[number]
                acting = neutral(layers, heads, 1.0, [keep])
                if kind == "head":
                    weights = values[actions].view(1, layers, deciding).repeat_interleave(heads // deciding, 2)
                    acting = dataclasses.replace(acting, weights=weights)
                else:
                    gate = values[actions].view(1, layers, 1, 1).expand_as(acting.gate)
                    acting = dataclasses.replace(acting, gate=gate)
                verdict = judge.verdict(acting, keep, elastic=kind == "gate")
                played = bytes(actions.tolist())
                log.add(Trial(context.name, kind, keep, number, played, 1 / len(values), **asdict(verdict)))
            done()


def _shuffled(work: Sequence[Work]) -> list[Work]:
    """Return work in a random order, so that processes that share a log rarely do the same work at once."""
    return random.SystemRandom().sample(work, len(work))


def _head_table(
    rows: Sequence[Trial], settings: CompileSettings, layers: int, deciding: int
) -> tuple[Float[Tensor, "budgets layers deciding"], list[dict[str, float]]]:
    """Learn the weight of highest value (equation 9) for each state (l, h, B).

    Args:
        rows: all trials.
        settings: the settings.
        layers: layers of the table.
        deciding: heads of a layer with their own weight.
    """
    actions, rewards, budgets = _arrays(rows, "head", settings)
    decisions = layers * deciding
    every = torch.arange(len(settings.budgets))[:, None] * decisions + torch.arange(decisions)
    states = every[budgets]
    of_all, of_budget = torch.arange(decisions).repeat(len(settings.budgets)), every.flatten() + decisions
    q, curve = learn(
        Logged(states, actions, rewards),
        torch.stack([of_all, of_budget], 1),
        len(settings.weights),
        alpha=ALPHA,
        decay=decisions / len(rewards),
    )
    weights = torch.tensor(settings.weights, dtype=torch.float32)
    return weights[best(q)].view(len(settings.budgets), layers, deciding), curve


def _gate_table(
    rows: Sequence[Trial], settings: CompileSettings, layers: int, where: dict[str, int]
) -> tuple[Float[Tensor, "budgets layers 20 4"], list[dict[str, float]]]:
    """Learn the threshold of highest value for each state (l, b_ent, b_ppl, B).

    Args:
        rows: all trials.
        settings: the settings.
        layers: layers of the table.
        where: the bin of each context, by its name.
    """
    actions, rewards, budgets = _arrays(rows, "gate", settings)
    cell = torch.tensor([where[row.context] for row in rows if row.kind == "gate"], dtype=torch.long)
    shape = len(settings.budgets), layers, ENTROPY_BINS * PERPLEXITY_BINS
    grid = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    states = grid[budgets, :, cell]
    budget, layer, bins = (part.flatten() for part in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    signal_bins = [bins // PERPLEXITY_BINS, bins % PERPLEXITY_BINS]
    kinds = [layer, budget * layers + layer, *([grid.flatten()] if settings.gate == "table" else signal_bins)]
    sizes = torch.tensor([0, layers, shape[0] * layers, ENTROPY_BINS], dtype=torch.long).cumsum(0).tolist()
    features = torch.stack([kind + size for kind, size in zip(kinds, sizes, strict=False)], 1)
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float32)
    logged = Logged(states, actions, rewards)
    q, curve = learn(logged, features, len(THRESHOLDS), alpha=ALPHA, decay=layers / len(rewards))
    return thresholds[best(q)].view(shape[0], layers, ENTROPY_BINS, PERPLEXITY_BINS), curve


def _arrays(
    rows: Sequence[Trial], kind: str, settings: CompileSettings
) -> tuple[Int[Tensor, "rows decisions"], Float[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Return the actions, rewards (equation 2) and budgets of one table's trials.

    The mean over context and budget is subtracted from rewards, because it depends on no action. The rewards of a
    budget are then divided by their standard deviation.

    Args:
        rows: all trials.
        kind: `head` or `gate`, the table.
        settings: the settings, with the budgets.
    """
    chosen = [row for row in rows if row.kind == kind]
    actions = torch.tensor([list(row.actions) for row in chosen], dtype=torch.long)
    budgets = torch.tensor([settings.budgets.index(row.keep) for row in chosen], dtype=torch.long)
    rewards = torch.tensor([getattr(row, settings.reward) for row in chosen], dtype=torch.float64)
    if kind == "gate":
        over = torch.tensor([row.admitted - row.keep for row in chosen], dtype=torch.float64)
        rewards -= BETA / settings.tokens * over
    groups: dict[tuple[str, int], list[int]] = {}
    for index, row in enumerate(chosen):
        groups.setdefault((row.context, row.keep), []).append(index)
    for group in groups.values():
        rewards[group] -= rewards[group].mean()
    spread = torch.stack([rewards[budgets == b].square().mean().sqrt() for b in range(len(settings.budgets))])
    spread = spread.where(spread > 0, 1.0)
    return actions, (rewards / spread[budgets]).float(), budgets


def with_edges(tables: Tables, risks: Float[Tensor, "contexts 2"]) -> Tables:
    """Return tables with bins for the entropy and perplexity of contexts.

    Bins of entropy have equal width in nats; bins of perplexity have equal width of its logarithm. The paper gives the
    number of bins but not their edges.

    Args:
        tables: tables without bins.
        risks: entropy and perplexity of each context.
    """
    entropy = _edges(risks[:, 0], ENTROPY_BINS)
    perplexity = _edges(risks[:, 1].log(), PERPLEXITY_BINS).exp()
    return dataclasses.replace(tables, entropy_edges=entropy.float(), perplexity_edges=perplexity.float())


def risk_bins(tables: Tables, risks: Float[Tensor, "contexts 2"]) -> Int[Tensor, " contexts"]:
    """Return each context's bin: PERPLEXITY_BINS times the bin of its entropy, plus the bin of its perplexity.

    Args:
        tables: tables with bins.
        risks: entropy and perplexity of each context.
    """
    of_entropy, of_perplexity = tables.bins(risks[:, 0], risks[:, 1])
    return of_entropy * PERPLEXITY_BINS + of_perplexity


def stratified(bins: Sequence[int], count: int) -> list[int]:
    """Return the rising indices of some contexts: one of every bin, then a second of each, and so on.

    Args:
        bins: the bin of each context.
        count: how many contexts to take.
    """
    rounds: dict[int, int] = {}
    turns = []
    for index, bin_ in enumerate(bins):
        rounds[bin_] = rounds.get(bin_, 0) + 1
        turns.append((rounds[bin_], index))
    return sorted(index for _, index in sorted(turns)[:count])


def _edges(risk: Float[Tensor, " contexts"], bins: int) -> Float[Tensor, " _"]:
    finite = risk[risk.isfinite()].double()
    low, high = (
        finite.quantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist() if len(finite) else (0, 0)
    )
    if high - low < 1e-3:  # all alike
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins - 1, dtype=torch.float64)
