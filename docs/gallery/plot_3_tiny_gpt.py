"""
A tiny GPT
==========

A transformer of two blocks learns to continue the text of Python's own help pages, character by
character. Its layers are followed by attention, ReLU and residual additions. LocoProp-S in closed form
gives each of them a direction, and Muon makes the step.
"""

import time
from collections.abc import Callable
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

text = "\n".join(topics[name] for name in sorted(topics))[:200_000]
characters = sorted(set(text))
tokens = torch.tensor([characters.index(character) for character in text])
training, held_out = tokens[:180_000], tokens[180_000:]
WIDTH, CONTEXT, HEADS = 64, 32, 4

# %%
# The model
# ---------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(self.up(self.norm2(x)).relu())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(characters), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(characters))

    def forward(self, index: Tensor) -> Tensor:
        x = self.token(index) + self.position.weight[: index.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# %%
# Three optimizers
# ----------------
# Muon takes the matrices of the blocks, and AdamW everything else. LocoProp takes the two of them
# as they are, in ``outer=``. In the layers that ``layers=`` names it replaces the gradient ``G`` by
# the solution of the local problem, ``G (C + λI)⁻¹`` with ``C`` a running average of the inputs'
# second moment.


def muon_and_adamw(model: GPT) -> list[Optimizer]:
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Muon(matrices, lr=0.03, momentum=0.9, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        AdamW(others, lr=0.01),
    ]


def locoprop(model: GPT) -> list[Optimizer]:
    return [
        LocoProp(
            model,
            lr=1.0,
            gamma=1.0,
            variant="locoprop-s",
            solver=Exact(decay=0.9, every=5, damping=1.0),
            local_reduction="mean",
            layers="blocks.*",
            apply="gradient",
            outer=muon_and_adamw(model),
        )
    ]


def adamw(model: GPT) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01)]


def train(
    make: Callable[[GPT], list[Optimizer]], steps: int = 150
) -> tuple[GPT, list[float], float]:
    torch.manual_seed(0)
    model = GPT()
    optimizers = make(model)
    schedules = [
        LambdaLR(each, lambda n: min((n + 1) / (0.05 * steps), (1 - n / steps) / 0.95))
        for each in optimizers
    ]
    draw, losses, began = torch.Generator().manual_seed(1), [], time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(0, len(training) - CONTEXT, (16, 1), generator=draw)
        loss = loss_of(model, training[starts + torch.arange(CONTEXT + 1)])
        loss.backward()
        for each in optimizers + schedules:
            each.step()
        for each in optimizers:
            each.zero_grad()
        losses.append(loss.item())
    return model, losses, time.perf_counter() - began


runs = {
    "LocoProp-S under Muon": train(locoprop),
    "Muon and AdamW": train(muon_and_adamw),
    "AdamW": train(adamw),
}

# %%
# What came of it
# ---------------
# **Muon makes the difference here, not the local problem.** The closed form under Muon is level
# with Muon alone, which takes less time; both are well ahead of AdamW. AdamW and Muon have the best
# of four learning rates each (for Muon, 0.06 is level with 0.03). LocoProp-S has Muon's rate;
# dampings of 0.3 and 3 are level with 1.

print(f"{'':<21}   train  held out  seconds")
for name, (model, losses, seconds) in runs.items():
    with torch.no_grad():
        test = loss_of(model, held_out[: 600 * (CONTEXT + 1)].view(-1, CONTEXT + 1)).item()
    print(f"{name:<21}  {sum(losses[-20:]) / 20:6.3f}  {test:8.3f}  {seconds:7.1f}")

figure, axis = plt.subplots(figsize=(7, 4))
for name, (_, losses, _) in runs.items():
    smooth = torch.tensor(losses).unfold(0, 10, 1).mean(1)
    axis.plot(range(10, len(losses) + 1), smooth, label=name)
axis.set(xlabel="step", ylabel="loss, mean of ten batches")
axis.legend()
figure.tight_layout()

# %%
# A sample, drawn one character at a time:

model = runs["LocoProp-S under Muon"][0]
torch.manual_seed(0)
written = training[:CONTEXT].tolist()
with torch.no_grad():
    for _ in range(300):
        logits = model(torch.tensor([written[-CONTEXT:]]))[0, -1]
        written.append(int(torch.multinomial((1.5 * logits).softmax(0), 1)))
print("".join(characters[index] for index in written[CONTEXT:]))
