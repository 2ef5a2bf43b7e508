"""The peak memory of a piece of work: counted by CUDA on a GPU, and here on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are created within this context, until they are freed.

    Views of a tensor are not counted again. Temporary memory within an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {_storage(each)._cdata for each in _tensors((args, kwargs))}
        for tensor in _tensors(outputs):
            storage = _storage(tensor)
            if storage._cdata not in given | self._live:
                self._add(storage)
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Return the peak memory of the work in bytes, beyond what was allocated before."""
    if device == "cuda":
        gc.collect()  # else garbage of earlier work may be freed during the measurement
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before: int = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated()
        return peak - before
    count = LiveBytes()
    with count:
        work()
    return count.peak


def _tensors(nested: Any) -> list[Tensor]:
    return [each for each in tree_leaves(nested) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
