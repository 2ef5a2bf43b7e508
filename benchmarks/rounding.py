"""Train LocoProp-S on a CPU with the factors of matrix products rounded to TF32, and print its loss.

    python -m benchmarks.rounding --data-dir DATA --rounded network iterations bias --off 1

The task is the standard tanh autoencoder on MNIST for three epochs, with the schedule of the study's
timing runs, in which the learning rate jumps from zero to half its peak. A run takes three minutes.
`--off SEED` changes the initial weights by a random relative amount of 1e-4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.figures.timings import timing_config
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.runner import run

METHOD, SETTINGS = "locoprop-s", {"lr": 2e-5, "gamma": 100.0}  # close to the largest stable values
OFF = 1e-4  # relative change of each initial weight
LOST = 13  # bits of the mantissa that float32 has and TF32 has not

# The operations that compute each kind of product, for large layers on a CPU.
PRODUCTS = {
    "network": (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "square": (torch.ops.aten.mm.out,),
    "iterations": (torch.ops.mkldnn._linear_pointwise.default,),
    "bias": (),  # the column of the iterations' products that is the gradient of the biases
}


class Rounded(TorchDispatchMode):
    """Inside this context, the factors of some matrix products are reduced to TF32.

    Factors are rounded to nearest, as cuBLAS does; those of local iterations are rounded towards zero,
    as the Triton kernels do.

    Args:
        which: keys of `PRODUCTS`.
    """

    def __init__(self, which: Collection[str]) -> None:
        super().__init__()
        self._which = [operation for name in which for operation in PRODUCTS[name]]
        self._bias = "bias" in which

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._which:
            return func(*args, **(kwargs or {}))
        first = 1 if func is torch.ops.aten.addmm.default else 0
        cut = func in PRODUCTS["iterations"]
        left, right = args[first : first + 2]
        factors = [to_tf32(factor, cut) for factor in (left, right)]
        found = func(*args[:first], *factors, *args[first + 2 :], **(kwargs or {}))
        if cut and not self._bias:
            column = int(right.diagonal().nonzero().max())  # of the bias: later columns are padding
            found[:, column] = left @ right[column]
        return found


def to_tf32(tensor: Tensor, cut: bool = False) -> Tensor:
    """Round float32 numbers to the nearest TF32 numbers, or towards zero if `cut` is True."""
    digits = tensor.contiguous().view(torch.int32)
    if not cut:
        digits = digits + 2 ** (LOST - 1)
    return (digits >> LOST << LOST).view(torch.float32)


def method(off: int | None) -> str:
    """Return the name of the method; with a seed, of one that first changes the initial weights."""
    own = methods.get(METHOD)
    if off is None:
        return own.name
    name = f"{own.name}-off-{off}"

    def build(model: nn.Module, settings: Any) -> Optimizer:
        numbers = torch.Generator().manual_seed(off)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + OFF * torch.randn(p.shape, generator=numbers))
        return own.build(model, settings)

    if name not in methods.names():
        methods.register(replace(own, name=name, build=build))
    return name


def losses(data: Dataset, rounded: Collection[str], off: int | None, **task: Any) -> list[float]:
    """Train and return the training loss after each epoch.

    Args:
        data: training and test images.
        rounded: keys of `PRODUCTS`.
        off: seed of the change of the initial weights; None: no change.
        task: settings of `RunConfig`.
    """
    whole = RunConfig(method(off), SETTINGS, dataset=data.name, **task)
    config = timing_config(whole, len(data.train))
    with tempfile.TemporaryDirectory() as folder, Rounded(rounded):
        result = run(config, Path(folder) / "run", data=data)
    return [row.train_loss for row in result.metrics[1:]]


def main() -> None:
    """Parse the arguments, train and print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with the files of MNIST")
    parser.add_argument(
        "--rounded",
        nargs="*",
        choices=PRODUCTS,
        default=[],
        help="products with rounded factors",
    )
    parser.add_argument("--off", type=int, metavar="SEED", help="change the initial weights")
    options = parser.parse_args()
    if "bias" in options.rounded and "iterations" not in options.rounded:
        parser.error("bias is a part of the iterations' products: use --rounded iterations bias")
    torch.set_num_threads(1)
    found = losses(datasets.load("mnist", options.data_dir), options.rounded, options.off)
    rounded = " ".join(options.rounded) or "nothing"
    print(f"rounded: {rounded}, off: {options.off}:", *(f"{loss:.2f}" for loss in found))


if __name__ == "__main__":
    main()
