from typing import Any

import pytest
from transformers import AutoTokenizer

from keepset.lab.embedded import embedded_folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded model's, without the model."""
    return AutoTokenizer.from_pretrained(embedded_folder())
