"""Images for multimodal models: reading files, which are checked before they are decoded, and prompts with images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepset.errors import CorruptFileError, KeepsetError, UnsupportedModelError, installation
from keepset.lab.texts import SENTINEL, chat_frame, chat_parts
from keepset.models import load_processor

if TYPE_CHECKING:
    import transformers
    from PIL.Image import Image
    from torch import Tensor

MAX_BYTES = 20 * 2**20
"""The most bytes of an image's file."""
_MAX_PIXELS = 50 * 10**6
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ADVICE = f"give an image as a {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file"


def read_images(paths: Sequence[Path] | None) -> list["Image"]:
    """Return the images in files; none if there are no files.

    Raises:
        KeepsetError: a file cannot be read, is too large or is no image.
    """
    images = []
    for path in paths or []:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise KeepsetError(f"{str(path)!r} cannot be read ({error.strerror}): {_ADVICE}.") from error
        images.append(decode_image(content, repr(str(path))))
    return images


def decode_image(content: bytes, name: str) -> "Image":
    """Return the image in the bytes of a file, rotated as the file's orientation says.

    Its size is checked before it is decoded.

    Args:
        content: the bytes of the file.
        name: the file's name in errors.

    Raises:
        KeepsetError: it is too large or no image, or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise KeepsetError(f"Images need the package pillow: run {installation('images')}.") from error
    if len(content) > MAX_BYTES:
        raise KeepsetError(f"{name} has more than {MAX_BYTES // 2**20} MB: give a smaller image.")
    try:
        opened = Image.open(BytesIO(content), formats=_FORMATS)
        if opened.width * opened.height > _MAX_PIXELS:
            raise KeepsetError(
                f"{name} has {opened.width} x {opened.height} pixels: give an image of at most "
                f"{_MAX_PIXELS // 10**6} million."
            )
        return ImageOps.exif_transpose(opened).convert("RGB")
    except KeepsetError:
        raise
    except UnidentifiedImageError as error:
        raise CorruptFileError(f"{name} is no image that can be read: {_ADVICE}.") from error
    # Decoders raise various errors for damaged files, all of which derive from these.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, Image.DecompressionBombError) as error:
        raise CorruptFileError(f"{name} is a damaged image: {_ADVICE}.") from error


def image_chat_parts(processor: Any, images: int, text: str, question: str) -> tuple[str, str]:
    """Make a user's message of images, a text and a question, and cut it before the question, as `chat_parts` does.

    Args:
        processor: the model's processor.
        images: the number of images.
        text: the text after them.
        question: the question after the text.

    Raises:
        KeepsetError: the chat template cannot be cut, or the words hold the token that stands for an image.
    """
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str):
        raise UnsupportedModelError(
            f"{type(processor).__name__} names no token that stands for an image, so keepset cannot put one into a "
            "prompt: call the model in Python, with what its processor makes."
        )
    if token in text or token in question:
        raise KeepsetError(f"The text has {token!r}, which stands for an image: leave it out.")
    if not processor.chat_template:
        return chat_parts(processor.tokenizer, f"{token * images}\n{text}", question)
    content = [*[{"type": "image"}] * images, {"type": "text", "text": SENTINEL}]
    before, after = chat_frame(processor, content, "a user's words beside an image")
    return before + text, f"\n\n{question}{after}" if text else question + after


def message_inputs(
    model: "transformers.PreTrainedModel",
    tokenizer: "transformers.PreTrainedTokenizerBase",
    text: str,
    question: str,
    images: Sequence["Image"] = (),
) -> Any:
    """Return a model's inputs for a user's message, on its device; images have its precision.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        text: a text before the question; empty for none.
        question: the question.
        images: images before the text.

    Raises:
        KeepsetError: the model takes no images, or its processor refuses these.
    """
    if images:
        processor = load_processor(model)
        return encoded(model, processor, "".join(image_chat_parts(processor, len(images), text, question)), images)
    prompt = "".join(chat_parts(tokenizer, text, question))
    return tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(model.device)


@dataclass(frozen=True, eq=False)
class Pictured:
    """Images that come before a text, the model that takes them, and the model's processor (`load_processor`)."""

    model: "transformers.PreTrainedModel"
    processor: Any
    images: Sequence["Image"]

    def prompt(self, text: str, chat: bool = True) -> dict[str, "Tensor"]:
        """Return the model's inputs for images and a text.

        Args:
            text: the text after the images.
            chat: whether it is the part of a chat message before a question; else it is plain.

        Raises:
            KeepsetError: the processor refuses them.
        """
        prompt = image_chat_parts(self.processor, len(self.images), text, "")[0]
        if not chat:
            prompt = f"{self.processor.image_token * len(self.images)}\n{text}"
        return dict(encoded(self.model, self.processor, prompt, self.images))


def image_grids(model: "transformers.PreTrainedModel", inputs: Mapping[str, "Tensor"]) -> list[tuple[int, int, int]]:
    """Return the first token of each image of a prompt, and the rows and columns of patches of its tokens.

    Images whose tokens are not one grid, such as those that a model cuts into tiles, are left out.

    Args:
        model: the model.
        inputs: the model's inputs for the prompt.
    """
    from keepset.core.budget import runs
    from keepset.hf.hooks import image_token_ids  # imported here because it loads torch

    tokens = image_token_ids(model.config)
    where = runs([at for at, token in enumerate(inputs["input_ids"][0].tolist()) if token in tokens])
    total, grids = sum(end - first for first, end in where), inputs.get("image_grid_thw")
    if grids is not None:
        merged = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1)
        shapes = [(frames * high // merged, wide // merged) for frames, high, wide in grids.tolist()]
    else:
        number = inputs["pixel_values"].shape[:-3].numel() if "pixel_values" in inputs else 1
        side = isqrt(total // number)
        same = side * side * number == total
        sides = [side] * number if same else [isqrt(end - first) for first, end in where]
        shapes = [(length, length) for length in sides]
    found, left = [], list(shapes)
    for first, end in where:
        at = first
        while left and at < end:
            rows, columns = left.pop(0)
            if rows and at + rows * columns <= end:
                found.append((at, rows, columns))
            at += max(rows * columns, 1)
    return found if sum(rows * columns for _, rows, columns in found) == total else []


def encoded(
    model: "transformers.PreTrainedModel", processor: Any, prompt: str, images: Sequence["Image"]
) -> "transformers.BatchFeature":
    """Return a model's inputs for a prompt of `image_chat_parts`, on its device and in its precision.

    Args:
        model: the model.
        processor: the model's processor.
        prompt: the prompt.
        images: its images.

    Raises:
        UnsupportedModelError: the processor refuses them.
    """
    try:
        inputs = processor(text=[prompt], images=list(images), add_special_tokens=False, return_tensors="pt")
    except (ValueError, TypeError, ImportError, IndexError) as error:
        cause = str(error).strip().split("\n")[0].rstrip(".")
        raise UnsupportedModelError(
            f"{type(processor).__name__} does not take {len(images)} images in this prompt ({cause}): give others, or "
            "call the model in Python."
        ) from error
    return inputs.to(model.device, model.dtype)
