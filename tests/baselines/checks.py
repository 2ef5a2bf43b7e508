"""The training loop of the baselines' tests, and checks that hold for every baseline."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[nn.Module], Optimizer]


def backward(model: nn.Module, seed: int = 1, rows: int = 7) -> Tensor:
    """Run forward and backward on one batch and return the loss."""
    x = batch(rows, 6, seed=seed)
    loss = cross_entropy(model(x), x[:, :3])
    loss.backward()
    return loss.detach()


def train(model: nn.Module, opt: Optimizer, steps: range, set_to_none: bool = True) -> list[Tensor]:
    """Train on four batches in turn and return the losses."""
    losses = []
    for step in steps:
        losses.append(backward(model, seed=step % 4))
        opt.step()
        opt.zero_grad(set_to_none)
    return losses


def saved_and_loaded(model: nn.Module, opt: Optimizer) -> Any:
    """Return the state dicts of model and optimizer, written and read with torch's defaults."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    return torch.load(file)  # weights_only=True is the default: tensors, numbers, strings


def check_resumes(make: Make, other: Make, before: int, after: int, **options: bool) -> None:
    """Check that a run resumed from a state dict is bit-identical to an uninterrupted run.

    Args:
        make: makes the optimizer of the run.
        other: makes the optimizer that loads the state dict, with other settings.
        before: steps before the state dict is saved.
        after: steps after it.
        options: options of `train`.
    """
    model = network()
    opt = make(model)
    train(model, opt, range(before), **options)
    saved = saved_and_loaded(model, opt)
    train(model, opt, range(before, before + after), **options)

    resumed = network(seed=7)
    loaded = other(resumed)
    resumed.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["opt"])
    train(resumed, loaded, range(before, before + after), **options)
    assert_close(weights(model), weights(resumed), 0.0)


def check_learns(make: Make) -> None:
    """Check that 60 steps on a small autoencoder beat those of SGD at its best of four rates."""
    rates = (0.1, 0.3, 1.0, 3.0)
    plain = min(
        loss_after_60_steps(lambda model, lr=lr: torch.optim.SGD(model.parameters(), lr=lr))
        for lr in rates
    )
    assert loss_after_60_steps(make) < 0.9 * plain < 5.0


def loss_after_60_steps(make: Make) -> float:
    """Return the loss of a small autoencoder, 8.53 at the start, after 60 steps on one batch."""
    model = network(sizes=(12, 8, 3, 8, 12))
    opt = make(model)
    x = (batch(64, 12) < batch(64, 1, seed=2)).double()
    for _ in range(60):
        cross_entropy(model(x), x).backward()
        opt.step()
        opt.zero_grad()
    return cross_entropy(model(x), x).item()
