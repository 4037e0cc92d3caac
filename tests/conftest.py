# First of all: only what is imported after this line is checked while it runs.
from jaxtyping import install_import_hook

install_import_hook("keepset", "tests.typecheck.check")

import pytest  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerBase  # noqa: E402

from keepset import models  # noqa: E402


@pytest.fixture(scope="session")
def embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer: shared, so leave them as they are."""
    return models.load()
