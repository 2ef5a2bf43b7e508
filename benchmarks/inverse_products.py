"""How precise the product with the inverse in a spectral step has to be, and what it costs on a GPU.

    python -m benchmarks.inverse_products --model standard --steps 200 --out inverse-products.json
    python -m benchmarks.inverse_products --device cuda --precision tf32 --model wide --steps 300

An autoencoder of the study is trained on MNIST with `preset="spectral"`. For each large layer the
product of its average gradient with its inverse is then computed in several ways, and the polar factor
behind it. Errors are Frobenius norms relative to float64: of the product; of the polar factor of that
product, itself in float64; and of the polar factor in bfloat16, as steps compute it. In the row `exact`
the product is in float64, so that the error is that of bfloat16 alone.

`3 x bf16` is the product of `fast/cuda_spectral.py`. `3 x tf32` and `3 x fp16` split the factors in the
same way into matrices of these dtypes, and `tf32` is one product. On a CPU the factors are rounded as a
GPU rounds them, and products are in float32; nothing is timed.

    python -m benchmarks.inverse_products --device cuda --precision tf32 --model wide --whole

times whole steps and `opt.step()` with each of these products instead, beside torch's Muon.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.clock import milliseconds
from benchmarks.contestants import Task
from benchmarks.options import add_options
from benchmarks.steps import compared
from torch_locoprop import LocoProp
from torch_locoprop.fast import cuda_spectral
from torch_locoprop.paper import spectral
from torch_locoprop.paper.gram import full_products, products_in
from torch_locoprop.study.data import datasets
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss

BATCH = 1000
LARGE = 100_000  # weights of a layer from which on it is measured
TF32 = -(2**13)  # the bits of a float32 that TF32 has: all but 13 of the mantissa
RATE = {"standard": 0.015, "deep": 0.005, "wide": 0.006}


of_the_step = cuda_spectral.product  # `whole_steps` replaces it


class Rounded(TorchDispatchMode):
    """Rounds as a GPU does: factors to TF32, or results of factors in bfloat16 to bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.mm.dtype, aten.addmm.dtype):
            *start, left, right, _ = args
            return sum(start, left.float() @ right.float())
        if func not in (aten.mm.default, aten.addmm.default):
            return func(*args, **kwargs)
        if args[0].dtype == torch.bfloat16:
            wide = tuple(t.float() for t in args)
            return func(*wide, **kwargs).bfloat16()
        return func(*args[:-2], *map(_in_tf32, args[-2:]), **kwargs)


def _in_tf32(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int32).bitwise_and(TF32).view(torch.float32)


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in float32."""
    with full_products(left):
        return left @ right


def in_tf32(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in TF32."""
    found = _tf32_product(cuda_spectral.padded(left), cuda_spectral.padded(right))
    return found[: left.shape[0], : right.shape[1]]


