from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.paged.methods import registered

if TYPE_CHECKING:
    from tests.vllm.oracle import Oracle

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # so that attention has its favourites, and logits a clear first
}
TINY = LlamaConfig(**SHAPE, num_hidden_layers=3)
DEEP = 7
"""Layers of a model for two stages."""


class _WithoutVLLM(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("vLLM is not installed: see the README", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without vLLM there is nothing to test here: most of these modules cannot even be imported."""
    if importlib.util.find_spec("vllm") is None:
        return _WithoutVLLM.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def methods_of_tests() -> Iterator[None]:
    """Recipes may name the methods that only these tests know."""
    with registered():
        yield


def save_tiny(folder: Path, **shape: int) -> Path:
    """Save a random model that takes no time, without a tokenizer."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY.to_dict() | shape)).save_pretrained(folder)
    return folder


def oracle_of(folder: Path) -> Oracle:
    """The reference, with a model of its own: it changes how that attends."""
    from tests.vllm.engine import BLOCK
    from tests.vllm.oracle import Oracle

    return Oracle(AutoModelForCausalLM.from_pretrained(folder).eval(), BLOCK)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> PreTrainedModel:
    """The same model, loaded. It is shared: leave it as it is."""
    return LlamaForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture(scope="session")
def tiny_oracle(tiny: Path) -> Oracle:
    return oracle_of(tiny)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("deep"), num_hidden_layers=DEEP)


@pytest.fixture(scope="session")
def deep_oracle(deep: Path) -> Oracle:
    return oracle_of(deep)


@pytest.fixture(scope="session")
def tiny_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model of two layers, with the embedded model's tokenizer."""
    from tests.vllm.served import save_model

    return save_model(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)
