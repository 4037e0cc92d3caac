"""How keepset learns from either model runner of vLLM how long prompts are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keepset import KeepsetError
from tests.vllm.late import Late

compat = Late("keepset.vllm.compat")


class OnDevice:
    """A tensor on a GPU, which the host waits for."""

    device = torch.device("cuda")
    waits = 0

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __getitem__(self, rows: slice) -> OnDevice:
        return OnDevice(self.values[rows])

    def tolist(self) -> list[int]:
        OnDevice.waits += 1
        return self.values


def metadata(lengths: Any, rows: int, at_prompt: list[bool], requests: list[int] | None = None) -> Any:
    return SimpleNamespace(
        rswa_prefix_lens=lengths,
        num_reqs=rows,
        is_prefilling=torch.tensor(at_prompt),
        req_idx=None if requests is None else np.array(requests),
    )


def test_runner_v1_has_them_on_the_host() -> None:
    prompts = compat.PromptLengths()
    assert prompts.of(metadata(torch.tensor([7, 9, 5]), 2, [True, False])).tolist() == [7, 9]
    assert prompts.of(metadata(torch.tensor([0, 0]), 2, [False, False])).tolist() == [0, 0]


def test_runner_v2_is_waited_for_at_prompts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnDevice, "waits", 0)
    prompts = compat.PromptLengths()
    assert prompts.of(metadata(OnDevice([7, 9]), 2, [True, True], [3, 0])).tolist() == [7, 9]
    # Decoding, in another order, and without one of them.
    for requests, lengths in (([3, 0], [7, 9]), ([0, 3], [9, 7]), ([0], [9])):
        assert prompts.of(metadata(OnDevice(lengths), len(requests), [False] * 2, requests)).tolist() == lengths
    assert OnDevice.waits == 1
    # Another request took the place of one that ended, so it is at its prompt.
    assert prompts.of(metadata(OnDevice([9, 4]), 2, [False, True], [0, 3])).tolist() == [9, 4]
    assert prompts.of(metadata(OnDevice([4, 9]), 2, [False, False], [3, 0])).tolist() == [4, 9]
    assert OnDevice.waits == 2


def test_rows_without_a_prompt() -> None:
    """Runner V2 says how many rows fill a graph's batch up, and nothing of them besides; and it has dummy runs."""
    for lengths in (torch.tensor([7, 9]), OnDevice([7, 9])):
        assert compat.PromptLengths().of(metadata(lengths, 4, [False, False], [3, 0])).tolist() == [7, 9, 0, 0]
    assert compat.PromptLengths().of(metadata(None, 3, [False] * 3, [0, 1, 2])).tolist() == [0, 0, 0]
    with pytest.raises(KeepsetError, match="does not give prompt lengths"):
        compat.PromptLengths().of(metadata(None, 2, [False, True], [0, 1]))
