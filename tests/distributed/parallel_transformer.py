"""A small transformer, divided by tensor parallelism, sequence parallelism and ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import AdamW

from torch_locoprop import LocoProp

TOKENS, WIDTH, HEAD = 10, 8, 2  # vocabulary, features, features of a head
BATCH, LENGTH = 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        layers = [nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH, bias=False), nn.Tanh()]
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.embedding(tokens))))
        return out


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def parallel(model: Transformer, mesh: Any, *, sequence: bool) -> Transformer:
    """Apply tensor parallelism, as torchtitan does with Llama.

    Args:
        model: the model.
        mesh: the processes, a mesh of one dimension.
        sequence: divide what is between the layers by positions (sequence parallelism).
    """
    between = Shard(1) if sequence else Replicate()
    enter = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "block.attention": enter,
        "block.attention.q": ColwiseParallel(),
        "block.attention.k": ColwiseParallel(),
        "block.attention.v": ColwiseParallel(),
        "block.attention.o": RowwiseParallel(output_layouts=between),
        "block.mlp": enter,
        "block.mlp.0": ColwiseParallel(),
        "block.mlp.2": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        norms = ("norm", "block.before_attention", "block.before_mlp")
        plan |= {name: SequenceParallel() for name in norms}
    parallelize_module(model, mesh, plan)
    return model


def sharded(model: Transformer, mesh: Any, **options: Any) -> Transformer:
    """Apply ``fully_shard`` to the block and to the rest of the model."""
    fully_shard(model.block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def make_optimizer(model: Transformer, settings: dict[str, Any]) -> LocoProp:
    settings = {"output_transfer": "softmax", **settings}
    return LocoProp(model, fallback=lambda p: AdamW(p, lr=1e-2), **settings)


def train(
    model: Transformer,
    opt: LocoProp,
    part: slice = slice(None),
    replicas: int = 1,
    steps: int = 3,
    skip: int = 0,
) -> None:
    """Take some steps.

    Args:
        model: the model.
        opt: its optimizer.
        part: this process's sequences of each batch.
        replicas: number of processes whose gradients ``fully_shard`` averages.
        steps: number of steps.
        skip: number of batches to leave out first.
    """
    numbers = torch.Generator().manual_seed(1)
    for step in range(skip + steps):
        batch = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=numbers)[part]
        if step < skip:
            continue
        batch = batch.to(model.head.weight.device)
        out = model(batch[:, :-1])
        loss = cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        (replicas * loss / (BATCH * LENGTH)).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, gathered from all processes if they are divided."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }
