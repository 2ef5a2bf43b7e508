"""LocoProp without its optimizer class: functions of tensors in a training loop of your own.

    pip install torch-locoprop
    python examples/own_loop.py
    python examples/own_loop.py --method locoprop-s --structure diagonal --compile

Training engines own their loop: they compute, average and clip gradients themselves, and call a
function for the step. `InputGram` records XᵀX of the layers' inputs beside the engine's gradients, over
all micro-batches of a step, and `torch_locoprop.functional` makes the displacement of the weights from
both. With `--structure dense` the weights equal those of `LocoProp` to rounding, which a test checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.functional import (
    InputGram,
    as_matrix,
    closed_form,
    from_matrix,
    locoprop_s,
    spectral,
)

Step = Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Any]]  # grad, gram, state -> Δ, state

SETTINGS: dict[str, dict[str, Any]] = {
    "closed-form": {"damping": 1.0, "lr": 0.1, "gamma": 20.0},
    "locoprop-s": {"lr": 1e-4, "gamma": 30.0, "local_steps": 10, "momentum": 0.9},
    "spectral": {"lr": 0.04, "agreement": 1.0},
}
METHODS: dict[str, Step] = {
    "closed-form": lambda grad, gram, _: (closed_form(grad, gram, **SETTINGS["closed-form"]), None),
    "locoprop-s": lambda grad, gram, state: locoprop_s(grad, gram, state, **SETTINGS["locoprop-s"]),
    "spectral": lambda grad, gram, state: spectral(grad, gram, state, **SETTINGS["spectral"]),
}


def network() -> nn.Sequential:
    """Return a small autoencoder with convolutions and linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96, 12), nn.Tanh(),
        nn.Linear(12, 64, bias=False),
    )  # fmt: skip


def batches(count: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield images of a bright bar at random places, ``[60, 1, 8, 8]``."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        places = torch.randint(0, 6, (60, 1, 1, 1), generator=generator)
        columns = torch.arange(8).reshape(1, 1, 1, 8)
        bar = ((columns - places).abs() <= 1).to(dtype).expand(60, 1, 8, 8)
        yield bar + 0.1 * torch.randn(60, 1, 8, 8, generator=generator, dtype=dtype)


def criterion(output: Tensor, images: Tensor) -> Tensor:
    """Return the squared error, summed over pixels and averaged over images."""
    return (output - images.flatten(1)).square().sum(1).mean()


def train(
    model: nn.Module,
    step: Step,
    count: int = 100,
    *,
    structure: str = "dense",
    every: int = 1,
    micro_batches: int = 3,
    compiled: bool = False,
) -> list[float]:
    """Train a model whose layers all have local problems; return the loss of each step.

    Args:
        model: the model.
        step: the displacement and the new state, from a gradient, XᵀX and the state.
        count: number of steps.
        structure: of XᵀX: "dense" or "diagonal".
        every: renew XᵀX in every k-th step.
        micro_batches: number of passes in which the gradients of one step are computed.
        compiled: run the model with torch.compile.
    """
    recorder = InputGram(model, structure=structure, every=every)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    states: dict[str, Any] = {}
    grams: dict[str, Tensor] = {}
    losses = []
    for images in batches(count, next(model.parameters()).dtype):
        total = 0.0
        for part in images.chunk(micro_batches):
            loss = criterion(forward(part), part) / micro_batches
            loss.backward()
            total += loss.item()
        grams |= recorder.take()
        with torch.no_grad():
            for name, layer in recorder.layers.items():
                bias = None if layer.bias is None else layer.bias.grad
                grad = as_matrix(layer, layer.weight.grad, bias)
                moved, states[name] = step(grad, grams[name], states.get(name))
                moved_weight, moved_bias = from_matrix(layer, moved)
                layer.weight += moved_weight
                if moved_bias is not None:
                    layer.bias += moved_bias
        model.zero_grad()
        losses.append(total)
    recorder.remove()
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with functions instead of an optimizer.")
    parser.add_argument("--method", choices=METHODS, default="closed-form")
    parser.add_argument("--structure", choices=("dense", "diagonal"), default="dense")
    parser.add_argument("--every", type=int, default=1, help="renew XᵀX in every k-th step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    losses = train(
        network(),
        METHODS[options.method],
        options.steps,
        structure=options.structure,
        every=options.every,
        compiled=options.compile,
    )
    for number in range(0, options.steps, max(options.steps // 5, 1)):
        print(f"step {number:4d}  loss {losses[number]:.3f}")
    print(f"last step  loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
