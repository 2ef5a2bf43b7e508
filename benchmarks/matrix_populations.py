"""Time steps and renewals of populations of matrices: Muon, SOAP, K-FAC and others (needs torch alone).

    python -m benchmarks.matrix_populations --models standard deep --out matrix-populations.json
    python -m benchmarks.matrix_populations --models wide --methods soap --steps 20

K members train as in the study, with and without a CUDA graph, from the same weights on the same
images, and their losses are compared. Steps contain what the method renews every k steps. What SOAP and
K-FAC renew is timed by itself too, in two ways: by the library, in threads, and by products of stacked
matrices.

Images are random numbers, with pixels that are always zero as in the data sets of the study.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import step_table
from benchmarks.clock import milliseconds
from benchmarks.options import add_options
from torch_locoprop.baselines.kfac import EARLY
from torch_locoprop.paper.fisher import cholesky
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.factorisations import in_threads, q
from torch_locoprop.study.training.matrix_population import Training
from torch_locoprop.study.training.stacked_factors import inverse, of_stacks, orthogonal_factor

WARM_UP = EARLY + 2  # K-FAC's early renewals, and the recording
RATE = 0.1  # of the learning rate of each method
BATCHES = 4


def row(model: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one method on one model."""
    own = methods.get(method).equal_budgets
    strict = options.device == "cpu" or (own is not None and own.strict)
    base = {"model": model, "device": options.device, "batch_size": options.batch}
    config = RunConfig(method, precision="fp32" if strict else "tf32", **base)
    lr = config.settings["lr"]
    configs = [
        RunConfig(method, {"lr": lr / (k + 1)}, precision=config.precision, **base)
        for k in range(options.members)
    ]
    found: dict[str, Any] = {"model": model, "method": method, "precision": config.precision}
    with torch.no_grad(), matmul_precision(config.precision):
        (early, late), ms, training = trained(configs, True, options)
        found |= {"graph_ms": ms, "failure": training.recorded.failure}
        (eager_early, eager_late), ms, training = trained(configs, False, options)
        found |= {"eager_ms": ms, "losses": late, "eager_losses": eager_late}
        found["early_difference"] = difference(early, eager_early)
        found["difference"] = difference(late, eager_late)
        found |= renewals(training.update.states, options)
    return found


def trained(
    configs: Sequence[RunConfig], graph: bool, options: argparse.Namespace
) -> tuple[list[list[float]], float, Training]:
    """Train all members.

    Returns:
        The losses after the first steps and after the last one, the milliseconds of a step in between,
        and the population.
    """
    training = Training(configs, images(configs[0]))
    if not graph:
        training.recorded = lambda step: step()  # type: ignore[assignment]
    numbers = torch.Generator().manual_seed(1)
    order = torch.randperm(BATCHES * options.batch, generator=numbers).to(options.device)
    batches = order.split(options.batch)

    def step() -> None:
        training.take_step(batches[training.update.steps % BATCHES], RATE)

    losses = []
    for _ in range(WARM_UP):
        step()
    losses.append(training._losses(training.train).tolist())
    ms = milliseconds(step, options.steps, options.device)
    losses.append(training._losses(training.train).tolist())
    return losses, ms, training


def images(config: RunConfig) -> Dataset:
    """Return random images, a tenth of whose pixels are always zero."""
    numbers = torch.Generator().manual_seed(0)
    pixels = architectures.sizes_of(config.model)[0]
    found = torch.rand(BATCHES * config.batch_size, pixels, generator=numbers)
    found[:, ::10] = 0.0
    return Dataset("random", found, found[:1], "random numbers")


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def renewals(states: list[Tensors], options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds and errors of a renewal by the library and by stacked products."""
    if "left_basis" in states[0]:
        names = [(side, f"{side}_basis") for side in ("left", "right")]
        pairs = [(state[side] @ state[own], state[own]) for state in states for side, own in names]
        return {
            **timed("library", in_threads, q, [each[:1] for each in pairs], options),
            **timed("stacked", of_stacks, orthogonal_factor, pairs, options),
        }
    if "inverse_inputs" in states[0]:
        factors = [(damped(s[name]),) for s in states for name in ("inputs", "gradients")]
        return {
            **timed("library", in_threads, by_cholesky, factors, options),
            **timed("stacked", of_stacks, inverse, factors, options),
        }
    return {}


def timed(
    name: str,
    apply: Callable[..., list[Tensor]],
    function: Callable[..., Tensor],
    arguments: Sequence[tuple[Tensor, ...]],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the milliseconds of a function of all matrices, and the largest entry of its error.

    The error is that of QᵀQ = I, or of M M⁻¹ = I.
    """
    worst = 0.0
    for found, (matrix, *_) in zip(apply(function, arguments), arguments, strict=True):
        other = matrix if function in (by_cholesky, inverse) else found.mT
        product = other.double() @ found.double()
        eye = torch.eye(found.shape[-1], dtype=product.dtype, device=found.device)
        worst = max(worst, (product - eye).abs().amax().item())
    ms = milliseconds(lambda: apply(function, arguments), options.renewals, options.device)
    return {f"{name}_ms": ms, f"{name}_error": worst}


def damped(matrix: Tensor) -> Tensor:
    """Return a matrix with a hundredth of its mean diagonal added to its diagonal."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return matrix + 0.01 * mean * torch.eye(matrix.shape[-1], device=matrix.device)


def by_cholesky(matrix: Tensor) -> Tensor:
    """Return the inverse as the study computes it on a CPU."""
    return torch.cholesky_inverse(cholesky(matrix))


def markdown(content: dict[str, Any]) -> str:
    """Return the table of steps and renewals."""
    head = ["model", "method", "eager, ms", "CUDA graph, ms", f"losses after {WARM_UP} steps"]
    head += ["renewal: library, ms", "stacked, ms", "errors"]
    cells = []
    for found in content["rows"]:
        line = [found["model"], found["method"]]
        line += [f"{found['eager_ms']:.2f}", f"{found['graph_ms']:.2f}"]
        line.append(f"differ by {found['early_difference']:.0e}")
        if "library_ms" in found:
            line += [f"{found['library_ms']:.1f}", f"{found['stacked_ms']:.1f}"]
            line.append(f"{found['library_error']:.0e}, {found['stacked_error']:.0e}")
        else:
            line += ["–"] * 3
        cells.append(line)
    where = content["environment"]
    note = f"{content['members']} members, batch {content['batch']}, {where['machine']}, "
    return f"{step_table.table(head, cells)}\n\n{note}PyTorch {where['torch']}."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["standard", "deep"])
    parser.add_argument("--methods", nargs="+", default=["muon", "soap", "kfac@10"])
    parser.add_argument("--members", type=int, default=2, help="models K")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--renewals", type=int, default=2, help="renewals that are timed")
    add_options(parser, "device", "out", "show")
    options = parser.parse_args(arguments)
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return
    content: dict[str, Any] = {
        "rows": [],
        "members": options.members,
        "batch": options.batch,
        "environment": environment(options.device),
    }
    for model in options.models:
        for method in options.methods:
            content["rows"].append(row(model, method, options))
            print(content["rows"][-1], flush=True)
            if options.out:  # what is measured so far, should the machine's time end
                step_table.write(options.out, content)
    print(markdown(content))


if __name__ == "__main__":
    main()
