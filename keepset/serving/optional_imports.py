"""Libraries that only `keepset[serve]` brings along."""

import importlib
from typing import TYPE_CHECKING, Any, TypeAlias

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    import httpx2

AsyncClient: TypeAlias = "httpx2.AsyncClient"
Response: TypeAlias = "httpx2.Response"


def import_http() -> Any:
    """The HTTP library; a `KeepsetError` where it is not installed."""
    return _import("httpx2", "HTTP client")


def import_parser() -> Any:
    """What takes apart the text format of Prometheus; a `KeepsetError` where it is not installed."""
    return _import("prometheus_client.parser", "reader of metrics").text_string_to_metric_families


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KeepsetError(f'The {name} is not installed: run `pip install "keepset[serve]"`.') from error
