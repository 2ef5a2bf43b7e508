"""What tasks share that predict the next token of a text: batches and windows, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from training import Batches, Task


class Text(NamedTuple):
    """A training text `[length]` as token numbers, and the held-out parts as windows."""

    tokens: int  # number of distinct tokens
    train: Tensor  # of any integer type
    held_out: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NextToken(Task):
    """Predict the token after each position of windows of a text.

    Args:
        context: tokens in a window.
        batch_size: windows in a batch.
    """

    context: int = 128
    batch_size: int = 64

    def windows(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows `[N, context]` of a text, and the token after each position."""
        count = (len(text) - 1) // self.context
        length = count * self.context
        shape = (count, self.context)
        return text[:length].reshape(shape), text[1 : length + 1].reshape(shape)

    def batches(self, data: Text, generator: torch.Generator) -> Batches:
        """Yield batches of windows at random positions, forever."""
        device = data.train.device
        window = torch.arange(self.context, device=device)
        last = len(data.train) - self.context
        while True:
            starts = torch.randint(last, (self.batch_size, 1), generator=generator, device=device)
            places = starts + window
            yield data.train[places].long(), data.train[places + 1].long()

    def held_out(self, data: Text) -> dict[str, tuple[Tensor, Tensor]]:
        return data.held_out
