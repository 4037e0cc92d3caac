"""Models and tokenizers from GGUF files, llama.cpp's format.

transformers reads the weights of a file. What it loses of the rest is set here by what the file says, or refused: how
positions are rotated, which tokens begin a text, how a text is split before its tokens are looked up.
"""

import copy
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepset.errors import UnsupportedModelError, installation, quoted

if TYPE_CHECKING:
    import tokenizers
    import transformers

ARCHITECTURES = ("gemma3", "llama", "phi3", "qwen2", "qwen3")
"""The architectures whose files are read."""
READERS = ("gguf", "accelerate")
"""The packages with which transformers reads a file."""

_KNOWN = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"),
}
"""What a file may say of its architecture, besides how rotations are scaled."""
_FACTORS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""The precisions of weights that are not quantized, by llama.cpp's numbers."""
_CONTROL, _WRITTEN = 3, 4
"""Kinds of tokens: those that no text contains, and those that are found in a text before anything else."""
_LAYERS_OF_GEMMA_3_27B = 62
_SPACE = "\u2581"

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How a text is split before the tokens of its parts are looked up.

    Attributes:
        pattern: what a part looks like; None for GPT-2's.
        digits: whether each digit is a part.
        whole: whether a part that is a token is not merged of smaller ones.
        begins: whether a text begins with the token for it, if the file does not say.
        composed: whether letters and their accents are composed first.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA_3_SPLIT = _Split(_LLAMA_3, whole=True, begins=True)
_QWEN_SPLIT = _Split(_LLAMA_3.replace("{1,3}", ""), composed=True)
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA_3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_SPLIT),
    "tekken": _Split(_TEKKEN, whole=True, begins=True),
    "gpt-4o": _Split(_GPT_4O),
}
"""By llama.cpp's names, `tokenizer.ggml.pre`."""


def find(name: str) -> Path | None:
    """Return the GGUF file that a name means: the file itself, or the only one of a folder without config.json.

    Raises:
        UnsupportedModelError: the folder has several.
    """
    path = Path(name)
    if path.suffix == ".gguf" and os.path.isfile(path):  # unlike Path.is_file, it takes any name
        return path
    if not os.path.isdir(path) or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UnsupportedModelError(
            f"The folder {quoted(path)} has {len(files)} GGUF files: name one of them, such as {quoted(files[0])}."
        )
    return files[0] if files else None


