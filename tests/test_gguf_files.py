"""GGUF files of tiny models of transformers, written by the gguf package as llama.cpp's converter writes them."""

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Tokenizer, PreTrainedModel, Qwen2Tokenizer

from keepset import gguf_files, models
from keepset.errors import KeepsetError, UnsupportedModelError

TEXTS = ["Hello world", " two  leading words", "", "a\n\n\tb 2024", "unseen: é你🙂"]
CORPUS = ["Hello world, these are a few words of 2024.", "two leading words lead the world", "three words a b"] * 20
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
KINDS = {"gemma3": "gemma3_text"}
HALF = 4
"""Frequencies of a head of eight numbers."""


def refusal(call: Callable[[], object]) -> str:
    """The one sentence with which a call refuses."""
    with pytest.raises(UnsupportedModelError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    return message


@pytest.fixture(scope="module")
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of 300 tokens, of which the first begins a text and the second ends one, and its merges."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    described = json.loads(trained.to_str())["model"]
    vocabulary = described["vocab"]
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), 300)}
    return vocabulary, [tuple(pair) for pair in described["merges"]]


@pytest.fixture
def write(tmp_path: Path, byte_level: tuple[dict[str, int], list[tuple[str, str]]]) -> Callable[..., Path]:
    """A function that writes a file of a model with a tokenizer."""

    def written(
        architecture: str = "llama",
        model: PreTrainedModel | None = None,
        more: Callable[[GGUFWriter], None] = lambda writer: None,
        tokens: Callable[[GGUFWriter], None] | None = None,
        folder: str = "model",
    ) -> Path:
        model = model or made(architecture if architecture in MODEL_ARCH_NAMES.values() else "llama")
        path = tmp_path / folder / "tiny.gguf"
        path.parent.mkdir(exist_ok=True)
        writer = GGUFWriter(path, architecture)
        describe(writer, model)
        if tokens is None:
            write_byte_level(writer, *byte_level, pre="qwen2" if architecture.startswith("qwen") else "gpt-2")
        else:
            tokens(writer)
        more(writer)
        for name, weight in weights(architecture, model).items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return written


def made(architecture: str, **more: Any) -> PreTrainedModel:
    """A random model of transformers."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    if architecture != "phi3":
        sizes["head_dim"] = 8
    if architecture == "gemma3":
        more = {"sliding_window": 16, "query_pre_attn_scalar": 256, "num_hidden_layers": 6, **more}
    config = AutoConfig.for_model(KINDS.get(architecture, architecture), **{**SIZES, **sizes, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        weight.data = 0.3 * torch.randn_like(weight) + ("norm" in name and architecture != "gemma3")
    return model


def describe(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotation = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rotation["rope_theta"])
    writer.add_rope_dimension_count(int(8 * rotation.get("partial_rotary_factor", 1)))
    if writer.arch in ("qwen3", "gemma3"):
        writer.add_key_length(8)
        writer.add_value_length(8)
    if writer.arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)


def weights(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's weights by their names in a GGUF file, with what llama.cpp's converter does to them."""
    known = "llama" if architecture == "gpt9" else architecture
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == known)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name, weight in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        array = weight.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = array.shape[0] // 8
            array = array.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and "norm" in name:
            array = array + 1
        found[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(array)
    return found


def write_byte_level(
    writer: GGUFWriter, vocabulary: dict[str, int], merges: list[tuple[str, str]], pre: str = "gpt-2"
) -> None:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def logits(model: PreTrainedModel, length: int = 60) -> Tensor:
    ids = torch.randint(2, 300, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_yarn_beta_fast(16.0)


def llama_3(writer: GGUFWriter) -> None:
    """llama.cpp's converter writes these factors, and no word of where they come from."""
    base, factor, low, high, trained = 5e5, 8.0, 1.0, 4.0, 8192
    factors = []
    for frequency in (base ** (-2 * index / 8) for index in range(HALF)):
        length = 2 * math.pi / frequency
        smooth = (trained / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if length < trained / high else factor if length > trained / low else between)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 1.5, 2.5, 4.0]


def long_rope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
    writer.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, rope_theta=1e4)
