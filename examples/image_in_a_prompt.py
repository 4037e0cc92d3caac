"""An image in a prompt: which of its patches a recipe keeps, and how `protect="image"` keeps them all.

The model is a tiny Qwen2-VL with random weights, which is made here and says nothing of sense. With a model of yours
`keepset.models.load(FOLDER)` and `keepset.models.load_processor(model)` stand in the place of the first lines, and the
processor makes the inputs.
"""

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import keepset

IMAGE, ROWS, COLUMNS = 5, 4, 4
axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
config = Qwen2VLConfig(
    text_config={**sizes, **heads, "rope_parameters": axes, "initializer_range": 0.3},
    vision_config={**vision, "mlp_ratio": 2, "initializer_range": 0.3},
    image_token_id=IMAGE,
)
torch.manual_seed(0)
model = Qwen2VLForConditionalGeneration(config).eval()

# Words, an image, and words that ask about it. Four patches make one token of the image.
patches, numbers = 2 * ROWS * 2 * COLUMNS, 3 * 2 * 8 * 8
words = torch.randint(10, 200, (60,))
ids = torch.cat([words[:20], torch.full((ROWS * COLUMNS,), IMAGE), words[20:]])[None]
prompt = {
    "input_ids": ids,
    "attention_mask": torch.ones_like(ids),
    "pixel_values": torch.randn(patches, numbers),
    "image_grid_thw": torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]]),
    "mm_token_type_ids": (ids == IMAGE).int(),
}

for recipe in ("snapkv(window=8, keep=32)", "snapkv(window=8, keep=32, protect='image')"):
    cache = keepset.Cache(model, recipe)
    answer = model.generate(**prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    kept = cache.keep_set.mask(ids.shape[1]).float().mean((0, 1, 2))  # over layers, requests and KV heads
    print(f"{recipe}: {kept.sum():.0f} of {ids.shape[1]} tokens. Share of the heads that keep each patch:")
    for row in kept[ids[0] == IMAGE].view(ROWS, COLUMNS).tolist():
        print("   ", *(f"{share:4.0%}" for share in row))
    print("    answer:", answer[0, ids.shape[1] :].tolist())
