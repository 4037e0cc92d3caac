from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from keepset import models
from tests.paged.methods import registered

if TYPE_CHECKING:
    from tests.vllm.oracle import Oracle


LAYERS = 3
TEXT, WORDS = 4096, 1344
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=2048,
    initializer_range=0.2,  # so that attention has its favourites, and logits a clear first
)


class _WithoutVLLM(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("vLLM is not installed: pip install 'keepset[vllm]', see the README", allow_module_level=True)


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


@pytest.fixture(scope="session")
def text(embedded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> list[int]:
    """The tokens of a long text."""
    from keepset import texts

    return embedded[1](texts.essay(), verbose=False)["input_ids"][:TEXT]


@pytest.fixture(scope="session")
def words(text: list[int]) -> list[int]:
    """The tokens that it has, each once, and some others."""
    return list(dict.fromkeys([*text, *range(WORDS)]))[:WORDS]


@pytest.fixture(scope="session")
def essay(text: list[int], words: list[int]) -> list[int]:
    """The text as the shallow model reads it, whose vocabulary these are."""
    numbers = {word: number for number, word in enumerate(words)}
    return [numbers[token] for token in text]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The reference, with a model of its own: it changes how that attends."""
    from tests.vllm.engine import BLOCK
    from tests.vllm.oracle import Oracle

    return Oracle(models.load()[0], BLOCK)


@pytest.fixture(scope="session")
def shallow(words: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the embedded model's first layers and of one text's words: for tests that are not about models.

    All layers take ten times as long, and all words, at each step, longer than these layers.
    """
    model = models.load()[0]
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.config.layer_types = None
    embeddings = model.get_input_embeddings().weight.data[words]
    model.resize_token_embeddings(len(words))
    model.get_input_embeddings().weight.data = embeddings
    folder = tmp_path_factory.mktemp("shallow")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shallow_model(shallow: Path) -> PreTrainedModel:
    """The same model, loaded. It is shared: leave it as it is."""
    return LlamaForCausalLM.from_pretrained(shallow).eval()


@pytest.fixture(scope="session")
def shallow_oracle(shallow: Path) -> Oracle:
    """The reference of that one."""
    from tests.vllm.engine import BLOCK
    from tests.vllm.oracle import Oracle

    return Oracle(LlamaForCausalLM.from_pretrained(shallow).eval(), BLOCK)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model that takes no time, without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> PreTrainedModel:
    """The same model, loaded. It is shared: leave it as it is."""
    return LlamaForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture(scope="session")
def tiny_oracle(tiny: Path) -> Oracle:
    """The reference of that one."""
    from tests.vllm.engine import BLOCK
    from tests.vllm.oracle import Oracle

    return Oracle(LlamaForCausalLM.from_pretrained(tiny).eval(), BLOCK)


@pytest.fixture(scope="session")
def tiny_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model of two layers, with the embedded model's tokenizer."""
    from tests.vllm.served import save_model

    return save_model(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)
