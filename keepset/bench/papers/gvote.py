"""GVote: Adaptive KV-cache compression without manually setting budget (Tang and others 2025, arXiv:2509.03136)."""

from keepset.bench.papers.entry import Entry, Sweep

_MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
)

ENTRIES = (
    Entry(
        "gvote-figure-6",
        "GVote, Figure 6",
        "How many queries are sampled",
        (_MODELS[0],),
        (
            Sweep(
                ("ruler_cwe",),
                {f"S={samples}": f"gvote(samples={samples})" for samples in (1, 2, 4, 8, 16, 32)},
                metrics=("score", "keep"),
            ),
        ),
        note="The text names neither the model nor the values of S: these are the paper's first model and powers of 2.",
    ),
)
