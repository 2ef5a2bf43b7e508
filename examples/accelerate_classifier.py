"""LocoProp with Hugging Face Accelerate: gradient accumulation, a schedule, and resuming.

    pip install torch-locoprop accelerate
    python examples/accelerate_classifier.py
    python examples/accelerate_classifier.py --epochs 20 --resume    # continue the first run

The loop is the usual one of Accelerate. Make LocoProp from the model before `prepare` wraps it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from arguments import framework_parser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_locoprop import LocoProp


def spirals(count: int = 600, arms: int = 3) -> TensorDataset:
    """Return points on intertwined spirals; the label of a point is the number of its spiral."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % arms
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + labels * 2 * torch.pi / arms
    points = radius * torch.stack([angle.cos(), angle.sin()])
    return TensorDataset(points.T + 0.02 * torch.randn(count, 2, generator=generator), labels)


def make() -> tuple[nn.Module, nn.Module, LocoProp]:
    """Make the model, its loss function and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    criterion = nn.CrossEntropyLoss()
    return model, criterion, LocoProp(model, loss_fn=criterion)


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    options = parsed(arguments)
    if options.resume and not (options.folder / "optimizer.bin").is_file():
        raise SystemExit(f"No checkpoint in {options.folder}. Run this without --resume first.")
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=True)
    model, criterion, opt = make()
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)
    loader = DataLoader(spirals(), options.batch_size)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    if options.resume:
        accelerator.load_state(str(options.folder))
    steps_in_epoch = math.ceil(len(loader) / options.accumulate)
    for epoch in range(opt.param_groups[0]["steps"] // steps_in_epoch, options.epochs):
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(points), labels)
                accelerator.backward(loss)
                opt.step()
                schedule.step()
                opt.zero_grad()
        accelerator.print(f"epoch {epoch + 1:3d}  loss of the last batch {loss.item():.4f}")
        accelerator.save_state(str(options.folder))
    accelerator.print(opt.optimizer.summary())  # `opt` is Accelerate's wrapper
    return accelerator.unwrap_model(model)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = framework_parser("A classifier of spirals with Accelerate.", "runs/accelerate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
