"""Data sets of the Hugging Face hub, whose absence is told in one sentence and at once."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session

from keepset.bench.tasks.data import DataRecord, extra
from keepset.errors import KeepsetError

_SECONDS = 5


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
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not _answers():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
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
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@functools.cache
def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of whichever HTTP library it uses
        return False
    return True


def _cause(error: Exception) -> str:
    return re.split(r"\. |\n", str(error).strip())[0].rstrip(".") or type(error).__name__
