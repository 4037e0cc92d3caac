"""The files in `deploy`: they are what their programs read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"


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
