"""Steps of a population that are replayed as a CUDA graph, and run eagerly where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from torch_locoprop.fast.dispatch import graphs

EAGER = 2
"""First steps that run eagerly: states are made in them, and libraries are loaded."""


class RecordedSteps:
    """Repeats a step: eagerly at first, then as a CUDA graph where the device has them.

    Attributes:
        failure: the message of the error if the recording has failed. All later steps run eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._repeated = graphs.Repeated[None](EAGER)
        self.failure: str | None = None

    def __call__(self, step: Callable[[], None]) -> None:
        """Take a step.

        Args:
            step: reads and writes the same tensors in every call, once the first one has made them.
        """
        if self.failure is not None or not graphs.can_record(self._device):
            step()
            return
        records = self._repeated.will_record
        try:
            self._repeated(step)
        except RuntimeError as error:
            if not records or self._repeated.is_recorded:  # an eager step failed, or a replay
                raise
            self.failure = str(error)
        if self.failure is not None:
            warnings.warn(
                f"The CUDA graph of a population's step was not recorded: {self.failure}\n"
                "All steps of this population run eagerly, which takes longer.",
                RuntimeWarning,
                stacklevel=2,
            )
            step()  # a recording runs no part of it, also if it fails
