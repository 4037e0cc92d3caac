"""Keepset's own benchmarks. A module has `NAMES`, as users write them, and `make(name, settings)`, a list of tasks."""

from dataclasses import dataclass
from pathlib import Path

from keepset.errors import KeepsetError

MODULES = ("reasoning", "ruler", "needle", "longbench", "longbench2")


@dataclass(frozen=True)
class Settings:
    """What tasks are made from.

    Attributes:
        data: a folder with data as `<task>.jsonl`; None for what a task brings, makes or finds on the hub.
        lengths: in tokens, of tasks that are made to a length.
    """

    data: Path | None = None
    lengths: tuple[int, ...] = (4096,)

    def __post_init__(self) -> None:
        if self.data is not None and not self.data.is_dir():
            raise KeepsetError(f"There is no folder {str(self.data)!r} to take data from: give one that exists.")
        if not self.lengths or min(self.lengths) < 1:
            raise KeepsetError(f"lengths={self.lengths} are no lengths in tokens: give whole numbers such as 4096.")
