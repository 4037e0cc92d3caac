#!/usr/bin/env bash
# transformers 5.19.0, torch 2.13.0 on a CPU, without Mamba's own kernels.
#
# The mixers of Jamba and Zamba go on from their recurrent and convolution states only if exactly one token is fed.
# Several tokens after a cached text are computed as if the text had never been: the states are ignored and replaced.
# Nothing warns. So chunked prefill, and a question that is fed onto a cached text, get other logits than the whole text.
#
# Seen (largest difference from the logits of the whole text / largest of these logits):
#   jamba   six tokens together 1.3    one by one 2e-06
#   zamba   six tokens together 0.32   one by one 2e-06
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

common = dict(vocab_size=200, hidden_size=64, intermediate_size=96, num_attention_heads=4, pad_token_id=0)
kinds = {
    "jamba": dict(
        num_hidden_layers=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        num_experts_per_tok=1, mamba_d_state=16, mamba_dt_rank=8,
    ),
    "zamba": dict(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, num_key_value_heads=4, mamba_d_state=16,
        n_mamba_heads=2,
    ),
}  # fmt: skip
found = {}
for kind, more in kinds.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **more)).eval()
    for weight in model.parameters():
        weight.data = 0.15 * torch.randn_like(weight) if weight.ndim > 1 else weight.data + 0.2 * torch.randn_like(weight)
    text, question = torch.randint(3, 200, (1, 30)), torch.randint(3, 200, (1, 6))
    with torch.no_grad():
        whole = model(torch.cat([text, question], 1), use_cache=False).logits[:, -6:]
        gaps = []
        for steps in ([6], [1] * 6):
            past, logits = DynamicCache(config=model.config), []
            model(text, past_key_values=past)
            for part in question.split(steps, 1):
                logits.append(model(part, past_key_values=past).logits)
            gaps.append(float((torch.cat(logits, 1) - whole).abs().max() / whole.abs().max()))
    found[kind] = gaps
    print(f"{kind}   six tokens together {gaps[0]:.2g}   one by one {gaps[1]:.1g}")
for kind, (together, single) in found.items():
    assert single < 1e-4, "one token after another goes on from the states"
    assert together > 0.05, f"several tokens together ignore the states of {kind}"
print("as described")
PYTHON
