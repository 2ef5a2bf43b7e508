"""ProxProp's recursion, as its authors state it, gives the ``proxprop`` step."""

from __future__ import annotations

import torch
from cases import assert_close, batch, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp


def loss_of(y_hat: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (y_hat - y).square().sum() / len(y)


def test_the_authors_recursion_gives_our_step() -> None:
    """Updated activations flow backwards layer by layer; each weight solves its proximal problem.

    Biases are left out, as in the paper. The output layer's own step is ηγ, the step that one local
    iteration of any variant takes.
    """
    eta, tau = 0.3, 0.7
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 4, bias=False),
        nn.Tanh(),
        nn.Linear(4, 4, bias=False),
        nn.Tanh(),
        nn.Linear(4, 3, bias=False),
    ).double()
    x, y = batch(6, 5), batch(6, 3, seed=2)
    w1, w2, w3 = weights(model)

    # forward
    a1 = x @ w1.mT
    y1 = a1.tanh()
    a2 = y1 @ w2.mT
    y2 = a2.tanh()
    # ŷ⁺ of the layer before the last, by gradient descent on the loss
    last = y2.clone().requires_grad_()
    w_last = w3.clone().requires_grad_()
    gradient_y2, gradient_w3 = torch.autograd.grad(loss_of(last @ w_last.mT, y), (last, w_last))
    y2_plus = y2 - tau * gradient_y2
    # â⁺ and ŷ⁺ of the layers below, each from the one above
    a2_plus = a2 - (1 - a2.tanh() ** 2) * (a2.tanh() - y2_plus)
    point = y1.clone().requires_grad_()
    (pull,) = torch.autograd.grad(0.5 * (point @ w2.mT - a2_plus).square().sum(), point)
    y1_plus = y1 - pull
    a1_plus = a1 - (1 - a1.tanh() ** 2) * (a1.tanh() - y1_plus)

    def proximal(rows: Tensor, target: Tensor, w: Tensor) -> Tensor:
        """argmin ½‖X W̃ᵀ − target‖² + ‖W̃ − W‖²/2η, by its normal equations."""
        system = rows.mT @ rows + torch.eye(rows.shape[1], dtype=rows.dtype) / eta
        return torch.linalg.solve(system, rows.mT @ target + w.mT / eta).mT

    expected = [proximal(x, a1_plus, w1), proximal(y1, a2_plus, w2), w3 - eta * tau * gradient_w3]

    opt = LocoProp(model, lr=eta, gamma=tau, variant="proxprop", solver="exact")
    loss_of(model(x), y).backward()
    opt.step()
    assert_close(weights(model), expected, 1e-12)
    assert "output layer: plain gradient descent" in opt.summary()


def test_without_the_output_rule_it_is_locoprop_s() -> None:
    results = {}
    for variant in ("proxprop", "locoprop-s"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        opt = LocoProp(model, lr=0.1, gamma=0.7, variant=variant, solver="momentum", momentum=0.5)
        for step in range(3):
            loss_of(model(batch(6, 5, seed=step)), batch(6, 3, seed=9)).backward()
            opt.step()
            opt.zero_grad()
            if step == 0:
                results[variant] = weights(model)
    assert_close(results["proxprop"][:2], results["locoprop-s"][:2])
    assert (results["proxprop"][2] - results["locoprop-s"][2]).abs().max() > 1e-4
