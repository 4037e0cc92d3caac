from typing import Any

import pytest
from transformers import AutoTokenizer

from keepset import models


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded model's, without the model."""
    return AutoTokenizer.from_pretrained(models.embedded_folder())
