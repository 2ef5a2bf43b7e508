"""Factorisations of many matrices at a time, on a GPU in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from torch_locoprop.baselines.shampoo import inverse_root
from torch_locoprop.paper.closed_form import eigh
from torch_locoprop.paper.fisher import cholesky

THREADS = 8
"""Host threads, each with a CUDA stream, that share the factorisations of a step."""

CHUNK = 3
"""Members whose matrices one thread factorises at a time."""


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of positive definite matrices; NaN where there is none."""
    return torch.cholesky_inverse(cholesky(matrix))


def inverse_fourth_root(matrix: Tensor, eps: Tensor) -> Tensor:
    """Return ``(M + eps λ_max I)^(−1/4)``."""
    return inverse_root(matrix, 4, eps)  # type: ignore[arg-type]  # one number for each member


def eigenbasis(matrix: Tensor) -> Tensor:
    """Return the eigenvectors, the largest eigenvalue first."""
    return eigh(matrix)[1].flip(-1)


def q(matrix: Tensor) -> Tensor:
    """Return the orthogonal factor of a QR decomposition."""
    factor: Tensor = torch.linalg.qr(matrix)[0]
    return factor


class _Streams(threading.local):
    """A CUDA stream for each thread."""

    every: ClassVar[list[torch.cuda.Stream]] = []

    def __init__(self) -> None:
        self.own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.every.append(self.own)


_POOL: list[tuple[ThreadPoolExecutor, _Streams]] = []


def in_threads(
    function: Callable[..., Tensor], arguments: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    """Apply a function of ``[k, n, n]`` matrices to each tuple; on a GPU in several threads.

    A factorisation of one matrix leaves most of a GPU idle, and the library functions loop over a
    batch. Threads on separate streams overlap the loops. Returns tensors like the first of each tuple.
    """
    if not arguments[0][0].is_cuda:
        return [function(*each) for each in arguments]
    return _on_streams(function, arguments)


def _on_streams(
    function: Callable[..., Tensor], arguments: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    results = [torch.empty_like(each[0]) for each in arguments]
    if not _POOL:
        torch.backends.cuda.preferred_linalg_library("cusolver")  # cuSOLVER has a handle per thread
        function(*(part[:1] for part in arguments[0]))  # the library is loaded by one thread
        _POOL.append((ThreadPoolExecutor(THREADS), _Streams()))
    pool, streams = _POOL[0]
    caller = torch.cuda.current_stream()
    before = caller.record_event()

    def work(place: Tensor, parts: tuple[Tensor, ...]) -> None:
        with torch.cuda.stream(streams.own):
            streams.own.wait_event(before)
            place.copy_(function(*parts))

    tasks = [
        (place, parts)
        for result, each in zip(results, arguments, strict=True)
        for place, *parts in zip(
            torch.split(result, CHUNK), *(torch.split(t, CHUNK) for t in each), strict=True
        )
    ]
    tasks.sort(key=lambda task: -task[0].shape[-1])  # the longest first
    list(pool.map(lambda task: work(task[0], tuple(task[1])), tasks))
    for stream in streams.every:
        caller.wait_stream(stream)
    return results
