#!/usr/bin/env bash
# transformers 5.19.0, torch 2.13.0 on a CPU. The same with 5.16.1 and 5.23.0.
#
# With rope_type="dynamic" the model's rotations are stretched for a text longer than `max_position_embeddings`. They stay
# so until a text is *shorter* than that: one of exactly this length is computed with the stretched ones, if a longer one
# came before it, and with its own otherwise. The same prompt has two answers, by what the process did before.
# A cache that grows beyond that length mixes rotations: its older keys are not turned again.
#
# Seen (largest difference of logits / largest logit), max_position_embeddings=64, after a text of 128 tokens:
#   63 tokens: 0
#   64 tokens: 1.3
#   20 tokens one by one after 60 cached ones, against the whole text of 80: 1.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
rotation = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
config = LlamaConfig(vocab_size=100, max_position_embeddings=64, rope_parameters=rotation, **sizes)
model = LlamaForCausalLM(config).eval()
for weight in model.parameters():
    weight.data = 0.3 * torch.randn_like(weight) + (weight.ndim == 1)
text, gaps = torch.randint(0, 100, (1, 128)), {}
with torch.no_grad():
    for length in (63, 64):
        model(text[:, :10])  # a short text sets the rotations back
        before = model(text[:, :length]).logits
        model(text)
        after = model(text[:, :length]).logits
        gaps[length] = float((after - before).abs().max() / before.abs().max())
        print(f"{length} tokens: {gaps[length]:.2g}")
    model(text[:, :10])
    past, logits = DynamicCache(config=config), []
    model(text[:, :60], past_key_values=past)
    for at in range(60, 80):
        logits.append(model(text[:, at : at + 1], past_key_values=past).logits)
    whole = model(text[:, :80]).logits[:, 60:]
    cached = float((torch.cat(logits, 1) - whole).abs().max() / whole.abs().max())
    print(f"one by one: {cached:.2g}")
assert gaps[63] == 0 and gaps[64] > 0.1 and cached > 0.1
print("as described")
PYTHON
