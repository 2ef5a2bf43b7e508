"""Models and training loops for tests of ``fully_shard``, for one process or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.solvers import SOLVERS, Exact, FirstOrder, Spectral

STEPS, ROWS = 3, 24


class OwnSgd(FirstOrder):
    """A solver of the user's, of which nothing is known."""

    name = "own"
    step = SOLVERS["sgd"].step  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """A model, its settings, and what is special about the loop."""

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    order: str = ""  # what is special about the loop
    shards: str = "blocks"  # how fully_shard is applied
    batches: str = "even"
    worlds: tuple[int, ...] = (3,)


def outer(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=1e-2)


M = {"variant": "locoprop-m", "lr": 1e-3, "gamma": 2.0, "local_steps": 4}
S = {**M, "variant": "locoprop-s"}
EXACT_M = {"variant": "locoprop-m", "lr": 1e-3, "gamma": 2.0, "solver": "exact"}
EXACT = {**EXACT_M, "variant": "locoprop-s"}
SPECTRAL: dict[str, Any] = {"preset": "spectral"}
AVERAGED: dict[str, Any] = {"solver": "preconditioned-averaged"}
DEFAULT: dict[str, Any] = {}
BLOCKS = {"gram": "block", "block_size": 4}
ALL = (2, 3, 4)
GROUPED = nn.Conv1d, (4, 4, 3), {"groups": 2}
TRANSPOSED = nn.ConvTranspose1d, (4, 4, 1), {}

CASES = {
    "M": Case(M, worlds=ALL),
    "S": Case(S, worlds=ALL),
    "closed form": Case(EXACT, worlds=ALL),
    "default": Case(DEFAULT, worlds=ALL),
    "spectral": Case(SPECTRAL, worlds=ALL),
    "S in blocks": Case({**S, **BLOCKS}),
    "closed form in blocks": Case({**EXACT, **BLOCKS}, batches="uneven"),
    "running closed form in blocks": Case({**EXACT, **BLOCKS, "solver": Exact(0.9, 2, 0.1)}),
    "mean of S, diagonal": Case({**S, "local_reduction": "mean", "gram": "diagonal"}),
    "spectral in blocks": Case({**SPECTRAL, **BLOCKS}, worlds=ALL),
    "default, diagonal": Case({"gram": "diagonal"}, "convolution", worlds=(4,)),
    "closed form of M": Case(EXACT_M, worlds=(4,)),
    "running closed form": Case({**EXACT, "solver": Exact(0.9, 2, 0.1)}),
    "running closed form of M": Case({**EXACT_M, "solver": Exact(0.9, 2, 0.1)}, worlds=(4,)),
    "preconditioned": Case({"solver": "preconditioned", "lr": 0.5}),
    "averaged": Case(AVERAGED, worlds=ALL),
    "averaged, S": Case({**AVERAGED, "variant": "locoprop-s"}),
    "averaged, softmax": Case({**AVERAGED, "output_transfer": "softmax"}),
    "averaged, frozen bias": Case(AVERAGED, order="frozen bias"),
    "averaged, convolution": Case(AVERAGED, "convolution"),
    "averaged, uneven": Case(AVERAGED, batches="uneven"),
    "spectral with agreement": Case({"solver": Spectral(agreement=1.0)}, worlds=(4,)),
    "momentum": Case({**M, "solver": "adam", "regularizer": "l2"}),
    "mean": Case({**M, "local_reduction": "mean"}),
    "mean of S": Case({**S, "local_reduction": "mean"}),
    "gate and cap": Case({**M, "lr": 0.5, "gate": True, "cap": 0.01}),
    "gate of S": Case({**S, "lr": 0.5, "gate": True}),
    "weight decay": Case({**SPECTRAL, "weight_decay": 0.1}),
    "maximize": Case({**S, "maximize": True}),
    "every second": Case({**M, "every": 2}),
    "solver of the user's": Case({**S, "solver": OwnSgd()}),
    "outer": Case({**M, "apply": "gradient", "outer": outer}),
    "outer, capped": Case({**S, "apply": "gradient", "outer": outer, "cap": 1e-3}),
    "softmax": Case({**M, "output_transfer": "softmax"}, worlds=(2, 4)),
    "softmax, closed form": Case({**EXACT_M, "output_transfer": "softmax"}),
    "convolution, M": Case(M, "convolution", worlds=(2, 4)),
    "convolution, S": Case(S, "convolution"),
    "convolution, default": Case(DEFAULT, "convolution"),
    "convolution, closed form of M": Case(EXACT_M, "convolution", worlds=(4,)),
    "grouped convolution": Case(M, "grouped"),
    "transposed convolution": Case(SPECTRAL, "transposed"),
    "whole model": Case(M, shards="whole", worlds=(2,)),
    "not resharded": Case(SPECTRAL, shards="not resharded"),
    "not resharded after the backward pass": Case(M, order="unsharded", worlds=(2,)),
    "accumulated": Case(M, order="accumulated"),
    "accumulated without sync": Case(M, order="without sync"),
    "accumulated, default": Case(DEFAULT, order="without sync", worlds=(2,)),
    "clipped": Case(SPECTRAL, order="clipped"),
    "clipped, M": Case(M, order="clipped", worlds=(2,)),
    "frozen layer": Case(M, order="frozen layer"),
    "frozen bias": Case(SPECTRAL, order="frozen bias"),
    "frozen bias of M": Case({**M, "weight_decay": 0.1}, order="frozen bias"),
    "checkpointed": Case(M, "checkpointed", worlds=(2,)),
    "zero_grad late": Case(S, order="zero_grad late", worlds=(2,)),
    "discarded": Case(M, order="discarded", worlds=(2, 3)),
    "discarded, default": Case(DEFAULT, order="discarded"),
    "scaled between passes": Case(M, order="scaled between passes", worlds=(2, 3)),
    "uneven": Case(M, batches="uneven"),
    "uneven, S": Case(S, batches="uneven"),
    "uneven, default": Case(DEFAULT, batches="uneven", worlds=(4,)),
    "uneven, convolution": Case(M, "convolution", batches="uneven"),
}


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=False))


