"""
Reading diagnostics
===================

With ``diagnose=True`` every step is measured layer by layer. This script looks at a run that goes well
and at one whose learning rate is too large.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.study.data.curves import curves

images = curves(1000, seed=0)
Measured = dict[str, list[dict[str, float]]]


def train(lr: float, gate: bool = False) -> tuple[LocoProp, list[float], Measured]:
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
        model,
        lr=lr,
        gamma=10.0,
        momentum=0.9,
        output_transfer="sigmoid",
        gate=gate,
        diagnose=True,
    )
    losses: list[float] = []
    measured: Measured = {}
    for rows in torch.randperm(1000).repeat(4).split(100):
        logits = model(images[rows])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, images[rows], reduction="sum")
        (loss / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / len(rows))
        for layer in optimizer.diagnostics():
            measured.setdefault(layer.layer, []).append(layer.scalars())
    return optimizer, losses, measured


# %%
# A run that goes well
# --------------------
# ``print(optimizer.diagnostics())`` is a table of the last step:

good, good_losses, good_measured = train(lr=3e-4)
print(good.diagnostics())

# %%
# - **before, after, change**: the local loss at the start of the step and at its solution. The
#   change should be below zero. The loss of LocoProp-M leaves out a constant of the target, so it
#   may be negative.
# - **BackProp**: the change that a BackProp step would have made instead. The local iterations are
#   worth their time where ``change`` is well below it.
# - **‖Δ‖/‖W‖**: how far the layer moved, relative to its weight.
# - **cosine**: between the step and BackProp's. At 1 the iterations have changed only the length.
# - **gate, cap, skip**: in how many steps so far the layer took the BackProp step because its local
#   loss rose, was shortened by ``cap=``, or kept its weights because the solution was not finite.
#
# A run whose rate is too large
# -----------------------------
# At ten times that learning rate, local losses rise in many steps: the solver overshoots.

bad, bad_losses, bad_measured = train(lr=3e-3)
print(bad.diagnostics())
for name, rows in bad_measured.items():
    rises = sum(each["local_loss"] > 0 for each in rows)
    print(f"layer {name}: the local loss rose in {rises} of {len(rows)} steps")

# %%
# ``gate=True`` replaces the solutions whose local loss has risen by BackProp steps, and counts
# them. That limits the damage. The cure is a smaller learning rate.

gated, gated_losses, _ = train(lr=3e-3, gate=True)
print(gated.diagnostics())

# %%
named = {"lr=3e-4": good_losses, "lr=3e-3": bad_losses, "lr=3e-3, gate=True": gated_losses}
print("mean loss of the last ten batches")
for name, losses in named.items():
    print(f"{name:<18} {sum(losses[-10:]) / 10:6.1f}")

# %%
# The picture shows the first two runs: the loss, and for each layer the change of its local loss
# and the length of its step.

figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharex=True, sharey="col")
pairs = (("lr = 3e-4", good_losses, good_measured), ("lr = 3e-3", bad_losses, bad_measured))
for (loss_axis, change_axis, length_axis), (title, losses, measured) in zip(
    axes, pairs, strict=True
):
    loss_axis.plot(losses, color="black")
    loss_axis.set(ylabel=f"{title}\nloss")
    for name, rows in measured.items():
        change_axis.plot([each["local_loss"] for each in rows], label=f"layer {name}")
        length_axis.plot([each["displacement"] for each in rows])
    change_axis.axhline(0, color="gray", linewidth=0.5)
    change_axis.set_yscale("symlog", linthresh=1.0)
    change_axis.set_ylabel("change of the local loss")
    length_axis.set(ylabel="‖Δ‖/‖W‖", yscale="log")
for axis in axes[1]:
    axis.set_xlabel("step")
axes[0, 1].legend(fontsize=7)
figure.tight_layout()
