#!/usr/bin/env bash
# transformers 5.19.0, gguf 0.19.0, torch 2.13.0 on a CPU.
#
# A tiny Llama is written as a GGUF file that scales its rotations, has a sentencepiece tokenizer, and says that a text
# begins with BOS. Read by transformers, the model rotates as if nothing was scaled, and the tokenizer adds no BOS.
# Nothing warns. The model cannot be saved, though its weights are not quantized any more.
# Also seen: 5.16.1 loses the scaling, BOS and the space before a text, and saves; 5.23.0 has BOS, and loses the scaling.
#
# Seen:
#   linear: scaled by 4 in the file, inverse frequencies of the model [1, 0.1, 0.01, 0.001] as without
#   yarn, llama3: the same
#   tokens of "ab a": ['_ab', '_a'] without '<s>'
#   save_pretrained: ValueError, The model is quantized with QuantizationMethod.GGUF and is not serializable
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.19.0 gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType, get_tensor_name_map
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
scores = [0.0, 0.0, 0.0, -6.0, -7.0, -8.0, -1.0, -2.0, -3.0]


def linear(writer):
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer):
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def llama3(writer):
    writer.add_tensor("rope_freqs.weight", np.array([1, 1, 3, 8], np.float32))


def write(path, scale):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(pieces), max_position_embeddings=256, **sizes))
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3] + [1] * 6)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    scale(writer)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 1)
    for name, weight in model.named_parameters():
        stem, _, end = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{end}", weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


folder = Path(sys.argv[1])
for scale in (linear, yarn, llama3):
    write(folder / "tiny.gguf", scale)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    print(scale.__name__, model.config.rope_parameters, model.model.rotary_emb.inv_freq.tolist())
    assert torch.allclose(model.model.rotary_emb.inv_freq, plain), "nothing is scaled"
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
found = tokenizer.convert_ids_to_tokens(tokenizer("ab a")["input_ids"])
print(found)
assert found == ["\u2581ab", "\u2581a"], "the text does not begin with <s>"
try:
    model.save_pretrained(folder / "saved")
except ValueError as error:
    print(str(error)[:100])
else:
    raise AssertionError("the model cannot be saved")
print("as described")
PYTHON
