"""A tiny random model of every type that transformers maps to a causal or an image-text model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from keepset.hf.other_layers import compressible
from tests.hf.models import with_random_weights

CAUSAL, IMAGE_TEXT = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
KINDS = tuple(sorted({*CAUSAL, *IMAGE_TEXT}))
"""All model types of the two mappings, as the installed transformers has them."""

WIDTH, HEADS, HEAD_DIM, VOCABULARY, WINDOW = 64, 4, 16, 200, 24
SIZES: dict[str, int] = {
    # Numbers of things.
    r"(num_)?(hidden_|encoder_|decoder_)?layers|n_layers?|.*num_hidden_layers|num_(en|de)coder_layers": 2,
    r"depth|resampler_depth|num_(residual_layers|res_blocks|blocks)|aligner_num_add_layers|.*per_stack": 2,
    r"num_global_layers|moe_layer_end_index": 1,
    r".*(kv_heads|key_value_heads|kv_n_heads|num_query_groups)": 2,
    r".*(n|num|attention|resampler|index_n)_heads?|num_sliding_attention_heads|n_heads?|linear_num_\w+_heads": HEADS,
    r".*num_(local_|routed_)?experts|n_routed_experts|zero_expert_num": 4,
    r".*(n|num)_shared_experts": 1,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k": 2,
    r"n_groups|mamba_n_?groups": 1,
    r"(n_|num_)?mamba_(n_|num_)?heads": 8,
    r"n_group|num_expert_group": 2,
    r"topk_group|first_k_dense_replace|num_dense_layers|decoder_sparse_step": 1,
    # Widths.
    r"kv_lora_rank": 24,
    r".*lora_rank|.*adapter_rank|laurel_rank|.*_lowrank|.*dt_rank|time_step_rank|gated_norm_rank": 16,
    r".*qk_rope_head_dim|qk_nope_head_dim|rotary_dim": 8,
    r".*head_dim|d_kv|d_head|kv_channels|mamba_d_head|dim_head|attention_head_size|.*dim_head|mamba_headdim": HEAD_DIM,
    r".*(hidden_size|_width|d_model|embed(ding)?_(dim|size)|emb_dim|projection_dim)|n_embd|.*proj(_|ector_)dim": WIDTH,
    r".*(projector_)?(input|output|proj)_(dim|size)|word_embed_proj_dim|d_inner|mamba_d_ssm|projection_size": WIDTH,
    r".*hidden_size_per_layer_input": 8,
    r".*(intermediate|ffn|ff|mlp)_(size|dim)(_mlp)?|.*ffn_hidden_size|d_ff|dff|dim_ff|feed_forward_size|n_inner": 96,
    r".*state(_size|_dim)|mamba_d_state": 16,
    # Texts, images and sounds.
    r"vocab_size\w*|.*_vocab_size": VOCABULARY,
    r"(attention_)?(sliding_)?window(_size)?|sliding_window_size|local_attention|attention_chunk_size": WINDOW,
    r".*chunk_size|chunk_length": 8,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length": 512,
    r"image_size|crop_size|.*img_size|.*max_image_size|resolution": 32,
    r"patch_size": 8,
    r"num_(query_tokens|position_embeddings|image_tokens)|image_seq_length|\w+_latents|latent_query_num": 4,
    r"index_topk|index_block_size": 64,
    r"num_embeddings|codebook_size": 64,
    r".*base_channels|.*_channels": 32,
}
"""The largest number that an attribute of a configuration may have, by patterns of its name. The first one decides."""

_WIDE = {"head_dim": 2 * HEAD_DIM}
_PATTERNS = [(re.compile(pattern), most) for pattern, most in SIZES.items()]
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "depth")
_INDICES = re.compile(r".*(indexes|indices|idxs|layers|layer_ids)")

_THREE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [3, 3, 2]}
_AXES = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}
_FOUR = {"num_hidden_layers": 4}
_MIXED = {**_FOUR, "layer_types": ["conv", "full_attention"] * 2}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
_INDEXER["indexer_compress_ratio"] = 4
_BLOCKS = {"index_block_size": 8, "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}
_STARTS = {"vision_start_token_id": 4, "vision_end_token_id": 5}
_CAPPED = {"attn_logit_softcapping": 0.7}  # of logits as small as a tiny model's
_IMAGE_IS_3, _ROTATED_BY_AXES = {"vocabulary_map": {"<image>": 3}}, {"text_config.rope_parameters": _AXES}
_ON_AXES = ("glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_ON_AXES, _ROTATED_BY_AXES),
    **dict.fromkeys(("chameleon", "emu3"), _IMAGE_IS_3),
    **dict.fromkeys(("gemma2", "vaultgemma"), _CAPPED),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _MIXED),
    "bamba": {**_FOUR, "mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 200},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _THREE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _THREE}},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": _THREE},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "gemma3n_text": {
        **_FOUR,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "glm4v_moe": {"text_config.rope_parameters": {**_AXES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "granite4_vision": {
        "text_config.model_type": "granite",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {**_FOUR, "mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_hidden_layers": 16},
    "jamba": {**_FOUR, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_vl": {f"text_config.{name}": value for name, value in _MIXED.items()},
    "minimax_m3_vl": {f"text_config.{name}": value for name, value in _BLOCKS.items()},
    "minimax_m3_vl_text": _BLOCKS,
    "mamba2": {"head_dim": 32},
    "qwen2_5_omni_thinker": {**_STARTS, "text_config.rope_parameters": _AXES},
    "qwen3_omni_moe_thinker": _STARTS,
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "step3p7": {"text_config.sliding_window": WINDOW},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_FOUR, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
"""What the rule does not get right, by type; a dot leads into a part of the configuration."""
NO_WINDOW = ("mistral", "mixtral", "starcoder2", "phi3", "phimoe")
"""Types whose usual configuration has a window in every layer, as most models of them have not."""
NOT_BUILT: dict[str, str] = {
    "dbrx": "Its attention asks for `rope_theta`, which its configuration does not have.",
    "diffusion_gemma": "It writes text by diffusion, not token by token.",
    "evolla": "Its `generate` feeds the whole text at every step, whatever is cached.",
    "pi0": "It chooses a robot's actions and generates no text.",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "It is a drafter, which reads the cache of another model and has none of its own.",
    ),
    **dict.fromkeys(
        ("blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2"),
        "It does not run without an image, and the check has none.",
    ),
    **dict.fromkeys(
        ("musicgen", "musicgen_melody", "vision-encoder-decoder"),
        "It is an encoder-decoder of any two models, and keepset compresses decoder-only models.",
    ),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "Its images need the package `timm`."),
}
"""Types of which no tiny model is made, and why."""


def build(kind: str) -> Any:
    """Return a tiny random model of a type."""
    config = configuration(kind)
    torch.manual_seed(0)
    return with_random_weights(class_of(kind)._from_config(config).eval())


def class_of(kind: str) -> Any:
    """Return the class of a type's models; that for images, where there is one for texts, too."""
    name = IMAGE_TEXT.get(kind) or CAUSAL[kind]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def configuration(kind: str) -> PretrainedConfig:
    """Return the configuration of a tiny model of a type."""
    cls = CONFIG_MAPPING[kind]
    small = shrunk(cls().to_dict())
    if small.get("is_decoder") is False:
        small["is_decoder"] = True
    for path, value in OVERRIDES.get(kind, {}).items():
        *parts, name = path.split(".")
        part = small
        for key in parts:
            part = part[key]
        part[name] = value
    return cls.from_dict(small)


