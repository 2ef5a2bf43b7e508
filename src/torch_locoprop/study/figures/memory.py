"""How much memory a piece of work holds at a time: the device's own count, or on the CPU ours."""

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
    """Counts the bytes of tensors that come into being while it is on, until they are gone.

    A tensor's memory counts once, however many views it has. What an operation takes and gives back
    within itself is not seen.
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
    """Return the most memory that the work holds at a time beyond what was held before it."""
    if device == "cuda":
        gc.collect()  # what earlier work left in cycles is not freed in the middle of this one
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
