# First of all: only what is imported after this line is checked while it runs.
from tests import typecheck

typecheck.install()

import pytest  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerBase  # noqa: E402

from keepset import models  # noqa: E402


@pytest.fixture(scope="session")
def embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer: shared, so leave them as they are."""
    return models.load()
