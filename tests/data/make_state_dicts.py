"""Writes ``state_dicts_VERSION.pt``: what our optimizers save in this version, and how they go on.

Later versions have to load the file, or to refuse it with a sentence. Run it once for each release::

    PYTHONPATH=src:tests python tests/data/make_state_dicts.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from cases import batch, cross_entropy, network, weights
from promises.optimizer_cases import ALL, Case
from torch import nn
from torch.optim import Optimizer

import torch_locoprop


def train(model: nn.Module, opt: Optimizer, steps: range) -> None:
    """Take a step with each of these batches."""
    for seed in steps:
        x = batch(8, 6, seed=seed)
        opt.zero_grad()
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()


def saved(case: Case) -> dict[str, Any]:
    """Return the states of model and optimizer after three steps, and the weights after five."""
    model = network()
    opt = case.make(model)
    train(model, opt, range(3))
    states = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    states = copy.deepcopy(states)
    train(model, opt, range(3, 5))
    return {**states, "weights after two more steps": weights(model)}


def main() -> None:
    file = Path(__file__).with_name(f"state_dicts_{torch_locoprop.__version__}.pt")
    torch.save({case.name: saved(case) for case in ALL}, file)


if __name__ == "__main__":
    main()
