"""Libraries that only `keepset[serve]` installs."""

import importlib
from typing import Any

from keepset.errors import KeepsetError


def import_http() -> Any:
    """Return the HTTP library; raise `KeepsetError` if it is not installed."""
    return _import("httpx2", "HTTP client")


def import_parser() -> Any:
    """Return the parser of Prometheus' text format; raise `KeepsetError` if it is not installed."""
    return _import("prometheus_client.parser", "reader of metrics").text_string_to_metric_families


def check_bench() -> None:
    """Raise `KeepsetError` if a library that `vllm bench serve` reads prompts with is not installed."""
    _import("pandas", "reader of prompts")


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KeepsetError(f'The {name} is not installed: run `pip install "keepset[serve]"`.') from error
