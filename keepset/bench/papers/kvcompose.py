"""KVCompose: Efficient Structured KV Cache Compression with Composite Tokens (2025, arXiv:2509.05165)."""

from collections.abc import Mapping
from itertools import product

from keepset.bench.papers.entry import AREA, SCORE, Entry, Sweep, removed_at
from keepset.bench.sweep.prompts import Mode

QWEN2, QWEN3, LLAMA = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-14B", "meta-llama/Llama-3.1-8B-Instruct"
_MODELS = (QWEN2, QWEN3, LLAMA)
_KEEPS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""One less the compression ratios of section 4.2; ratio 0 is the full cache."""
_ABLATION = 50
"""10 % of the 500 examples of a task (appendix A.1)."""
_STRUCTURED = {
    "KVCompose (ours)": "kvcompose",
    "TOVA": "tova",
    "DuoAttention": "duo_attention(stats={stats})",
    "SnapKV": "snapkv",
    "PyramidKV": "pyramid(snapkv)",
    "ExpectedAttention": "expected_attention(epsilon=0.0)",
    "StreamingLLM": "streaming_llm",
}
_UNSTRUCTURED = {
    "KVzip": "kvzip",
    "Unstructured KVCompose (ours)": "kvcompose(structured=False)",
    "AdaExpectedAttention": "adakv(expected_attention(epsilon=0.0))",
    "AdaSnapKV": "adakv(snapkv)",
}
_OPERATORS = {
    f"Agg({task},{group},{head})": f"kvcompose(aggregate_task='{task}', aggregate_group='{group}', "
    f"aggregate_head='{head}')".replace("avg", "mean")
    for task, group, head in product(("max", "avg"), repeat=3)
}
_BASELINES = (
    "The paper names no parameters of its baselines: these are the defaults of kvpress, whose pipeline it uses. "
    "DuoAttention needs the model's gates: `keepset calibrate --model MODEL --out stats.safetensors`, then --stats."
)
_RATIOS = "The paper shows curves alone, so there are no figures of its own beside these."


def _sweeps(
    methods: Mapping[str, str],
    *metrics: str,
    file: str,
    modes: tuple[Mode, ...] = ("agnostic", "task"),
    limit: int | None = None,
) -> tuple[Sweep, ...]:
    """RULER at 4096 tokens, task-agnostic, task-aware or both."""
    return tuple(
        Sweep(
            ("ruler",),
            methods,
            _KEEPS,
            metrics=metrics,
            limit=limit,
            mode=mode,
            average="ruler",
            suffix=f", {mode}",
            name=mode,
            file=file,
        )
        for mode in modes
    )


ENTRIES = (
    Entry(
        "kvcompose-table-2",
        "KVCompose, Table 2",
        "How much of the cache can go within a loss of 20 and 10 %",
        _MODELS,
        _sweeps(_STRUCTURED, removed_at(0.2), removed_at(0.1), file="kvcompose-ruler"),
        note=f"{_BASELINES} Between two ratios the loss is taken to be linear.",
    ),
    Entry(
        "kvcompose-table-3",
        "KVCompose, Table 3",
        "Area under the accuracy over all compression ratios",
        _MODELS,
        _sweeps(_STRUCTURED, AREA, file="kvcompose-ruler"),
        note=f"{_BASELINES} The paper does not say how areas are made: these are trapezoids, divided by the width.",
    ),
    Entry(
        "kvcompose-table-4",
        "KVCompose, Table 4",
        "Heads with budgets of their own: area under the accuracy",
        _MODELS,
        _sweeps(_UNSTRUCTURED, AREA, file="kvcompose-ruler-unstructured", modes=("agnostic",)),
        note=f"{_BASELINES} The paper does not say what it averages: areas are taken, task-agnostic.",
    ),
    Entry(
        "kvcompose-figure-2",
        "KVCompose, Figure 2",
        "How attention is aggregated over task, query group and heads",
        (LLAMA,),
        _sweeps(_OPERATORS, SCORE, file="kvcompose-figure-2", limit=_ABLATION),
        note=f"{_RATIOS} All combinations are run; the paper's figure has some, which it does not name.",
    ),
    Entry(
        "kvcompose-figure-3",
        "KVCompose, Figure 3",
        "With the mean of all heads' scores, and without",
        (QWEN2,),
        _sweeps(
            {"W/ mean": "kvcompose", "W/o mean": "kvcompose(mean_term=False)"},
            SCORE,
            file="kvcompose-figure-3",
            modes=("task",),
            limit=_ABLATION,
        ),
        note=_RATIOS,
    ),
    Entry(
        "kvcompose-figure-4",
        "KVCompose, Figure 4",
        "Scores times the norms of values",
        (QWEN2, LLAMA),
        _sweeps(
            {
                "attention": "kvcompose",
                "v-norm": "kvcompose(values='norm')",
                "vo-norm": "kvcompose(values='projected')",
            },
            SCORE,
            file="kvcompose-figure-4",
            modes=("agnostic",),
            limit=_ABLATION,
        ),
        note=_RATIOS,
    ),
    Entry(
        "kvcompose-figure-5",
        "KVCompose, Figure 5",
        "Accuracy over compression ratios: the mean of all tasks, and each task as in Figures 6 to 11",
        _MODELS,
        _sweeps(_STRUCTURED, SCORE, file="kvcompose-ruler"),
        note=f"{_RATIOS} {_BASELINES}",
    ),
)
