"""The spectral step in a single file, timed beside LocoProp's own and Muon on the byte-level GPT.

    python -m benchmarks.single_file --out benchmarks/results/single-file-h200.json

The model, its batches and its precision are those of `examples/byte_gpt.py`: 19 million parameters, 64
windows of 512 bytes, bfloat16 autocast on a GPU. The text is the source code of the examples. A round
is ten steps of each method, one of which renews C. `ms` is a whole training step, the median over the
rounds, which take turns. `over passes` is what is left without the forward and backward pass. AdamW
trains the embeddings, the norms and the head beside each method.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.clock import milliseconds
from torch_locoprop import LocoProp
from torch_locoprop.study.machine import environment, matmul_precision

EXAMPLES = Path(__file__).parents[1] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
byte_gpt, muon, spectral_single_file = map(
    importlib.import_module, ("byte_gpt", "muon", "spectral_single_file")
)
WARM_UP, ROUND = 30, 10  # steps; the first ten steps renew C each
Makers = dict[str, Callable[[nn.Module], list[Optimizer]]]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the blocks, which AdamW does not train."""
    return [p for p in model.get_submodule("blocks").parameters() if p.dim() == 2]


def adamw(model: nn.Module, but: list[nn.Parameter]) -> Optimizer:
    """Return AdamW for all other parameters."""
    inside = set(but)
    return torch.optim.AdamW([p for p in model.parameters() if p not in inside], 2e-3, fused=True)


def beside(make: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], list[Optimizer]]:
    """Return a maker of an optimizer of the blocks' matrices, with AdamW for the other parameters."""
    return lambda model: [make(model), adamw(model, matrices(model))]


def single_file(apply: str) -> Callable[[nn.Module], list[Optimizer]]:
    """Return a maker of the single file's step."""
    return beside(
        lambda model: spectral_single_file.Spectral(
            model.get_submodule("blocks").modules(), 7.5e-3, apply=apply
        )
    )


METHODS: Makers = {
    "passes": lambda model: [],
    "adamw": lambda model: [adamw(model, [])],
    "torch.optim.Muon": beside(
        lambda model: torch.optim.Muon(
            matrices(model), 8e-3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
    ),
    "Muon, stacked": beside(lambda model: muon.Muon(matrices(model), 8e-3, 0.9)),
    "single file": single_file("solution"),
    "single file, apply='gradient'": single_file("gradient"),
    "single file, apply='nothing'": single_file("nothing"),
    "LocoProp": lambda model: [
        LocoProp(
            model,
            preset="spectral",
            lr=7.5e-3,
            layers=["blocks.*"],
            fallback=lambda params: torch.optim.AdamW(params, 2e-3, fused=True),
        )
    ],
}


class Member:
    """One method in training."""

    def __init__(self, name: str, sizes: tuple[int, int, int], batch: int, device: str) -> None:
        torch.manual_seed(0)
        self._device, (_, _, self._context) = device, sizes
        self._batch = batch
        self._model = byte_gpt.GPT(*sizes).to(device)
        self._optimizers = METHODS[name](self._model)
        text = b"".join(path.read_bytes() for path in sorted(EXAMPLES.glob("*.py")))
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self._generator = torch.Generator(device).manual_seed(0)
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Take one training step."""
        last = len(self._text) - self._context
        shape = (self._batch, 1)
        starts = torch.randint(last, shape, generator=self._generator, device=self._device)
        chunk = self._text[starts + torch.arange(self._context + 1, device=self._device)].long()
        loss = self._loss(chunk)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._model.zero_grad()
        self.loss = loss.detach()

    def _loss(self, chunk: Tensor) -> Tensor:
        kind = torch.device(self._device).type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = self._model(chunk[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())


def measured(
    sizes: tuple[int, int, int], batch: int, rounds: int, device: str
) -> list[dict[str, Any]]:
    """Return a row for each method: milliseconds of a step, and the last training loss."""
    members = {name: Member(name, sizes, batch, device) for name in METHODS}
    for member in members.values():
        milliseconds(member.step, WARM_UP, device)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(rounds):
        for name, member in members.items():
            times[name].append(milliseconds(member.step, ROUND, device))
    passes = median(times["passes"])
    return [
        {
            "method": name,
            "ms": round(median(found), 3),
            "over passes": round(median(found) - passes, 3),
            "ms in rounds": [round(each, 3) for each in found],
            "loss": round(float(members[name].loss), 4),
        }
        for name, found in times.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure all methods, print the rows and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = byte_gpt.ByteGPT
    parser.add_argument("--layers", type=int, default=task.layers)
    parser.add_argument("--width", type=int, default=task.width, help="a multiple of 64")
    parser.add_argument("--context", type=int, default=task.context)
    parser.add_argument("--batch-size", type=int, default=task.batch_size)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    sizes = (options.layers, options.width, options.context)
    with matmul_precision("tf32"):
        rows = measured(sizes, options.batch_size, options.rounds, options.device)
    for row in rows:
        print(row, flush=True)
    content = {
        "command": "python -m benchmarks.single_file",
        "environment": environment(options.device),
        "sizes": dict(zip(("layers", "width", "context"), sizes, strict=True)),
        "batch_size": options.batch_size,
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
