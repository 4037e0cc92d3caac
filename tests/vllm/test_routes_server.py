"""A server with and without API keys, sent forged and wrong words on every route; see `tests.vllm.forgery`.

Nothing that is forged is done, nothing that is wrong ends a request with an error of the server's or the server itself,
and after each an ordinary request is answered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine import SPARING
from tests.vllm.forgery import prove
from tests.vllm.test_soak import tiny_and_tokenizer

pytestmark = pytest.mark.full

__all__ = ["tiny_and_tokenizer"]


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
def test_nothing_forged_is_done_and_nothing_wrong_ends_the_server(
    keys: bool, tiny_and_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SPARING.items():
        monkeypatch.setenv(name, value)
    prove(tiny_and_tokenizer, tmp_path, keys, minutes=0.5, seed=1)
