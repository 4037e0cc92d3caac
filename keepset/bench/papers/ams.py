"""AMS: Adaptive Mass-Segmented KV Compression for Long-Form Reasoning (Yang and Shen 2026)."""

from collections.abc import Mapping

from keepset.bench.papers.entry import SCORE, SECONDS, Entry, Sweep
from keepset.recipe import Schedule

QWEN = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
QWEN_32B = "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
OPEN_THINKER = "open-thoughts/OpenThinker3-7B"

_EVERY = 512
_DECODING = Schedule(prefill=False, every=_EVERY)
"""Appendix B.2: a compression event after every 512 generated tokens, none at the prompt's end."""
_ALWAYS = (4, 32)
"""Appendix B.2: all methods keep a few first tokens, 4 in Table 15, and the newest, whose number the paper leaves open:
32 is that of its authors' program."""
_TOKENS = {"math500": 4096, "aime24": 32768, "aime25": 32768, "gsm8k": 1024}
"""The paper does not say how long answers may be: these are the defaults of its authors' program, which is greedy."""
_EXPECTED = "expected_attention(epsilon=0.01)"
_TENTH = 0.1
_MEMORY = "peak_bytes"
_DYNAMICS = "ams-dynamics"

_STREAMING = {"StreamingLLM": "streaming_llm"}
_TOVA = {"TOVA": "tova"}
_KEYDIFF = {"KeyDiff": "keydiff"}
_CHUNKS = {"ChunkKV-Expected": f"chunkkv({_EXPECTED}, chunk=20)"}
_PYRAMID = {"PyramidKV": "pyramid(snapkv)"}
_ADAKV = {"AdaKV-ExpE2": f"adakv({_EXPECTED})"}
# The prompt's "prefix" that these two protect (Table 11) is its first four tokens, as in the authors' program: whole
# prompts would not leave all methods the same budget (B.2).
_R_KV = {"R-KV": "r_kv"}
_RPC = {"RPC": "rpc"}
_AMS_TOVA = {"AMS-TOVA": "ams(tova)"}
_AMS_EXPECTED = {"AMS-Expected": f"ams({_EXPECTED})"}
_TRIATTENTION = "triattention(stats={stats})"

_WINDOWS = (16, 32, 64)
_INTERVALS = {
    f"interval {every}, HS buffer {buffer}": (
        f"ams(expected_attention(epsilon=0.01, buffer={buffer}), prefill=False, every={every})"
    )
    for every in (128, 256, 512, 1024)
    for buffer in (0, 64, 256)
}
_SEGMENTS = (
    *((16, 0.005, 32, 1024, 32, 16, 4), (16, 0.005, 64, 1024, 8, 32, 8), (16, 0.005, 128, 512, 0, 16, 0)),
    *((16, 0.01, 16, 4096, 16, 128, 8), (16, 0.01, 32, 1024, 32, 128, 4), (16, 0.01, 64, 2048, 16, 16, 0)),
    *((16, 0.01, 128, 1024, 1, 32, 4), (16, 0.02, 16, 512, 32, 16, 4), (16, 0.02, 32, 1024, 8, 64, 8)),
    *((16, 0.02, 64, 2048, 16, 32, 0), (32, 0.005, 16, 1024, 32, 16, 4), (32, 0.005, 32, 4096, 8, 128, 8)),
    *((32, 0.005, 64, 1024, 0, 16, 0), (32, 0.01, 16, 2048, 16, 32, 8), (32, 0.01, 32, 1024, 32, 64, 4)),
    *((32, 0.01, 64, 4096, 16, 16, 0), (32, 0.01, 128, 512, 1, 128, 4), (32, 0.02, 16, 1024, 32, 16, 4)),
    *((32, 0.02, 32, 512, 8, 64, 8), (32, 0.02, 64, 2048, 16, 32, 0), (64, 0.005, 16, 1024, 32, 16, 4)),
    *((64, 0.005, 32, 4096, 16, 64, 0), (64, 0.01, 16, 2048, 8, 32, 8), (64, 0.01, 32, 1024, 16, 128, 4)),
    *((64, 0.02, 16, 512, 32, 16, 0),),
)
"""Table 19, row by row: W, segment mass, shortest and longest segment, least quota, newest and first tokens kept."""


