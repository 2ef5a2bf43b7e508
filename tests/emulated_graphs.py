"""CUDA graphs on a CPU: a list of operations that, like a graph, knows addresses only.

Whatever the library forgot to copy to a fixed place, or did on the host, shows in a replay. As on a
GPU, a recording changes nothing: what its operations have overwritten is put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_locoprop.fast import cuda_graph
from torch_locoprop.layers.base import is_distributed


class Operations(TorchDispatchMode):
    """Notes every operation with the very tensors it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Callable[[], object]] = []
        self._overwritten: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # with contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host looked at a number, as no stream that records permits")
        if "c10d" in func.namespace:
            raise RuntimeError("a collective was called inside of a recording")
        kwargs = kwargs or {}
        if any(is_distributed(t) for t in _tensors((args, kwargs))):
            return NotImplemented  # its parts come here
        self._keep_overwritten(func, args, kwargs)
        result = func(*args, **kwargs)
        self.noted.append(partial(_repeat, func, args, kwargs, result))
        return result

    def _keep_overwritten(self, func: Any, args: Any, kwargs: Any) -> None:
        arguments = func._schema.arguments
        given = chain(
            zip(arguments, args, strict=False), ((a, kwargs.get(a.name)) for a in arguments)
        )
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_written |= argument.name.startswith("running_")  # of native_batch_norm
            for tensor in _tensors(value) if is_written else ():
                storage = tensor.untyped_storage()
                if storage.nbytes() > 0 and storage.data_ptr() not in self._overwritten:
                    self._overwritten[storage.data_ptr()] = storage, storage.clone()

    def undo(self) -> None:
        """Put back what the operations have overwritten."""
        for storage, contents in self._overwritten.values():
            storage.copy_(contents)


class NothingFromHost(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers: a recording cannot copy them to a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if of_numbers and kwargs.get("device") is not None:
            raise RuntimeError("a number was copied from the host, as no recording permits")
        return func(*args, **kwargs)


def _tensors(values: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run an operation again; autograd sees no replay of a CUDA graph, so versions stay."""
    touched = _tensors((args, kwargs, result))
    with torch.autograd._unsafe_preserve_version_counter(touched):
        again = func(*args, **kwargs)
        for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def collectives_in(recording: Any) -> int:
    """Return how often a recording, emulated or not, calls what ``cuda_graph.outside`` got."""
    names = [getattr(part, "func", part) for part in recording._parts]
    return sum(each is not _repeat and getattr(each, "__name__", "") != "replay" for each in names)


class Emulated:
    """In place of ``cuda_graph.Recording``."""

    made = 0
    replayed = 0  # without the first replay of each recording, which belongs to the recording step
    thread = threading.local()

    def __init__(self, work: Callable[[], Any], priority: int = 0) -> None:
        random, operations = torch.get_rng_state(), Operations()
        self.replays = 0
        self._parts = operations.noted
        Emulated.thread.recording = True
        try:
            with cuda_graph.split_by(self._parts.append), operations, NothingFromHost():
                self.result = work()
        finally:
            Emulated.thread.recording = False
            operations.undo()
            torch.set_rng_state(random)
        Emulated.made += 1

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again, and what ``cuda_graph.outside`` got between them."""
        Emulated.replayed += self.replays > 0
        self.replays += 1
        for part in self._parts:
            part()


def is_recording() -> bool:
    """Return True while this thread records."""
    return getattr(Emulated.thread, "recording", False)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU record and replay work as a GPU does."""
    monkeypatch.setattr(Emulated, "made", 0)
    monkeypatch.setattr(Emulated, "replayed", 0)
    monkeypatch.setattr(cuda_graph, "DEVICE_TYPES", ("cuda", "cpu"))
    monkeypatch.setattr(cuda_graph, "Recording", Emulated)
    monkeypatch.setattr(cuda_graph, "is_recording", is_recording)
    monkeypatch.setattr(cuda_graph, "can_record", lambda device: not is_recording())
    monkeypatch.setattr(cuda_graph, "_on_side_stream", lambda work: work())
