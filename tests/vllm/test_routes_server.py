"""A server with and without API keys, sent forged and wrong words on every route; see `tests.vllm.forgery`.

Nothing that is forged is done, nothing that is wrong ends a request with an error of the server's or the server itself,
and after each an ordinary request is answered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.forgery import prove

pytestmark = pytest.mark.full


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
def test_nothing_forged_is_done_and_nothing_wrong_ends_the_server(
    keys: bool, tiny_and_tokenizer: Path, tmp_path: Path
) -> None:
    prove(tiny_and_tokenizer, tmp_path, keys, minutes=0.5, seed=1)