class GGUFFile:
    """A GGUF file.

    Args:
        path: the file.

    Raises:
        UnsupportedModelError: packages that read it are missing, it is none, its architecture is not read, it is a part
            of a model, or says what is not known.
    """

    def __init__(self, path: Path) -> None:
        if not all(map(importlib.util.find_spec, READERS)):
            raise UnsupportedModelError(
                f"{quoted(path)} is a GGUF file, which needs more packages: run {installation('gguf')}."
            )
        from gguf import GGUFReader

        self.path = path
        with self.refused():
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self.architecture = str(self.metadata["general.architecture"])
        self._check()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Turn errors about a damaged file into one sentence within the block."""
        try:
            yield
        except UnsupportedModelError:
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            cause = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__
            raise self._error(f"cannot be read ({cause}): copy it again, or give a folder with config.json") from error

    def _error(self, sentence: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"The GGUF file {quoted(self.path)} {sentence}.")

    def _said(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _check(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise self._error(
                f"has a model of the architecture {self.architecture!r}, and {', '.join(ARCHITECTURES[:-1])} and "
                f"{ARCHITECTURES[-1]} are read: give a folder with config.json"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise self._error("is a part of a model: join the parts with `llama-gguf-split --merge`")
        own = {key.partition(".")[2]: key for key in self.metadata if key.startswith(f"{self.architecture}.")}
        for name, key in own.items():
            if name not in _KNOWN and not name.startswith("rope.scal") and self.metadata[key] not in (0, None):
                raise self._error(f"says {key}, which transformers does not read: give a folder with config.json")

    def config(self) -> "transformers.PretrainedConfig":
        """Return the model's configuration, with what transformers loses of it.

        Raises:
            UnsupportedModelError: the file says what cannot be set exactly.
        """
        from transformers import AutoConfig

        with self.refused():
            config = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
            for name in ("unk_token_id", "_model_name_or_path"):  # no part of a configuration
                vars(config).pop(name, None)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # else those of another model
                setattr(config, f"{name}_token_id", self._token(f"{key}_token_id"))
            if width := self._said("attention.key_length"):
                config.head_dim = width
            if self.architecture == "gemma3":
                self._complete_gemma(config)
            if self.architecture == "phi3":
                config.sliding_window = self._said("attention.sliding_window")
            self._rotate(config)
        return config

    def _complete_gemma(self, config: Any) -> None:
        if base := self._said("rope.freq_base_swa"):
            config.rope_parameters["sliding_attention"]["rope_theta"] = base
        if config.num_hidden_layers == _LAYERS_OF_GEMMA_3_27B:  # no file says so, llama.cpp knows it, too
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads

    def _rotate(self, config: Any) -> None:
        """Set how rotations are scaled, and how much of a head they turn."""
        rotation = config.rope_parameters.get("full_attention", config.rope_parameters)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        turned = self._said("rope.dimension_count", head_dim)
        if turned != head_dim:
            if self.architecture != "phi3":
                raise self._error(f"rotates {turned} of a head's {head_dim} numbers: give a folder with config.json")
            rotation["partial_rotary_factor"] = turned / head_dim
        scaling = self._scaling(config, turned)
        if self.architecture == "phi3" and scaling.get("rope_type", "longrope") != "longrope":
            raise self._error(
                f"scales rotations by {scaling['rope_type']!r}, which transformers' {config.model_type} does not: give "
                "a folder with config.json"
            )
        rotation.update(scaling)
        if self.architecture == "phi3" and scaling:
            config.original_max_position_embeddings = scaling["original_max_position_embeddings"]

    def _scaling(self, config: Any, turned: int) -> dict[str, Any]:
        """Return how rotations are scaled in transformers' words, nothing if they are not."""
        prefix = f"{self.architecture}.rope.scaling."
        said = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        kind = said.pop("type", "none")
        factor = float(said.pop("factor", self._said("rope.scale_linear", 1.0)))
        said.pop("finetuned", None)
        if _FACTORS in self.tensors:
            scaling = self._scaling_of_llama(config, turned)
        elif _LONG in self.tensors:
            scaling = {
                "rope_type": "longrope",
                "short_factor": self._numbers(_SHORT),
                "long_factor": self._numbers(_LONG),
                "original_max_position_embeddings": said.pop("original_context_length"),
            }
            if attention := said.pop("attn_factor", None):
                scaling["attention_factor"] = attention
            kind = "longrope" if kind == "none" else kind
        elif kind == "yarn":
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": said.pop("original_context_length", config.max_position_embeddings),
            }
            for name in ("beta_fast", "beta_slow"):
                if (bound := said.pop(f"yarn_{name}", None)) is not None:
                    scaling[name] = bound
            scaling["attention_factor"] = said.pop("attn_factor", 1.0) * (1 + 0.1 * math.log(max(factor, 1.0)))
        else:
            said.pop("original_context_length", None)
            scaling = {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        if said or kind not in ("none", "linear", "yarn", "longrope"):
            shown = ", ".join(f"{prefix}{name}" for name in said) or f"{prefix}type {kind!r}"
            raise self._error(f"says {shown}, which cannot be set exactly: give a folder with config.json")
        return scaling

    def _scaling_of_llama(self, config: Any, turned: int) -> dict[str, Any]:
        """Return Llama 3.1's scaling, of which a file has only the factors that come of it."""
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = torch.tensor(self._numbers(_FACTORS), dtype=torch.float64)
        scaling = {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        trial = copy.deepcopy(config)
        trial.rope_parameters.update(scaling)
        plain = config.rope_parameters["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float64) / -turned)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
        if not torch.allclose(plain / factors, scaled.double(), rtol=1e-5, atol=0):
            raise self._error(
                "scales rotations by factors that are not those of Llama 3.1 and later: give a folder with config.json"
            )
        return scaling

    def _numbers(self, tensor: str) -> list[float]:
        return [float(number) for number in self.tensors[tensor].data.reshape(-1)]

    def model(self, placed: dict[str, Any]) -> "transformers.PreTrainedModel":
        """Return the model; its weights are not quantized any more, and `save_pretrained` writes it.

        Args:
            placed: the result of `models.options_of`; its dtype `auto` is float32 for quantized weights.

        Raises:
            UnsupportedModelError: it cannot be read, or not as the file says.
        """
        from transformers import AutoModelForCausalLM

        config = self.config()
        options = {key: value for key, value in placed.items() if key != "device"}
        if options["dtype"] == "auto":
            options["dtype"] = _DTYPES.get(self.metadata.get("general.file_type", -1), "float32")
        with self.refused():
            with redirect_stderr(StringIO()):  # a progress bar that cannot be turned off
                read = AutoModelForCausalLM.from_pretrained(
                    self.path.parent,
                    gguf_file=self.path.name,
                    config=copy.deepcopy(config),
                    dtype=options["dtype"],
                )
            used = len(list(read.parameters()))  # tied ones once
            weights = len(self.tensors.keys() - {_FACTORS, _SHORT, _LONG})
            if used != weights:
                raise self._error(
                    f"has {weights} tensors of weights, and {type(read).__name__} takes {used}: give a folder with "
                    "config.json"
                )
            # A copy made from weights alone: what was read knows that it was quantized, and could not be saved.
            model = type(read).from_pretrained(None, config=config, state_dict=read.state_dict(), **options)
            if placed.get("device") is not None:
                model.to(placed["device"])
        model.config.name_or_path = str(self.path)
        return model

    def tokenizer(self) -> "transformers.PreTrainedTokenizerBase":
        """Return the tokenizer, which begins a text with the tokens that the file says.

        Raises:
            UnsupportedModelError: its kind is not known.
        """
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        kind = self._token("model")
        if kind not in ("gpt2", "llama"):
            raise self._error(f"has a tokenizer {kind!r}, and gpt2 and llama are read: give a folder with config.json")
        with self.refused():
            backend, begins = self._byte_level() if kind == "gpt2" else self._sentencepiece()
            tokens, kinds = self._token("tokens"), self._token("token_type")
            backend.add_special_tokens([token for token, said in zip(tokens, kinds, strict=True) if said == _CONTROL])
            backend.add_tokens(self._written())
            names = {
                name: tokens[self._token(f"{key}_token_id")]
                for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
                if self._token(f"{key}_token_id") is not None
            }
            added = {name: names[name] for name, adds in (("bos", begins), ("eos", False)) if self._adds(name, adds)}
            if added:
                order = [added.get("bos"), "$A", added.get("eos")]
                backend.post_processor = TemplateProcessing(
                    single=[part for part in order if part],
                    pair=[part for part in (*order, added.get("bos"), "$B:1", added.get("eos")) if part],
                    special_tokens=[(token, tokens.index(token)) for token in added.values()],
                )
            return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                tokenizer_object=backend,
                **{f"{name}_token": token for name, token in names.items()},
                chat_template=self.metadata.get("tokenizer.chat_template"),
                model_max_length=self._said("context_length"),
                clean_up_tokenization_spaces=False,
            )

    def _token(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def _adds(self, name: str, default: bool) -> bool:
        said = self._token(f"add_{name}_token")
        return default if said is None else bool(said)

    def _written(self) -> list["tokenizers.AddedToken"]:
        from tokenizers import AddedToken

        pairs = zip(self._token("tokens"), self._token("token_type"), strict=True)
        return [AddedToken(token, normalized=False, special=False) for token, kind in pairs if kind == _WRITTEN]

    def _byte_level(self) -> tuple["tokenizers.Tokenizer", bool]:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        name = self._token("pre")
        if name not in _SPLITS:
            raise self._error(
                f"splits texts by the rule {name!r}, which keepset does not know: give a folder with config.json"
            )
        split = _SPLITS[name]
        merges = [tuple(merge.split(" ")) for merge in self._token("merges")]
        vocabulary = {token: index for index, token in enumerate(self._token("tokens"))}
        whole = {"ignore_merges": True} if split.whole else {}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **whole))
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
        if split.pattern:
            steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if split.composed:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend, split.begins

    def _sentencepiece(self) -> tuple["tokenizers.Tokenizer", bool]:
        from tokenizers import Tokenizer, decoders, models, normalizers

        tokens, scores, kinds = self._token("tokens"), self._token("scores"), self._token("token_type")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merged = (index for index, kind in enumerate(kinds) if kind not in (_CONTROL, _WRITTEN))
        best = sorted(merged, key=lambda index: (-scores[index], index))
        merges = [
            (token[:cut], token[cut:])
            for token in map(tokens.__getitem__, best)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        unknown = tokens[self._token("unknown_token_id") or 0]
        backend = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        leading = self._token("add_space_prefix") is not False
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend(_SPACE)] if leading else []), normalizers.Replace(" ", _SPACE)]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(_SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", 1, 0)] if leading else []),
            ]
        )
        return backend, True
