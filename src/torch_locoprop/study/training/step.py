"""One training step on a device: as it stands or, where nothing in it waits, replayed as a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.fast.cuda_streams import as_gradients_come
from torch_locoprop.study.models.autoencoder import reconstruction_loss

EAGER_STEPS = 3  # before the capture: states come into being, and libraries choose their kernels


class TrainingStep:
    """Forward, backward and optimizer on rows of the images.

    On a GPU the whole step is captured once and replayed if the optimizer allows. The learning rates
    then live on the device, and every batch has the size of the first.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, images: Tensor) -> None:
        self._model, self._optimizer, self._images = model, optimizer, images
        self._captures = getattr(optimizer, "capturable", False) and images.is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: Tensor | None = None
        self._taken = 0

    def set_rates(self, rates: list[float]) -> None:
        """The learning rate of each group from now on."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if not self._captures:
                group["lr"] = rate
            elif isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = torch.tensor(rate, device=self._images.device)

    def __call__(self, rows: Tensor) -> None:
        """Take a step on ``images[rows]``."""
        if not self._captures or (self._rows is not None and len(rows) != len(self._rows)):
            self._step(self._images[rows])
            return
        if self._rows is None:
            self._rows = rows.clone()
        self._rows.copy_(rows)
        if self._graph is not None:
            self._graph.replay()
        elif self._taken < EAGER_STEPS:
            self._on_side_stream()
        else:
            self._graph = torch.cuda.CUDAGraph()
            # Ahead of the layers' own streams: what they wait for comes first.
            urgent = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self._graph, stream=urgent):
                self._step(self._images[self._rows])
            self._graph.replay()
        self._taken += 1

    def _step(self, images: Tensor) -> None:
        with as_gradients_come():
            loss = reconstruction_loss(self._model(images), images)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _on_side_stream(self) -> None:
        """Capture requires that the same work has run on a stream that is not the default one."""
        assert self._rows is not None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(self._images[self._rows])
        torch.cuda.current_stream().wait_stream(stream)
