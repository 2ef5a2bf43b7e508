"""Time steps and renewals of populations of matrices: Muon, SOAP, K-FAC and others (needs torch alone).

    python -m benchmarks.matrix_populations --models standard deep --out matrix-populations.json
    python -m benchmarks.matrix_populations --models wide --methods soap --steps 20
    python -m benchmarks.matrix_populations --show benchmarks/results/matrix-populations-h200.json

K members train as in the study, with and without a CUDA graph, from the same weights on the same
images, and their losses are compared. Steps contain what the method renews every k steps. The
factorisations of one renewal of SOAP and K-FAC are timed by themselves too.

Images are random numbers, with pixels that are always zero as in the data sets of the study.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import step_table
from benchmarks.clock import milliseconds
from benchmarks.options import add_options
from torch_locoprop.baselines.kfac import EARLY
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.factorisations import in_threads, inverse, q
from torch_locoprop.study.training.matrix_population import Training

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
        found |= renewal(training.update.states, options)
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


def renewal(states: list[Tensors], options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of the factorisations of SOAP or K-FAC; nothing for other methods."""
    if "left_basis" in states[0]:
        function = q
        matrices = [s[side] @ s[f"{side}_basis"] for s in states for side in ("left", "right")]
    elif "inverse_inputs" in states[0]:
        function = inverse
        matrices = [damped(s[name]) for s in states for name in ("inputs", "gradients")]
    else:
        return {}
    arguments = [(matrix,) for matrix in matrices]
    ms = milliseconds(lambda: in_threads(function, arguments), options.renewals, options.device)
    return {"library_ms": ms}


def damped(matrix: Tensor) -> Tensor:
    """Return a matrix with a hundredth of its mean diagonal added to its diagonal."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return matrix + 0.01 * mean * torch.eye(matrix.shape[-1], device=matrix.device)


def markdown(content: dict[str, Any]) -> str:
    """Return the table of steps and renewals, and below it the remark of a file that has one."""
    head = ["model", "method", "eager, ms", "CUDA graph, ms", f"losses after {WARM_UP} steps"]
    head.append("renewal, ms")
    cells = []
    for found in content["rows"]:
        line = [found["model"], found["method"]]
        line += [f"{found['eager_ms']:.2f}", f"{found['graph_ms']:.2f}"]
        line.append(f"differ by {found['early_difference']:.0e}")
        line.append(f"{found['library_ms']:.1f}" if "library_ms" in found else "–")
        cells.append(line)
    where = content["environment"]
    note = f"{content['members']} members, batch {content['batch']}, {where['machine']}, "
    parts = [step_table.table(head, cells), f"{note}PyTorch {where['torch']}."]
    return "\n\n".join([*parts, content["remark"]] if "remark" in content else parts)


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
