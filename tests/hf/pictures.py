"""Tiny random models that look at images, and their inputs."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import decoders
from torch import Tensor
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

from tests.hf.contract.builds import class_of, configuration
from tests.hf.models import tokenizer, with_random_weights

SIDE = 4
"""Patches along each side of an image."""
KINDS = {"gemma3": 4, "glm4v": 4, "idefics3": 4, "llava": 16, "qwen2_5_vl": 4, "qwen2_vl": 4, "qwen3_vl": 4}
"""Types of models, and how many tokens an image of theirs is."""
M_ROPE = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Types that give an image fewer positions than tokens."""
Layout = Sequence[int | None]
"""A prompt: numbers of words, and None for an image."""


@cache
def seeing(kind: str) -> Any:
    config = configuration(kind)
    if kind == "gemma3":
        config.mm_tokens_per_image = KINDS[kind]
    torch.manual_seed(0)
    model = with_random_weights(class_of(kind)._from_config(config).eval())
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return model


def places(kind: str, layout: Layout) -> list[int]:
    indices: list[int] = []
    at = 0
    for part in layout:
        if part is None:
            indices += range(at, at + KINDS[kind])
        at += KINDS[kind] if part is None else part
    return indices


def inputs(kind: str, *layouts: Layout, seed: int = 0) -> dict[str, Tensor]:
    """What `generate` takes for prompts with images; shorter ones are padded at the left."""
    config, draw = seeing(kind).config, torch.Generator().manual_seed(seed)
    rows = []
    for layout in layouts:
        parts = []
        for part in layout:
            words = torch.randint(20, 200, (part or 0,), generator=draw)
            parts.append(torch.full((KINDS[kind],), config.image_token_id) if part is None else words)
        rows.append(torch.cat(parts))
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    images, most = [layout.count(None) for layout in layouts], max(layout.count(None) for layout in layouts)
    arguments = {"input_ids": ids, "attention_mask": mask}
    if kind in M_ROPE:
        numbers = config.vision_config.in_channels * config.vision_config.temporal_patch_size * 8 * 8
        arguments |= {
            "pixel_values": torch.randn(sum(images) * SIDE * SIDE, numbers, generator=draw),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * sum(images)),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    elif kind == "idefics3":
        pixels = torch.zeros(len(layouts), most, 3, 8 * SIDE, 8 * SIDE)
        for row, number in enumerate(images):
            pixels[row, :number] = torch.randn(number, *pixels.shape[2:], generator=draw)
        arguments["pixel_values"] = pixels
    else:
        arguments["pixel_values"] = torch.randn(sum(images), 3, 8 * SIDE, 8 * SIDE, generator=draw)
        if kind == "gemma3":
            arguments["token_type_ids"] = (ids == config.image_token_id).int()
    return arguments


@cache
def folder() -> Path:
    """A folder of a tiny LLaVA with its processor and a tokenizer of letters, of which `<image>` is one."""
    path = Path(tempfile.mkdtemp()) / "pictured"
    atexit.register(shutil.rmtree, path.parent)
    letters = PreTrainedTokenizerFast.from_pretrained(tokenizer("pictured"))
    letters.backend_tokenizer.decoder = decoders.Fuse()
    letters.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", "<image>"]})  # letters have the first ids
    model = copy.deepcopy(seeing("llava"))
    model.config.image_token_id = letters.convert_tokens_to_ids("<image>")
    model.save_pretrained(path)
    side = 8 * SIDE
    template = (
        "U:{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{% for part in messages[0].content "
        "%}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}.A:"
    )
    letters.chat_template = template
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = LlavaProcessor(images, letters, 8, "default", template, num_additional_image_tokens=1)
    processor.save_pretrained(path)
    return path


def picture(path: Path, seed: int = 0, side: int = 40) -> Path:
    """A file with an image of random colours."""
    colours = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(seed))
    Image.fromarray(colours.byte().numpy()).save(path)
    return path
