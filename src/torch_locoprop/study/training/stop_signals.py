"""Signals that stop a run: Ctrl-C (SIGINT) and the polite kill (SIGTERM).

A run defers both signals until it has saved a checkpoint; the command turns SIGTERM into an exception,
as Python does with Ctrl-C. How a run continues from its checkpoint is in ``runner``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, as KeyboardInterrupt is raised for Ctrl-C."""


class StopRequest:
    """The signal that arrived in a context of this module, if any."""

    def __init__(self) -> None:
        self.number: int | None = None

    @property
    def is_set(self) -> bool:
        """True after a signal has arrived."""
        return self.number is not None


@contextmanager
def deferred_signals(*, again_at_once: bool = True) -> Iterator[StopRequest]:
    """Note Ctrl-C and SIGTERM within this context, and raise them again at its end.

    Signals that the process ignores stay ignored. Outside of the main thread, which alone receives
    signals, the context changes nothing.

    Args:
        again_at_once: A second signal raises KeyboardInterrupt at once. Under ``torchrun`` it must not:
            a process may get one signal from the terminal and another from ``torchrun``, and the other
            processes wait for it.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.is_set and again_at_once:
            raise KeyboardInterrupt
        request.number = number

    before = _install(dict.fromkeys(STOPPING, note))
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if request.number is not None:
            signal.raise_signal(request.number)


@contextmanager
def terminations_raised() -> Iterator[StopRequest]:
    """Raise ``Terminated`` for SIGTERM within this context; yields whether that has happened."""
    request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        request.number = number
        raise Terminated

    before = _install({signal.SIGTERM: stop})
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(handlers: dict[signal.Signals, Handler]) -> dict[signal.Signals, Any]:
    """Install handlers of signals that are not ignored; return the handlers they replace."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in handlers}
    # None is a handler that was not installed by Python and could not be restored.
    before = {n: old for n, old in found.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handlers[number])
    return before
