"""Gradients, Gram matrices and small training runs that the tests of functions share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.functional import as_matrix, from_matrix


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def given(*shape: int) -> tuple[Tensor, Tensor]:
    """Return a gradient of this shape and a dense C that fits."""
    x = random(*shape[:-2], 20, shape[-1], seed=1)
    return random(*shape), x.mT @ x


def structured(gram: Tensor, structure: str) -> tuple[Tensor, Tensor]:
    """Return C reduced to a structure, and the same matrix in full."""
    n = gram.shape[-1]
    if structure == "diagonal":
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        return diagonal, torch.diag_embed(diagonal)
    if structure == "block":
        size = n // 3
        parts = [gram[..., i : i + size, i : i + size] for i in range(0, n, size)]
        mask = torch.block_diag(*[torch.ones(size, size)] * 3)
        return torch.stack(parts, -3), gram * mask
    return gram, gram


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()


def train_by_hand(step: Callable[[str, Tensor, Tensor], Tensor]) -> nn.Sequential:
    """Train with ``step(name, grad, gram) -> displacement`` and plain loops over the layers."""
    model = network()
    for seed in range(4):
        x, y = random(9, 5, seed=seed), random(9, 3, seed=seed + 10)
        hidden = torch.tanh(model[0](x)).detach()
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        ones = torch.cat([x, torch.ones(9, 1)], dim=1)
        for layer, rows in ((model[0], ones), (model[2], hidden)):
            bias = None if layer.bias is None else layer.bias.grad
            grad = as_matrix(layer, layer.weight.grad, bias)
            moved, moved_bias = from_matrix(layer, step(str(layer), grad, rows.T @ rows))
            layer.weight.data += moved
            if moved_bias is not None:
                layer.bias.data += moved_bias
    return model


def train_with(**settings: Any) -> nn.Sequential:
    model = network()
    opt = LocoProp(model, **settings)
    for seed in range(4):
        x, y = random(9, 5, seed=seed), random(9, 3, seed=seed + 10)
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    return model


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
