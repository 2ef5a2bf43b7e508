"""The map of a dense matrix for every combination of leading dimensions."""

from __future__ import annotations

import pytest
import torch
from cases import batch

from torch_locoprop.paper.linear_map import Dense


@pytest.mark.parametrize("of_weight", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("of_x", [(), (2,), (3, 2)], ids=str)
def test_leading_dimensions_broadcast(of_x: tuple[int, ...], of_weight: tuple[int, ...]) -> None:
    """Members may share their inputs or their weights; ``a_ri = Σ_j x_rj w_ij + b_i``."""
    x, weight, bias = batch(*of_x, 4, 5), batch(*of_weight, 3, 5, seed=2), batch(*of_weight, 3)
    products = (x.unsqueeze(-2) * weight.unsqueeze(-3)).sum(-1)
    torch.testing.assert_close(Dense().forward(x, weight), products)
    found = Dense().forward(x, weight, bias)
    torch.testing.assert_close(found, products + bias.unsqueeze(-2))