def _segmented(window: int, mass: float, low: int, high: int, quota: int, recent: int, sinks: int) -> tuple[str, str]:
    name = f"W {window}, mass {mass:g}, length {low} to {high}, quota {quota}, last {recent}, sinks {sinks}"
    recipe = (
        f"ams({_EXPECTED}, window={window}, segment_mass={mass}, min_segment={low}, max_segment={high}, "
        f"min_quota={quota}, sinks={sinks}, recent={recent}, prefill=False, every={_EVERY})"
    )
    return name, recipe


def _sweep(
    tasks: tuple[str, ...],
    methods: Mapping[str, str],
    keeps: tuple[int, ...],
    metrics: tuple[str, ...] = (SCORE,),
    *,
    full: bool = False,
    sample: float | None = None,
    by: tuple[str, ...] = (),
    file: str = "",
) -> Sweep:
    """Compression while decoding, as in all tables but the sixth."""
    return Sweep(
        tasks,
        methods,
        keeps,
        _DECODING,
        _ALWAYS,
        full="Full KV" if full else "",
        metrics=metrics,
        answer_tokens=_TOKENS,
        sample=sample,
        by=by,
        alone=SECONDS in metrics or file == _DYNAMICS,
        file=file,
    )


def _prompts(task: str, average: str = "") -> Sweep:
    """Compression of prompts, too, as in the sixth table."""
    methods = _STREAMING | _TOVA | _PYRAMID | _ADAKV | _AMS_TOVA | _AMS_EXPECTED
    return Sweep((task,), methods, (512,), Schedule(every=_EVERY), _ALWAYS, average=average, name=task)


def _dynamics(metrics: tuple[str, ...], by: tuple[str, ...] = ()) -> Sweep:
    """What TOVA and AMS-TOVA do on MATH500, which several tables and figures show; they share the cells."""
    return _sweep(("math500",), _TOVA | _AMS_TOVA, (512,), metrics, by=by, file=_DYNAMICS)


_STABILITY = ("iou", "iou_early", "iou_middle", "iou_late")
_OF_SEGMENTS = tuple(
    f"{name}{stage}" for name in ("segments", "segment_length") for stage in ("", "_early", "_middle", "_late")
)
_OF_INTERVALS = _sweep(
    ("math500",), _INTERVALS, (512, 1024, 2048), (SCORE, SECONDS, _MEMORY), sample=_TENTH, file="ams-intervals"
)
"""That of two tables, which share the cells."""
_BUDGET_OF_DYNAMICS = "The paper does not say the budget: 512 is that of its examples (appendix G)."