def three_in_tf32(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of three products in TF32, whose factors have 22 digits together."""
    one, other = cuda_spectral.padded(left), cuda_spectral.padded(right)
    coarse, other_coarse = _in_tf32(one), _in_tf32(other)
    found = _tf32_product(coarse, other - other_coarse) + _tf32_product(one - coarse, other_coarse)
    return (found + _tf32_product(coarse, other_coarse))[: left.shape[0], : right.shape[1]]


def _tf32_product(left: Tensor, right: Tensor) -> Tensor:
    with products_in("tf32", left), nullcontext() if left.is_cuda else Rounded():
        return left @ right


def three_in_float16(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of three products in float16, whose factors are scaled into its range."""
    (a, a_fine, scale), (b, b_fine, other) = map(_halves, (left, right))
    if left.is_cuda:
        small = torch.mm(a, b_fine, out_dtype=torch.float32)
        small = torch.addmm(small, a_fine, b, out_dtype=torch.float32)
        found = torch.addmm(small, a, b, out_dtype=torch.float32, beta=2**-11)
    else:
        a, a_fine, b, b_fine = (t.float() for t in (a, a_fine, b, b_fine))
        found = (a @ b_fine + a_fine @ b) * 2**-11 + a @ b
    return found[: left.shape[0], : right.shape[1]] * (scale * other)


def three_in_bfloat16(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of the spectral step on a GPU."""
    with nullcontext() if left.is_cuda else Rounded():
        return of_the_step(left, right)


def _halves(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.linalg.vector_norm(matrix, ord=torch.inf)
    scaled = cuda_spectral.padded(matrix) / scale
    coarse = scaled.half()
    return coarse, ((scaled - coarse) * 2**11).half(), scale


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32": in_float32,
    "3 x tf32": three_in_tf32,
    "3 x fp16": three_in_float16,
    "3 x bf16": three_in_bfloat16,
    "tf32": in_tf32,
}


def trained(options: argparse.Namespace) -> tuple[nn.Module, LocoProp]:
    """Train the model for some steps and return it with its optimizer."""
    images = datasets.load("mnist").train.to(options.device)
    torch.manual_seed(0)
    model = architectures.build(options.model).to(options.device)
    lr = RATE.get(options.model, 0.015)
    optimizer = LocoProp(model, preset="spectral", output_transfer="sigmoid", lr=lr)
    for step in range(options.steps):
        rows = torch.randint(len(images), (BATCH,), generator=torch.Generator().manual_seed(step))
        batch = images[rows.to(images.device)]
        loss = reconstruction_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"train loss of the last batch: {loss.item():.1f}", flush=True)
    return model, optimizer


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the expected matrix."""
    return float(f"{(found.double() - expected).norm() / expected.norm():.3g}")


def polar_in_bf16(matrix: Tensor) -> Tensor:
    """Return the polar factor with products in bfloat16."""
    with nullcontext() if matrix.is_cuda else Rounded():
        return spectral.polar(matrix.float(), torch.bfloat16)


def of_layer(average: Tensor, inverse: Tensor) -> dict[str, Any]:
    """Return errors and milliseconds of each product for one layer."""
    exact = average.double() @ inverse.double()
    factor = spectral.polar(exact)
    rows = {"exact": {"product": 0.0, "polar": 0.0, "bf16": error(polar_in_bf16(exact), factor)}}
    for name, multiply in PRODUCTS.items():
        try:
            found = multiply(average, inverse)[: exact.shape[0], : exact.shape[1]]
        except RuntimeError as missing:  # this version of torch lacks such products
            print(f"  {name}: {missing}")
            continue
        rows[name] = {
            "product": error(found, exact),
            "polar": error(spectral.polar(found.double()), factor),
            "bf16": error(polar_in_bf16(found), factor),
        }
        if found.is_cuda:
            for _ in range(3):
                multiply(average, inverse)
            rows[name]["ms"] = round(
                milliseconds(lambda run=multiply: run(average, inverse), 20, "cuda"), 4
            )
    return {"shape": list(average.shape), "rows": rows}


def whole_steps(model: str) -> dict[str, Any]:
    """Return the measurements of steps with each product, and of Muon before and after them."""
    task, rounds, steps = Task(model, BATCH, device="cuda"), 3, 20
    found: dict[str, Any] = {"muon": asdict(compared(task, ["muon"], rounds, steps)[0])}
    for name, multiply in PRODUCTS.items():
        with patch.object(cuda_spectral, "product", multiply):
            try:
                found[name] = asdict(compared(task, ["locoprop-spectral"], rounds, steps)[0])
            except RuntimeError as missing:  # this version of torch lacks such products
                print(f"{name}: {missing}")
    found["muon again"] = asdict(compared(task, ["muon"], rounds, steps)[0])
    base = found["muon"]["optimizer_ms"], found["muon again"]["optimizer_ms"]
    for name, row in found.items():
        ratio = row["optimizer_ms"] / (sum(base) / 2)
        graph = f"{row['graph_ms']:.2f}" if row["graph_ms"] else "-"
        print(
            f"{name:10} opt.step() {row['optimizer_ms']:.2f} ms, {ratio:.2f} x Muon; graph {graph}"
        )
    return found


def main() -> None:
    """Measure all large layers, print the rows and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="standard")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument("--whole", action="store_true", help="time whole steps on a GPU")
    add_options(parser, "device", "threads", "out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with matmul_precision(options.precision):
        content: dict[str, Any] = {
            "command": f"python -m benchmarks.inverse_products --model {options.model}",
            "environment": environment(options.device),
        }
        if options.whole:
            content |= {"command": content["command"] + " --whole"}
            content |= {"whole": whole_steps(options.model)}
        else:
            content |= {"steps": options.steps, "layers": of_layers(options)}
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def of_layers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the model, measure all large layers and print their rows."""
    layers: list[dict[str, Any]] = []
    model, optimizer = trained(options)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear) or layer.weight.numel() < LARGE:
            continue
        state = optimizer.state[layer.weight]
        layers.append(of_layer(state["average"], state["inverse"]))
        print(layers[-1]["shape"], flush=True)
        for name, row in layers[-1]["rows"].items():
            print(f"  {name:9}", *(f"{key} {value:.2g}" for key, value in row.items()), flush=True)
    return layers


if __name__ == "__main__":
    main()
