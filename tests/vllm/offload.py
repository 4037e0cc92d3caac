"""A store for vLLM's `OffloadingConnector` in the memory of a CPU engine, where vLLM has none.

It copies as late as it may, so that whoever writes to a page too early is found out.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LOAD, STORE = 3, 20
"""Steps after which a copy is made that nobody waits for."""


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return _Worker([block.tensor for block in kv_caches.tensors], self.num_chunks)


class _Worker(OffloadingWorker):
    def __init__(self, tensors: list[torch.Tensor], chunks: int) -> None:
        self._pages = tensors
        self._stored = [torch.zeros(chunks, tensor.shape[1], dtype=torch.int8) for tensor in tensors]
        self._waiting: dict[int, tuple[bool, Any, Any, int]] = {}
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._waiting[job_id] = True, src_spec.block_ids, dst_spec.block_ids, STORE
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._waiting[job_id] = False, dst_spec.block_ids, src_spec.block_ids, LOAD
        return True

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._waiting.keys():
            self._copy(job)

    def get_finished(self) -> list[TransferResult]:
        for job, (stores, pages, chunks, steps) in list(self._waiting.items()):
            self._waiting[job] = stores, pages, chunks, steps - 1
            if steps == 0:
                self._copy(job)
        done, self._done = self._done, []
        return [TransferResult(job_id=job, success=True) for job in done]

    def _copy(self, job: int) -> None:
        stores, pages, chunks, _ = self._waiting.pop(job)
        for own, stored in zip(self._pages, self._stored, strict=True):
            if stores:
                stored[torch.from_numpy(chunks)] = own[torch.from_numpy(pages)]
            else:
                own[torch.from_numpy(pages)] = stored[torch.from_numpy(chunks)]
        self._done.append(job)
