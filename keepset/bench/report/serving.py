"""The page of `keepset bench serve`."""

from collections.abc import Iterator, Sequence
from typing import Any

from keepset.bench.report import plot
from keepset.bench.report.page import page
from keepset.bench.report.table import Column, Line, Table, integer
from keepset.serving.figures import ratio, rounded, table_rows

_ERRORS = 5
"""The most errors of a server that are shown."""


def table(servers: Sequence[dict[str, Any]]) -> Table:
    """Return the figures of all servers and, for two servers, their ratios."""
    titles = [server["name"] for server in servers] + (["ratio"] if len(servers) > 1 else [])
    columns = [Column(title, lambda _: None) for title in titles]
    return Table("", columns, [Line(name, [(text, text) for text in texts]) for name, *texts in table_rows(servers)])


def failures(servers: Sequence[dict[str, Any]]) -> list[str]:
    """Return why requests failed, server by server."""
    return [f"{server['name']}: {error}" for server in servers for error in server["summary"]["errors"][:_ERRORS]]


def render(result: dict[str, Any]) -> str:
    """Return the page of the result of `keepset bench serve --json`."""
    servers, load = result["servers"], result["load"]
    names = [server["name"] for server in servers]
    legend = [(name, _series(at, servers), "circle") for at, name in enumerate(names)]
    shares = plot.axis("share of requests", tickformat=".0%", range=[0, 1.02])
    blocks = plot.axis("share of blocks", rangemode="tozero", tickformat=".0%")
    running = plot.axis("requests", rangemode="tozero")
    over_time = [
        _chart("running", list(_over_time(servers, "running", ".0f")), running, "Requests that run at once"),
        _chart("usage", list(_over_time(servers, "kv_usage", ".0%")), blocks, "Share of the KV cache's blocks in use"),
    ]
    latencies = [
        _chart(name, list(_shares(servers, key)), shares, title)
        for name, key, title in (
            ("first", "first_token_seconds", "Time to the first token"),
            ("token", "seconds_per_token", "Time per token after the first"),
            ("request", "seconds", "Time of the whole request"),
        )
    ]
    several = "; each server by its own clock, from its first request on." if len(servers) > 1 else "."
    reading = f"Read from the server's metrics every half second{several}"
    less = "Share of the answered requests that took at most so long. Further left is better."
    return page(
        "keepset bench serve",
        result["model"],
        [
            plot.plots("While the load ran", over_time, legend if len(servers) > 1 else (), reading),
            plot.plots("Latencies", latencies, legend if len(servers) > 1 else (), less),
            table(servers).section("Figures"),
            {"kind": "errors", "items": failures(servers)},
        ],
        conclusion=conclusion(result),
        lead=_lead(load),
        facts=[
            ("Recipe", result["recipe"]),
            ("Options for vLLM", " ".join(result["options"]) or None),
            ("Seed", str(load["seed"])),
            ("keepset", result["keepset"]),
        ],
    )


def _chart(name: str, lines: list[dict[str, Any]], y: dict[str, Any], title: str) -> dict[str, Any]:
    """Return a chart over seconds, a little wider than its lines, so that a vertical end is visible."""
    last = max((x for line in lines for x in line["x"]), default=1.0)
    return plot.plot(name, lines, plot.axis("seconds", range=[0, 1.04 * last]), y, title=title)


def _lead(load: dict[str, Any]) -> str:
    count, prompt = integer(load["requests"]), integer(load["prompt_tokens"])
    asked = f"{count} requests of {prompt} tokens, each answered with "
    if question := load.get("question_tokens"):
        asked = (
            f"{count} documents of {prompt} tokens, each asked a question of {integer(question)} in every round, "
            "answered with "
        )
    rounds = f", in {load['rounds']} rounds." if load["rounds"] > 1 else "."
    return f"{asked}{integer(load['output_tokens'])} more, at most {integer(load['concurrency'])} at once{rounds}"


def _series(at: int, servers: Sequence[Any]) -> int:
    """Return a server's colour; the first of two, which is plain, is grey."""
    return 7 if len(servers) > 1 and at == 0 else 0


def _over_time(servers: Sequence[dict[str, Any]], key: str, form: str) -> Iterator[dict[str, Any]]:
    """Yield a line of samples for each server."""
    for at, server in enumerate(servers):
        known = [sample for sample in server["samples"] if sample[key] is not None and sample["time"] > 0]
        points = [plot.Point(sample["time"], sample[key]) for sample in known]
        template = f"%{{x:.1f}} s: %{{y:{form}}}"
        yield plot.line(server["name"], points, _series(at, servers), mode="lines", template=template)


def _shares(servers: Sequence[dict[str, Any]], key: str) -> Iterator[dict[str, Any]]:
    """Yield for each server a line: the share of its answered requests that took at most a time."""
    for at, server in enumerate(servers):
        answered = [request for request in server["requests"] if request["error"] is None]
        values = sorted(request[key] for request in answered if request[key] is not None)
        steps = [(values[0], 0.0)] if values else []
        steps += [(value, (place + 1) / len(values)) for place, value in enumerate(values)]
        points = [plot.Point(*step) for step in steps]
        template = "%{y:.0%} took at most %{x:.3f} s"
        yield plot.line(server["name"], points, _series(at, servers), mode="lines", shape="hv", template=template)


def conclusion(result: dict[str, Any]) -> str:
    """Return what a load has shown, in a sentence."""
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
        f"and the first token takes {rounded(sooner)} times as long (less is better). "
        "Each server ran once, so there is no interval."
    )
