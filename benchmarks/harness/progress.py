"""Progress of a long run, and its remaining time."""

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar() -> Progress:
    """A progress bar that advances by a request's tokens, so that the remaining time accounts for long prompts."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        speed_estimate_period=1800,
    )
