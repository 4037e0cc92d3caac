"""How far a long run is, and how long it will still take."""

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar() -> Progress:
    """Advance it by a request's tokens: long prompts take longer, so the time left stays true."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        speed_estimate_period=1800,
    )
