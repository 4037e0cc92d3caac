"""The HTML report of `keepset bench serve`."""

from collections.abc import Sequence
from typing import Any

from keepset.bench.report.page import assemble
from keepset.serving.summary import ratio, rounded


def render(result: dict[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """The report as one self-contained HTML page of what `keepset bench serve --json` writes.

    Rows are its figures as text: a name, then one cell per server and, of two servers, their ratio.
    """
    servers = [
        {
            "name": server["name"],
            "errors": server["summary"]["errors"],
            "rounds": [
                {
                    "seconds": each["seconds"],
                    "samples": each["samples"],
                    # The page draws no single chunks, and there may be millions.
                    "requests": [{**request, "chunks": len(request["chunks"])} for request in each["requests"]],
                }
                for each in server["rounds"]
            ],
        }
        for server in result["servers"]
    ]
    head = {name: result[name] for name in ("model", "recipe", "load", "options", "keepset")}
    data = {**head, "servers": servers, "rows": [list(row) for row in rows]}
    return assemble("serving", "keepset bench serve", data, conclusion(result))


def conclusion(result: dict[str, Any]) -> str:
    """What a load has shown, in a sentence."""
    *before, last = (server["summary"] for server in result["servers"])
    rate, first = last["output_tokens_per_second"], last["first_token_seconds"]["p50"]
    answered = f"{last['requests'] - last['failed']} of {last['requests']} requests were answered"
    if rate is None:
        return f"{answered}: nothing can be said of speeds."
    if not before:
        return f"{answered}, {rate:.1f} output tokens a second."
    faster = ratio(rate, before[0]["output_tokens_per_second"])
    sooner = ratio(first, before[0]["first_token_seconds"]["p50"])
    if faster is None or sooner is None:
        return f"{answered} with the recipe, {rate:.1f} output tokens a second; plain vLLM answered none."
    return (
        f"With the recipe vLLM makes {rounded(faster)} times plain vLLM's output tokens a second (more is better) "
        f"and the first token takes {rounded(sooner)} times as long (less is better)."
    )
