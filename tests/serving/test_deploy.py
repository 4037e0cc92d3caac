"""The files in `deploy`: they are what their programs read, and every metric that they name exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepset.vllm.stats import COUNTERS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, DASHBOARD, UNIT = "prometheus-rules.yml", "grafana-dashboard.json", "keepset.service"


def named(name: str) -> set[str]:
    """The metrics that a file names."""
    return set(re.findall(r"\b(?:vllm|keepset):\w+", (DEPLOY / name).read_text("utf-8")))


def vllms_own() -> set[str]:
    """The metrics of the installed vLLM as Prometheus shows them, whatever their kind."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("needs vLLM")
    sources = (Path(package.origin).parent / "v1" / "metrics").glob("*.py")
    names = {name for file in sources for name in re.findall(r'"(vllm:\w+)"', file.read_text("utf-8"))}
    return {name + end for name in names for end in ("", "_total", "_bucket", "_sum", "_count")}


@pytest.mark.parametrize("name", [RULES, DASHBOARD])
def test_every_metric_that_is_named_exists(name: str) -> None:
    metrics = named(name)
    ours = {f"keepset:{counter}_total" for counter in COUNTERS} | {"keepset:recipe"}
    assert {metric for metric in metrics if metric.startswith("keepset:")} <= ours
    assert {metric for metric in metrics if metric.startswith("vllm:")} <= vllms_own()
    assert len(metrics) > 5


def test_alerts_say_what_to_do() -> None:
    (group,) = yaml.safe_load((DEPLOY / RULES).read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "warn") and rule["annotations"].keys() == {"summary", "action"}
        for opening, closing in ("()", "[]", "{}"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing)
        assert re.fullmatch(r"\d+[mh]", rule["for"]) and 'job="keepset"' in rule["expr"]


def test_the_dashboards_panels_lie_side_by_side() -> None:
    made = json.loads((DEPLOY / DASHBOARD).read_text("utf-8"))
    cells: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24
        cells |= own
        assert panel["title"] and all(target["expr"] and target["refId"] for target in panel["targets"])
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / UNIT).read_text("utf-8")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    for program in re.findall(r"^Exec\w+=(/\S+)", text, re.MULTILINE):
        text = text.replace(program, sys.executable)  # it must be there
    (tmp_path / UNIT).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / UNIT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_names_what_its_environment_has() -> None:
    text = (DEPLOY / UNIT).read_text("utf-8")
    lines = (DEPLOY / "serve.env").read_text("utf-8").splitlines()
    given = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    command = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert command and {*re.findall(r"\$\{?(\w+)", command[1])} - {"STATE_DIRECTORY"} == given - {"VLLM_API_KEY"}


def test_the_container_file_copies_what_there_is() -> None:
    """A parse by hand: instructions that there are, sources that exist, words in JSON where the form has brackets."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text("utf-8"), flags=re.MULTILINE)
    instructions = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    names = [name for name, _ in instructions]
    assert names[:2] == ["ARG", "FROM"] and names[-1] == "ENTRYPOINT"
    known = "ARG FROM COPY RUN USER WORKDIR VOLUME EXPOSE HEALTHCHECK STOPSIGNAL ENV ENTRYPOINT"
    assert set(names) <= set(known.split())
    for name, rest in instructions:
        if name == "COPY":
            assert all((DEPLOY.parent / source).exists() for source in rest.split()[:-1])
        if name in ("VOLUME", "ENTRYPOINT"):
            assert all(isinstance(word, str) for word in json.loads(rest))
    entry = json.loads(instructions[-1][1])
    given = ["M", "--recipe", "snapkv(keep=5, every=6)"]
    shown = subprocess.run(
        [*entry[:2], entry[2].replace("exec keepset", "exec echo"), *entry[3:], *given],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown == "serve M --recipe snapkv(keep=5, every=6) --host 0.0.0.0 --port 8000\n"
