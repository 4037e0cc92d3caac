"""AMS: Adaptive Mass-Segmented KV Compression for Long-Form Reasoning (Yang and Shen 2026)."""

from keepset.bench.papers.entry import Entry, Sweep
from keepset.recipe import Schedule

QWEN = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
_TOKENS = {"math500": 4096, "aime24": 32768, "aime25": 32768, "gsm8k": 1024}
"""The paper does not say how long answers may be: these are the defaults of its authors' program."""
_EXPECTED = "expected_attention(epsilon=0.01)"

ENTRIES = (
    Entry(
        "ams-table-2",
        "AMS, Table 2",
        "GSM8K under small budgets",
        (QWEN,),
        (
            Sweep(
                ("gsm8k",),
                {
                    "StreamingLLM": "streaming_llm",
                    "TOVA": "tova",
                    "AdaKV-ExpE2": f"adakv({_EXPECTED})",
                    "AMS-Expected": f"ams({_EXPECTED})",
                },
                (64, 128),
                Schedule(prefill=False, every=512),
                always=(4, 32),
                full="",
                answer_tokens=_TOKENS,
            ),
        ),
    ),
)