ENTRIES = (
    Entry(
        "ams-table-1",
        "AMS, Table 1",
        "Methods on MATH500 and AIME",
        (QWEN,),
        (
            _sweep(
                ("math500", "aime24", "aime25"),
                _STREAMING | _TOVA | _AMS_TOVA | _KEYDIFF | _CHUNKS | _PYRAMID | _ADAKV | _AMS_EXPECTED | _R_KV | _RPC,
                (256, 512, 1024),
                full=True,
            ),
        ),
    ),
    Entry(
        "ams-table-2",
        "AMS, Table 2",
        "GSM8K under small budgets",
        (QWEN,),
        (_sweep(("gsm8k",), _STREAMING | _TOVA | _ADAKV | _AMS_EXPECTED, (64, 128)),),
    ),
    Entry(
        "ams-table-3",
        "AMS, Table 3",
        "Another model on MATH500",
        (OPEN_THINKER,),
        (_sweep(("math500",), _STREAMING | _TOVA | _AMS_TOVA | _AMS_EXPECTED, (128, 512), full=True),),
    ),
    Entry(
        "ams-table-4",
        "AMS, Table 4",
        "A larger model on MATH500",
        (QWEN_32B,),
        (
            _sweep(
                ("math500",),
                _STREAMING | _TOVA | _ADAKV | _R_KV | _RPC | _AMS_TOVA | _AMS_EXPECTED,
                (256, 512, 1024),
                full=True,
            ),
        ),
    ),
    Entry(
        "ams-table-5",
        "AMS, Table 5",
        "AMS with other scorers on MATH500",
        (QWEN,),
        (
            _sweep(
                ("math500",),
                {"TriAttention": _TRIATTENTION, "AMS-TriAtt.": f"ams({_TRIATTENTION})"}
                | _KEYDIFF
                | {"AMS-KeyDiff": "ams(keydiff)"}
                | _R_KV
                | {"AMS-R-KV": "ams(r_kv)"},
                (256, 512, 1024),
            ),
        ),
        note="TriAttention needs statistics of the model: give them with --stats.",
    ),
    Entry(
        "ams-table-6",
        "AMS, Table 6",
        "Code, question answering, LongBench and a needle",
        (QWEN,),
        (
            _prompts("longbench", average="longbench"),
            _prompts("needle"),
        ),
        note=(
            "The paper says neither model nor budget nor the needle's length: these are its main model, 512 and 4096. "
            "Answers are shorter than its interval, so that nothing would ever be dropped: here the prompt is "
            "compressed, too."
        ),
    ),
    Entry(
        "ams-table-7",
        "AMS, Table 7",
        "What each part of AMS is worth",
        (QWEN,),
        (
            _sweep(
                ("math500",),
                {
                    "AMS (full)": "ams(tova)",
                    "w/o mass-weighted quotas": "ams(tova, weighted=False)",
                    "w/o EMA credit": "ams(tova, credit=False)",
                    "fixed-length segments": "ams(tova, adaptive=False)",
                    "global head-only top-k": "ams(tova, segmented=False)",
                },
                (512, 1024),
            ),
        ),
    ),
    Entry(
        "ams-table-8",
        "AMS, Table 8",
        "Time and memory on MATH500",
        (QWEN,),
        (
            _sweep(
                ("math500",),
                _STREAMING | _TOVA | _PYRAMID | _ADAKV | _AMS_EXPECTED,
                (128, 512, 1024),
                (SECONDS, _MEMORY),
            ),
        ),
        note="Here AdaKV frees what it drops, which the paper's masks. Memory is a GPU's.",
    ),
    Entry(
        "ams-table-9",
        "AMS, Table 9",
        "How long answers get, and how repetitive",
        (QWEN,),
        (_dynamics(("tokens", "repetition", SECONDS)),),
        note=_BUDGET_OF_DYNAMICS,
    ),
    Entry(
        "ams-figure-4",
        "AMS, Figure 4",
        "The middle of the text, and repetition by difficulty",
        (QWEN,),
        (_dynamics(("wipeout", "middle", "repetition"), by=("level",)),),
        note=f"{_BUDGET_OF_DYNAMICS} Regions are of 16 tokens, the middle is a third.",
    ),
    Entry(
        "ams-figure-5",
        "AMS, Figure 5",
        "How much stays from event to event, by depth and subject",
        (QWEN,),
        (_dynamics(_STABILITY, by=("subject",)),),
        note=_BUDGET_OF_DYNAMICS,
    ),
    Entry(
        "ams-table-14",
        "AMS, Table 14",
        "How much stays from event to event, and segments",
        (QWEN,),
        (_dynamics(_STABILITY + _OF_SEGMENTS, by=("subject",)),),
        note=_BUDGET_OF_DYNAMICS,
    ),
    Entry(
        "ams-table-16",
        "AMS, Table 16",
        "Windows of the mass",
        (QWEN,),
        (
            _sweep(
                ("math500",),
                {f"W {window}": f"ams({_EXPECTED}, window={window})" for window in _WINDOWS},
                (512,),
                sample=_TENTH,
            ),
        ),
    ),
    Entry(
        "ams-table-17",
        "AMS, Table 17",
        "Intervals and hidden-state buffers, in sums",
        (QWEN,),
        (_OF_INTERVALS,),
        note=(
            "The paper's columns do not go with their heads. By Table 18, of nearly the same runs, the first counts "
            "right answers of 50, the second is the seconds of all 50, and the last memory; the third is left out."
        ),
    ),
    Entry(
        "ams-table-18",
        "AMS, Table 18",
        "Intervals and hidden-state buffers",
        (QWEN,),
        (_OF_INTERVALS,),
    ),
    Entry(
        "ams-table-19",
        "AMS, Table 19",
        "Windows and segments",
        (QWEN,),
        (
            _sweep(
                ("math500",),
                dict(_segmented(*row) for row in _SEGMENTS),
                (512,),
                (SCORE, SECONDS, _MEMORY),
                sample=_TENTH,
            ),
        ),
        note="The table does not say the budget: 512 is that of the sweep in the text above Table 16.",
    ),
)
