"""lm-evaluation-harness, which takes many seconds to import: a test that needs it imports it itself."""

import importlib.util

import pytest

WITH_HARNESS = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "jieba", "fuzzywuzzy", "rouge")),
    reason='pip install "keepset[eval]"',
)
