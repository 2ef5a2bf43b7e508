"""
Writing your own variant
========================

A variant is a target and a local loss. This script writes a local loss that grows quadratically for
small distances and linearly for large ones, and trains an autoencoder with it.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop import LocoProp, Variant
from torch_locoprop.losses import LocalLoss
from torch_locoprop.study.data.curves import curves
from torch_locoprop.targets import GradientDescent
from torch_locoprop.transfers import Tanh, Transfer

# %%
# The local loss
# --------------
# A local loss has two methods. ``residual`` is its gradient in the pre-activation ``a``; the local
# iterations use it. ``value`` is the loss of each row; diagnostics and the gate use it. Both take
# tensors of shape ``[..., rows, features]``.
#
# This one is the log-cosh loss, :math:`D(a, a^*) = \sum_j \log\cosh(a_j - a^*_j)`. Its gradient is
# :math:`\tanh(a - a^*)`, so it is convex, and it needs no transfer.


class LogCosh(LocalLoss):
    uses_transfer = False

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return (a - target).tanh()

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return Tanh().integral(a - target).sum(-1)


# %%
# The target is that of LocoProp-S, :math:`a^* = a - \gamma\,\partial L/\partial a`. With this
# target, one local iteration is a BackProp step, whatever the local loss: the local weight gradient
# at the start is :math:`\gamma` times the gradient that PyTorch has computed.

log_cosh = Variant("log-cosh", GradientDescent(), LogCosh())

# %%
# Is the gradient right?
# ----------------------
# Autograd knows. The residual must be the derivative of the value:

a = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
target = torch.randn(5, 3, dtype=torch.float64)
(derivative,) = torch.autograd.grad(log_cosh.loss.value(a, target, Tanh()).sum(), a)
error = (derivative - log_cosh.loss.residual(a, target, Tanh())).abs().max()
print(f"largest difference to autograd: {error:.1e}")
assert error < 1e-12

# %%
# Training with it
# ----------------
# A variant goes wherever its name would.

images = curves(1000, seed=0)


def train(variant: str | Variant) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 100),
        nn.Tanh(),
        nn.Linear(100, 10),
        nn.Linear(10, 100),
        nn.Tanh(),
        nn.Linear(100, 784),
    )
    optimizer = LocoProp(
        model, lr=3e-4, variant=variant, gamma=100.0, momentum=0.9, output_transfer="sigmoid"
    )
    schedule = LambdaLR(optimizer, lambda n: min((n + 1) / 10, 1 - n / 60))
    losses, shuffle = [], torch.Generator().manual_seed(0)
    for _ in range(6):
        for rows in torch.randperm(1000, generator=shuffle).split(100):
            logits = model(images[rows])
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, images[rows], reduction="sum"
            )
            (loss / len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item() / len(rows))
    return losses


curves_of = {
    "locoprop-s": train("locoprop-s"),
    "locoprop-m": train("locoprop-m"),
    "log-cosh": train(log_cosh),
}

# %%
# What came of it
# ---------------
# All three have the same settings, which were not tuned. With its own matching loss LocoProp-M is
# ahead, and the log-cosh loss is level with the squared one.

for name, losses in curves_of.items():
    print(f"{name:<11} mean loss of the last ten batches: {sum(losses[-10:]) / 10:6.1f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
distance = torch.linspace(-4, 4, 200)
left.plot(distance, distance.square() / 2, label="squared (LocoProp-S)", color="tab:blue")
left.plot(distance, Tanh().integral(distance), label="log-cosh", color="tab:green")
left.set(xlabel="a − a*", ylabel="local loss", ylim=(0, 6))
left.legend()
for name, losses in curves_of.items():
    right.plot(torch.tensor(losses).unfold(0, 10, 1).mean(1), label=name)
right.set(xlabel="step", ylabel="loss, mean of ten batches", ylim=(100, 350))
right.legend()
figure.tight_layout()
