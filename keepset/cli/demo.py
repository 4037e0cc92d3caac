"""`keepset demo`: a comparison on the embedded model and an essay, without a network."""

from pathlib import Path
from typing import Annotated

from typer import Option

from keepset.cli.compare import compare


def demo(html: Annotated[Path, Option(help="Where the report goes.")] = Path("keepset-demo.html")) -> None:
    """Compare recipes on an essay with a fact in it; write a report."""
    compare(html=html)
