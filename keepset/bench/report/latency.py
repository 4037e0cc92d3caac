"""The HTML report of `keepset bench latency`."""

from typing import Any

from keepset.bench.report.page import assemble


def render(result: dict[str, Any]) -> str:
    """The report as one self-contained HTML page of what `keepset bench latency --json` writes."""
    return assemble("latency", "keepset bench latency", result, _conclusion(result["rows"]))


def _conclusion(rows: list[dict[str, Any]]) -> str:
    """The fastest recipe after the longest prompt, beside the full cache, which comes first."""
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    there = [row for row in rows if row["prompt_tokens"] == longest and row["tokens_per_second"] is not None]
    if len(there) < 2 or there[0]["recipe"] != rows[0]["recipe"]:
        return ""
    full, *others = there
    best = max(others, key=lambda row: row["tokens_per_second"])
    speed, nbytes, first = (best[name] / full[name] for name in ("tokens_per_second", "kv_bytes", "first_seconds"))
    return (
        f"After {longest:,} tokens {best['recipe']} makes {speed:.2f} times the full cache's tokens a second (more is "
        f"better) and holds {nbytes:.0%} of its bytes; the first token takes {first:.2f} times as long (less is "
        "better)."
    )
