"""A tiny random model that looks at images and that vLLM serves without further packages."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from tests.hf.models import tokenizer

SIDE, PATCH = 32, 8
TOKENS = (SIDE // PATCH) ** 2 // 4
"""Tokens of an image."""
_SPECIAL = ("<global-img>", "<fake_token_around_image>", "<image>", "<end_of_utterance>")


def save_pictured(folder: Path) -> Path:
    """Save a tiny Idefics 3 with its processor and a tokenizer of letters."""
    letters = PreTrainedTokenizerFast.from_pretrained(tokenizer("pictured"))
    letters.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", *_SPECIAL]})  # letters have the first ids
    text = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.2,
    }
    token = letters.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=token, scale_factor=2, pad_token_id=0
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    Idefics3Processor(images, letters, TOKENS).save_pretrained(folder)
    return folder
