"""CUDA graphs on a CPU: a list of operations that, like a graph, knows addresses only.

Whatever the library forgot to copy to a fixed place, or did on the host, shows in a replay.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_locoprop.fast import cuda_graph


class Operations(TorchDispatchMode):
    """Notes every operation with the very tensors it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host looked at a number, as no stream that records permits")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.noted.append((func, args, kwargs, result))
        return result


class Emulated:
    """In place of ``cuda_graph.Recording``; it takes the step while recording it."""

    made = 0
    replayed = 0
    recording = False

    def __init__(self, work: Callable[[], Any], priority: int = 0) -> None:
        Emulated.recording, random = True, torch.get_rng_state()
        try:
            with Operations() as operations:
                self.result = work()
        except BaseException:
            torch.set_rng_state(random)  # a graph that was not recorded has drawn no numbers
            raise
        finally:
            Emulated.recording = False
        Emulated.made += 1
        self._operations = operations.noted
        self._taken = True

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again; autograd sees no replay of a CUDA graph, so versions stay."""
        if self._taken:
            self._taken = False
            return
        Emulated.replayed += 1
        for func, args, kwargs, result in self._operations:
            touched = tuple(t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
            with torch.autograd._unsafe_preserve_version_counter(touched):
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU record and replay work as a GPU does."""
    monkeypatch.setattr(Emulated, "made", 0)
    monkeypatch.setattr(Emulated, "replayed", 0)
    monkeypatch.setattr(cuda_graph, "DEVICE_TYPES", ("cuda", "cpu"))
    monkeypatch.setattr(cuda_graph, "Recording", Emulated)
    monkeypatch.setattr(cuda_graph, "is_recording", lambda: Emulated.recording)
    monkeypatch.setattr(cuda_graph, "can_record", lambda device: not Emulated.recording)
    monkeypatch.setattr(cuda_graph, "_on_side_stream", lambda work: work())
