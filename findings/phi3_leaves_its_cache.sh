#!/usr/bin/env bash
# transformers 5.19.0, torch 2.13.0 on a CPU.
#
# A Phi-3 with rope_type="longrope" rotates all tokens in another way once a text is longer than
# `original_max_position_embeddings`. Cached keys cannot follow, so its `generate` leaves the cache there (`past_key_values
# = None`), but hands on the newest token alone: from then on each token is computed without any context. Nothing warns,
# and the cache that the caller holds stays at the old length.
# Also seen: 5.16.1 does the same; 5.23.0 computes the whole text again instead, in a cache that the caller does not see.
#
# Seen, with a change at 64 tokens, a prompt of 60 and 20 new tokens:
#   the cache holds 64 tokens, the text 80
#   of the last 15 tokens, 15 are those that the model says after the token before alone, and none the one after the text
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
rotation = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64)
rotation |= dict(short_factor=[1 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)])
lengths = dict(max_position_embeddings=256, original_max_position_embeddings=64, sliding_window=None)
config = Phi3Config(vocab_size=100, rope_parameters=rotation, pad_token_id=0, **sizes, **lengths)
model = Phi3ForCausalLM(config).eval()
for weight in model.parameters():
    weight.data = 0.3 * torch.randn_like(weight) + (weight.ndim == 1)
model.generation_config.eos_token_id = None
prompt, past = torch.randint(3, 100, (1, 60)), DynamicCache(config=config)
text = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), past_key_values=past, max_new_tokens=20, do_sample=False
)
print(f"the cache holds {past.get_seq_length()} tokens, the text {text.shape[1]}")
with torch.no_grad():
    whole = model(text).logits.argmax(-1)[0, 64:79]
    alone = torch.stack([model(text[:, at : at + 1]).logits[0, -1].argmax() for at in range(64, 79)])
said = text[0, 65:80]
print(f"of {len(said)} tokens {int((said == alone).sum())} are said after one alone, {int((said == whole).sum())} after all")
assert past.get_seq_length() == 64 and text.shape[1] == 80
assert bool((said == alone).all()) and not bool((said == whole).all())
print("as described")
PYTHON