def usual_layers(kind: str) -> tuple[int, int]:
    """Return how many layers of a type's usual configuration keepset compresses, and how many it has."""
    config = CONFIG_MAPPING[kind]()
    _without_window(config)
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return sum(compressible(index, layer) is not None for index, layer in enumerate(layers)), len(layers)


def _without_window(config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config(decoder=True)):
        if part.model_type in NO_WINDOW:
            part.sliding_window = None


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's values, each as small as its name allows."""
    chosen = _chosen_layers(values)
    small = {name: _small(name, value, values, chosen) for name, value in values.items()}
    heads = [small.get(name) for name in ("num_attention_heads", "n_head") if isinstance(small.get(name), int)]
    whole = values.get("num_key_value_heads")
    if heads and whole is not None and whole == values.get("num_attention_heads"):
        small["num_key_value_heads"] = heads[0]
    if values.get("model_type") in NO_WINDOW:
        small["sliding_window"] = None
    if isinstance(rotated := values.get("qk_rope_head_dim"), int):
        small["qk_head_dim"] = small["qk_rope_head_dim"] + small.get("qk_nope_head_dim", 0)
        if values.get("head_dim") == rotated:
            small["head_dim"] = small["qk_rope_head_dim"]
    return small


def _small(name: Any, value: Any, values: Mapping[str, Any], chosen: list[int]) -> Any:
    """Return one value as small as its name allows."""
    if isinstance(value, dict) and name not in ("id2label", "label2id"):
        return _of_layers(value, chosen) if name == "per_layer_config" else shrunk(value)
    if isinstance(value, list):
        return _small_list(name, value, values, chosen)
    if value is None:
        missing = {"num_key_value_heads": HEADS, "head_dim": HEAD_DIM if "num_attention_heads" in values else None}
        return missing.get(name)
    if type(value) is not int or not isinstance(name, str):
        return value
    return len(chosen) if name in _LAYERS else _size(name, value)


def _of_layers(values: Mapping[str, Any], chosen: list[int]) -> dict[int, Any]:
    """Return what single layers have of their own, of those that are chosen."""
    by_index = {int(index): part for index, part in values.items()}
    return {
        position: {**shrunk(by_index[index]), **_WIDE} for position, index in enumerate(chosen) if index in by_index
    }


def _size(name: str, value: int) -> int:
    if name.endswith(("token_id", "token_index")):
        return _token(name)
    most = next((most for pattern, most in _PATTERNS if pattern.fullmatch(name)), value)
    return min(value, most)


def _token(name: str) -> int:
    """Return a token's number: prompts have none below 20."""
    numbers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return numbers.get(name, 3 + sum(map(ord, name)) % 17)


def _chosen_layers(values: Mapping[str, Any]) -> list[int]:
    """Return which layers of the usual configuration the tiny one has: two of each kind."""
    number = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 2)
    lists = [values[name] for name in ("layer_types", "layers_block_type") if isinstance(values.get(name), list)]
    kinds = lists[0] if lists and len(lists[0]) == number else [None] * number
    chosen: list[int] = []
    for index, kind in enumerate(kinds):
        if sum(kinds[earlier] == kind for earlier in chosen) < 2:
            chosen.append(index)
    return chosen


def _small_list(name: str, value: list[Any], values: Mapping[str, Any], chosen: list[int]) -> list[Any]:
    number = next((values[item] for item in _LAYERS if isinstance(values.get(item), int)), None)
    if len(value) == number:
        return [value[index] for index in chosen]
    if name.endswith("token_id"):
        return [_token(name)]
    if name == "mrope_section":
        return [2, 3, 3]
    if _INDICES.fullmatch(str(name)) and all(isinstance(item, int) for item in value) and number is not None:
        return sorted({min(item, len(chosen) - 1) for item in value})
    return value
