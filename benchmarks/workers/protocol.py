"""A worker's protocol: one request a line on standard input, one answer a line on standard output."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO


def take_output() -> TextIO:
    """Return standard output for answers alone: what libraries print must not mix with them."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def exchange(answers: TextIO, versions: Mapping[str, str], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Say which versions measure, then answer requests until standard input ends."""
    print(json.dumps({"versions": dict(versions)}), file=answers)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answered), file=answers)