LLAMA_3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
LONG_ROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, attention_factor=1.25, rope_theta=1e4)
LINEAR = dict(rope_type="linear", factor=4.0)
LAYERS = {
    "full_attention": {**LINEAR, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[GGUFWriter], None]]] = {
    "plain": ("llama", {}, lambda writer: None),
    "linear": ("llama", dict(rope_parameters={**LINEAR, "rope_theta": 1e4}), linear),
    "yarn": ("llama", dict(rope_parameters=YARN), yarn),
    "yarn_qwen2": ("qwen2", dict(rope_parameters=YARN), yarn),
    "llama3": ("llama", dict(rope_parameters={**LLAMA_3, "rope_theta": 5e5}, max_position_embeddings=65536), llama_3),
    "tied": ("qwen3", dict(tie_word_embeddings=True), lambda writer: None),
    "phi3": ("phi3", {}, lambda writer: None),
    "window": ("phi3", dict(sliding_window=20), lambda writer: writer.add_sliding_window(20)),
    "longrope": (
        "phi3",
        dict(rope_parameters=LONG_ROPE | {"partial_rotary_factor": 1.0}, original_max_position_embeddings=32),
        long_rope,
    ),
    "partial": ("phi3", dict(partial_rotary_factor=0.5), lambda writer: None),
    "gemma3": (
        "gemma3",
        dict(rope_parameters=LAYERS),
        lambda writer: (linear(writer), writer.add_rope_freq_base_swa(5e4)),
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
def test_a_model_from_a_file_computes_what_the_model_computes_that_was_written(
    case: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Also past the length from which a rotation changes, and once it was saved and loaded again."""
    architecture, more, scaling = CASES[case]
    model = made(architecture, **more)
    path = write(architecture, model, scaling)
    read, tokenizer = models.load(str(path), device="cpu")
    assert read.dtype == torch.float32 and not read.training and read.config.name_or_path == str(path)
    for length in (20, 60):
        torch.testing.assert_close(logits(read, length), logits(model, length), rtol=1e-5, atol=1e-5)
    read.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, same = models.load(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(logits(again), logits(read))
    assert [same(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]


def test_the_only_file_of_a_folder_is_loaded_in_a_precision(write: Callable[..., Path]) -> None:
    path = write(folder="only")
    model, tokenizer = models.load(str(path.parent), device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == ("<s>", "</s>", 256)
    (path.parent / "other.gguf").touch()
    assert "has 2 GGUF files: name one of them" in refusal(lambda: models.load(str(path.parent)))


@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("begins", [True, False, None])
def test_tokens_are_those_of_sentencepiece(
    leading: bool, begins: bool | None, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a word about it, a text begins with the token for it and a space, as llama.cpp has it."""
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=stored,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=leading,
        user_defined_symbols=["<mark>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=stored.getvalue())

    def tokens(writer: GGUFWriter) -> None:
        size = theirs.get_piece_size()
        written = [theirs.id_to_piece(index) for index in range(size)]
        kinds = [
            2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
            for i in range(size)
        ]
        kinds[written.index("<mark>")] = 4
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(written)
        writer.add_token_scores([theirs.get_score(index) for index in range(size)])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(theirs.bos_id())
        writer.add_eos_token_id(theirs.eos_id())
        writer.add_unk_token_id(theirs.unk_id())
        if begins is not None:
            writer.add_add_bos_token(begins)
        if not leading:
            writer.add_add_space_prefix(False)

    model = made("llama", vocab_size=theirs.get_piece_size())
    read, tokenizer = models.load(str(write("llama", model, tokens=tokens)), device="cpu")
    read.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = models.load(str(tmp_path / "saved"), device="cpu")[1]
    first = [theirs.bos_id()] if begins in (True, None) else []
    for text in [*TEXTS, "a <mark>b" if not leading else "a"]:
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"] == first + theirs.encode(text)
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer("Hello", "world")["input_ids"] == first + theirs.encode("Hello") + first + theirs.encode("world")


@pytest.mark.parametrize("kind", ["gpt-2", "qwen2"])
def test_tokens_are_those_of_transformers_own_tokenizer(
    kind: str, write: Callable[..., Path], byte_level: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    path = write(tokens=lambda writer: write_byte_level(writer, *byte_level, pre=kind))
    theirs = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}[kind](*byte_level)
    tokenizer = models.load(str(path), device="cpu")[1]
    for text in [*TEXTS, "cafe\u0301 1234567 it's"]:
        assert tokenizer(text)["input_ids"] == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_texts_are_split_as_transformers_knows_it() -> None:
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    patterns = {name: split.pattern for name, split in gguf_files._SPLITS.items() if split.pattern}
    assert len(patterns) == 8 and patterns == {name: known[name] for name in patterns}


@pytest.mark.parametrize("said", [True, False, None])
def test_llama_3_begins_a_text_with_its_token_unless_the_file_says_otherwise(
    said: bool | None, write: Callable[..., Path], byte_level: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    def tokens(writer: GGUFWriter) -> None:
        write_byte_level(writer, *byte_level, pre="llama-bpe")
        if said is not None:
            writer.add_add_bos_token(said)

    tokenizer = models.load(str(write(tokens=tokens)), device="cpu")[1]
    assert (tokenizer("1234")["input_ids"][:1] == [0]) is (said is not False)


def other_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (dict(architecture="gpt9"), "the architecture 'gpt9', and gemma3, llama, phi3, qwen2 and qwen3"),
    "part": (dict(more=lambda writer: writer.add_uint16("split.count", 3)), "is a part of a model: join the parts"),
    "unknown": (dict(more=lambda writer: writer.add_attention_scale(0.5)), "says llama.attention.scale, which"),
    "experts": (dict(more=lambda writer: writer.add_expert_count(4)), "says llama.expert_count, which"),
    "factors": (dict(more=other_factors), "factors that are not those of Llama 3.1"),
    "scaling": (
        dict(more=lambda writer: (yarn(writer), writer.add_rope_scaling_yarn_ext_factor(0.5))),
        "says llama.rope.scaling.yarn_ext_factor, which cannot be set exactly",
    ),
    "phi": (dict(architecture="phi3", more=linear), "scales rotations by 'linear', which transformers' phi3 does not"),
    "bias": (
        dict(more=lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32))),
        "has 22 tensors of weights, and LlamaForCausalLM takes 21",
    ),
    "split": (
        dict(tokens=lambda writer: write_byte_level(writer, {"<s>": 0, "</s>": 1}, [], pre="newer")),
        "splits texts by the rule 'newer', which keepset does not know",
    ),
    "words": (dict(tokens=lambda writer: writer.add_tokenizer_model("bert")), "has a tokenizer 'bert'"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_read_wrongly_is_refused(case: str, write: Callable[..., Path]) -> None:
    arguments, sentence = REFUSED[case]
    assert sentence in refusal(lambda: models.load(str(write(**arguments)), device="cpu"))


def test_damaged_files_and_missing_packages_are_a_sentence(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    whole = path.read_bytes()
    for damaged in (b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"not " + whole):
        path.write_bytes(damaged)
        assert "cannot be read (" in refusal(lambda: models.load(str(path), device="cpu"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'needs more packages: run `pip install "gguf>=0.17" "accelerate>=1"`' in refusal(
        lambda: models.load(str(path))
    )
    for missing in (str(path.with_name("other.gguf")), "other.gguf", "long" * 999 + ".gguf"):
        with pytest.raises(KeepsetError, match="neither an existing folder nor"):
            models.load(missing)
