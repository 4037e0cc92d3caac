# First of all: only what is imported of keepset after this line is checked while it runs.
from tests import tiers, typecheck

if tiers.TYPECHECK:
    typecheck.install()

import gc

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepset import models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all tests, with more examples and types checked at run time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not tiers.FULL:
        left_out = tiers.of_full_tier(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """The modules stay: garbage is looked for among what tests make alone, or each look takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer: shared, so leave them as they are."""
    return models.load()
