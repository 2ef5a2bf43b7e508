"""The model changes after the first step, from which transfers are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.recording.transfer_assignment import CHANGED_LATER, USED_ELSEWHERE
from torch_locoprop.stepping import layer_optimizer

M: dict[str, Any] = {
    "variant": "locoprop-m",
    "lr": 0.02,
    "gamma": 3.0,
    "output_transfer": "sigmoid",
}
X, Y = batch(8, 6), batch(8, 3, seed=2)


def step(model: nn.Module, opt: LocoProp) -> None:
    cross_entropy(model(X), Y).backward()
    opt.step()
    opt.zero_grad()


@contextmanager
def never_again() -> Iterator[None]:
    with patch.object(layer_optimizer, "_SEARCH_AGAIN", frozenset()):
        yield


class Annealed(nn.Module):
    """A layer before a leaky ReLU whose slope the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.slope = nn.Linear(6, 5), nn.Linear(5, 3), 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.leaky_relu(self.body(x), self.slope))  # type: ignore[no-any-return]


def test_a_transfer_that_changes_gives_way_to_locoprop_s() -> None:
    model = Annealed().double()
    opt = LocoProp(model, **M)
    for number in range(12):
        model.slope = 0.3 if number < 5 else 0.1
        if number == 11:
            start = model.state_dict()
            twin = Annealed().double()
            twin.load_state_dict(start)
            twin.slope = 0.1
            plain = LocoProp(twin, **{**M, "variant": "locoprop-s"})
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                plain.state[q].update({key: e.clone() for key, e in opt.state[p].items()})
            plain.param_groups[0]["steps"] = 11
            plain.param_groups[0]["state_of"] = opt.param_groups[0]["state_of"]
            step(twin, plain)
        step(model, opt)
        body, head = opt._layers
        assert (body.note == CHANGED_LATER) == (number >= 10)
        assert head.transfer is not None
    assert CHANGED_LATER in opt.summary()
    assert_close(weights(model)[:2], weights(twin)[:2])


def test_a_weight_that_is_used_elsewhere_later() -> None:
    class Sometimes(Annealed):
        twice = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out + x @ self.body.weight.mT[:, :3] if self.twice else out

    model = Sometimes().double()
    opt = LocoProp(model, **M)
    for number in range(12):
        model.twice = number > 3
        step(model, opt)
        assert (opt._layers[0].obstacle == USED_ELSEWHERE) == (number >= 10)


class Normalized(nn.Module):
    """A model whose first layer has another transfer in ``eval()``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(torch.tanh(h) if self.training else torch.relu(h))  # type: ignore[no-any-return]


def test_a_first_step_in_eval_mode() -> None:
    model = Normalized().double().eval()
    opt = LocoProp(model, **M)
    for number in range(12):
        step(model, opt)
        assert (opt._layers[0].note == CHANGED_LATER) == (number >= 10)
        model.train()


@pytest.mark.parametrize(
    "settings", [M, {**M, "variant": "pocoprop-m"}, {}, {**M, "transfers": {"0": "relu"}}]
)
def test_models_that_stay_are_not_changed(settings: dict[str, Any]) -> None:
    """Nor is what they compute, to the last bit."""
    found = []
    for again in (True, False):
        model = network()
        opt = LocoProp(model, **settings)
        notes = []
        for _ in range(13):
            if again:
                step(model, opt)
            else:
                with never_again():
                    step(model, opt)
            notes.append([(layer.transfer, layer.note, layer.obstacle) for layer in opt._layers])
        assert all(each == notes[0] for each in notes)
        found.append(weights(model))
    assert_close(*found, 0.0)


def test_calls_that_are_checkpointed_later_are_not_taken_for_other_transfers() -> None:
    class Twice(Annealed):
        again = False

        def part(self, x: Tensor) -> Tensor:
            return F.leaky_relu(self.body(x), self.slope)

        def forward(self, x: Tensor) -> Tensor:
            other = checkpoint(self.part, x, use_reentrant=True) if self.again else self.part(x)
            return self.head(self.part(x) + other)  # type: ignore[no-any-return]

    model = Twice().double()
    opt = LocoProp(model, **M)
    for number in range(12):
        model.again = number > 8
        cross_entropy(model(X.clone().requires_grad_()), Y).backward()
        opt.step()
        opt.zero_grad()
        assert opt._layers[0].transfer is not None
        assert not opt._layers[0].note