def network(kind: str) -> nn.Sequential:
    """Return a model of 6 inputs and 6 outputs; one of its layers has two outputs."""
    torch.manual_seed(0)
    if kind == "smooth":  # without the norm of two features, which magnifies rounding
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    first: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh()]
    if kind == "convolution":
        first = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten()]
        first += [nn.Linear(18, 8, bias=False), nn.Tanh()]
    elif kind in ("grouped", "transposed"):
        layer = nn.Conv1d(4, 4, 3, groups=2) if kind == "grouped" else nn.ConvTranspose1d(4, 2, 2)
        first = [nn.Linear(6, 24), nn.Tanh(), nn.Unflatten(1, (4, 6)), layer, nn.Tanh()]
        first += [nn.Flatten(), nn.Linear(16 if kind == "grouped" else 14, 8), nn.Tanh()]
    rest = [nn.Linear(8, 2), nn.Tanh(), nn.LayerNorm(2), nn.Linear(2, 6)]
    return (Checkpointed if kind == "checkpointed" else nn.Sequential)(*first, *rest).double()


def sharded(case: Case, model: nn.Sequential, **options: Any) -> nn.Sequential:
    """Apply ``fully_shard`` to the model, and to its layers if the case says so."""
    if case.shards == "not resharded":
        options["reshard_after_forward"] = False
    if case.shards != "whole":
        for module in model:
            if any(True for _ in module.parameters()):
                fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def batch_bounds(case: Case, rank: int, world: int) -> slice:
    """Return which rows of a batch a process has."""
    if case.batches == "uneven":
        bounds = [0, 13, *(13 + 3 * i for i in range(1, world))][: world + 1]
        bounds[-1] = ROWS
        return slice(bounds[rank], bounds[rank + 1])
    share = ROWS // world
    return slice(rank * share, (rank + 1) * share)


def loss_of(case: Case, out: Tensor, x: Tensor) -> Tensor:
    """Return the loss of some rows as their share in the mean over all rows."""
    if case.settings.get("output_transfer") == "softmax":
        return cross_entropy(out, x.argmax(-1), reduction="sum") / ROWS
    return binary_cross_entropy_with_logits(out, x, reduction="sum") / ROWS / 6


def make_optimizer(case: Case, model: nn.Module) -> LocoProp:
    settings = {"output_transfer": "sigmoid", **case.settings}
    return LocoProp(model, fallback=lambda p: AdamW(p, lr=1e-2), **settings)


def train(
    case: Case, model: nn.Sequential, part: slice = slice(None), world: int = 1, steps: int = STEPS,
    opt: LocoProp | None = None, skip: int = 0,
) -> LocoProp:  # fmt: skip
    """Take some steps on a part of every batch, and return the optimizer.

    Args:
        case: the case.
        model: the model, sharded or not.
        part: this process's rows of each batch.
        world: the number of processes.
        steps: the number of steps.
        opt: the optimizer; None makes a new one.
        skip: number of batches to leave out first.
    """
    if case.order == "frozen layer":
        model[0].requires_grad_(False)
    if case.order == "frozen bias":
        model[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    opt = make_optimizer(case, model) if opt is None else opt
    numbers = torch.Generator().manual_seed(1)
    several = ("accumulated", "without sync", "unsharded", "scaled between passes")
    passes = 2 if case.order in several else 1
    whole: Any = model
    like = next(model.parameters())
    for step in range(skip + steps):
        batch = torch.rand(ROWS, 6, generator=numbers).to(like.device, like.dtype)
        if step < skip:
            continue
        if case.order == "discarded":  # by code that does not know the optimizer
            other = 1 - batch[part]
            (world * loss_of(case, model(other), other)).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=False)
        for i in range(passes):  # each with the same rows, however many processes share them
            x, last = batch[part][i::passes], i == passes - 1
            if world > 1 and case.order == "without sync":
                whole.set_requires_gradient_sync(last)
            if world > 1 and case.order == "unsharded":
                whole.set_reshard_after_backward(False)
            (world * loss_of(case, model(x), x)).backward()  # type: ignore[no-untyped-call]
            if case.order == "scaled between passes" and not last:
                for p in model.parameters():
                    p.grad.mul_(0.5)  # type: ignore[union-attr]
        if case.order == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        opt.step()
        if case.order == "unsharded" and world > 1:
            whole.reshard()
            for module in model:
                if hasattr(module, "reshard"):
                    module.reshard()
        if case.order != "zero_grad late" or step % 2:
            opt.zero_grad()
        else:
            model.zero_grad(set_to_none=False)
    return opt


def whole_tensors(model: nn.Module) -> list[Tensor]:
    """Return all parameters, gathered from all processes if they are sharded."""
    return [_whole(p) for p in model.parameters()]


def _whole(p: Any) -> Tensor:
    found: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return found.detach().clone()


Worker = Callable[..., None]
