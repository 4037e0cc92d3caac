"""Loading a language model and its tokenizer from a folder or a hub."""

import importlib.util
import re
from typing import TYPE_CHECKING, Any

from keepset.errors import KeepsetError, UnsupportedModelError

if TYPE_CHECKING:
    import transformers

    Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]

_DTYPES = ("float32", "bfloat16", "float16")


def options_of(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return a device and a dtype as options of transformers'.

    Raises:
        KeepsetError: there is no such device or precision, or accelerate is missing.
    """
    import torch

    if dtype not in (None, *_DTYPES):
        raise KeepsetError(f"The precision {dtype!r} is not known: use {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")
    if device == "auto":
        if importlib.util.find_spec("accelerate") is None:
            raise KeepsetError(
                "The device 'auto' needs the package accelerate: run `pip install accelerate`, or name a device."
            )
        return {"device_map": "auto", "dtype": dtype or "auto"}
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count()
        there = f"{gpus} GPU{'s' * (gpus > 1)} (cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)})" if gpus else "no GPU"
        raise KeepsetError(
            f"PyTorch cannot compute on the device {device!r} and finds {there}: use an existing device, or cpu."
        ) from error
    return {"device": wanted, "dtype": dtype or "auto"}


def read_model(source: str, advice: str, placed: dict[str, Any]) -> "Loaded":
    """Return a model and its tokenizer.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        advice: the advice for an error, if they cannot be loaded.
        placed: the result of `options_of`.

    Raises:
        UnsupportedModelError: they cannot be loaded, or it is no causal language model.
    """
    from safetensors import SafetensorError
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        causal, looking = (
            class_names(mapping, config)
            for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        )
        declared = config.architectures or causal or looking
        if config.is_encoder_decoder or (causal | looking).isdisjoint(declared):
            kind = ", ".join(declared) or config.model_type
            raise UnsupportedModelError(
                f"The model {source!r} is a {kind}, and keepset takes only causal (decoder-only) language models."
            )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        device, options = placed.get("device"), {key: value for key, value in placed.items() if key != "device"}
        kind = AutoModelForCausalLM if looking.isdisjoint(declared) else AutoModelForImageTextToText
        model = kind.from_pretrained(source, config=config, trust_remote_code=False, **options)
        if device is not None:
            model.to(device)
    except KeepsetError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        cause = re.split(r"\. |\n", str(error).strip())[0].rstrip(".")
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded ({cause}): {advice}.") from error
    return model, tokenizer


def class_names(mapping: Any, config: Any) -> set[str]:
    """Return the names of the classes that a mapping has for a configuration."""
    kinds = mapping.get(type(config), ())
    return {kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))}
