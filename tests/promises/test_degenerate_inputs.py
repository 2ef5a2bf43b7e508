"""Inputs without rank, of zeros or of tiny sizes, in float32: every optimizer stays finite.

Products that cannot be negative, roots and quotients round the wrong way first where matrices have no
inverse. Weights have to stay finite, and to move where there is a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import batch, network, weights
from promises.optimizer_cases import ALL, Case
from torch import Tensor

from torch_locoprop import LocoProp, baselines

CLIPPED = Case(
    *("kfac-clipped", baselines.KFAC),
    {"output_transfer": "sigmoid", "clip": 1e-3, "damping": 1e-14},
    takes_model=True,
)

INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: 0 * x,
    "one row": lambda x: x[:1],
    "equal rows": lambda x: x[:1].expand(8, -1).clone(),
    "equal columns": lambda x: x[:, :1].expand(-1, 6).clone(),
    "dead columns": lambda x: x * torch.tensor([1.0, 0, 0, 1, 0, 0]),
    "tiny": lambda x: 1e-20 * x,
    "subnormal": lambda x: 1e-40 * x,
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("case", [*ALL, CLIPPED], ids=str)
@pytest.mark.filterwarnings("ignore:In the first step")
def test_weights_stay_finite_and_move(case: Case, name: str) -> None:
    model = network("relu").float()
    opt = case.make(model)
    x = INPUTS[name](batch(8, 6).float())
    start = weights(model)
    for _ in range(3):
        opt.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), torch.full((len(x), 3), 0.9)).backward()
        opt.step()
    for p in model.parameters():
        assert p.isfinite().all()
    assert not torch.equal(weights(model)[-1], start[-1])  # the last bias has a gradient
    if isinstance(opt, LocoProp):
        assert not any(opt.skipped_updates.values())
