"""The options that the drivers share."""

import argparse
from pathlib import Path


def parser(description: str, repeats: int) -> argparse.ArgumentParser:
    """Make a parser with the common options."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--tokens", type=_numbers, default=[1024, 4096], help="prompt lengths, with commas")
    made.add_argument("--repeats", type=int, default=repeats, help=f"rounds (default {repeats})")
    made.add_argument("--threads", type=int, default=1, help="torch threads of a worker (default 1)")
    made.add_argument("--model", type=Path, help="folder of a converted model (default: the embedded one)")
    made.add_argument("--no-peer", dest="peer", action="store_false", help="leave kvpress out")
    return made


def names(text: str) -> list[str]:
    """Read `a,b(c)` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]
