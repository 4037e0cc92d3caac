"""Data sets of the Hugging Face hub, whose absence is told in one sentence and at once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from keepset.bench.tasks.data import DataRecord, extra
from keepset.errors import KeepsetError
from keepset.hub import offline_if_unreachable


def download(name: str, path: str, subset: str | None, split: str) -> list[DataRecord]:
    """The items of a data set, for the task of this name."""
    with loading(name):
        items = extra("datasets").load_dataset(path, subset, split=split)
        return [DataRecord(f"{path}, item {index},", item) for index, item in enumerate(items)]


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Whatever goes wrong while the data of a task are loaded is one sentence.

    Where the hub does not answer, what was downloaded before is used, and nothing waits for it.
    """
    datasets = extra("datasets")
    before = datasets.config.HF_HUB_OFFLINE
    try:
        with offline_if_unreachable() as asked:
            datasets.config.HF_HUB_OFFLINE = before or not asked
            yield
    except KeepsetError:
        raise
    except ImportError as error:
        raise KeepsetError(f"{name} needs a package that is missing ({_cause(error)}): install it.") from error
    except Exception as error:
        raise KeepsetError(
            f"{name} cannot be loaded ({_cause(error)}): check the connection to the hub, or give a folder "
            f"with {name}.jsonl as data."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _cause(error: Exception) -> str:
    return re.split(r"\. |\n", str(error).strip())[0].rstrip(".") or type(error).__name__
