"""LocoProp in a LightningModule: gradient accumulation, a schedule, checkpoints, and resuming.

    pip install torch-locoprop lightning
    python examples/lightning_autoencoder.py
    python examples/lightning_autoencoder.py --epochs 20 --resume    # continue the first run

Make LocoProp in `configure_optimizers`, from the network or from the module itself (`self`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from arguments import count, framework_parser
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_locoprop import LocoProp
from torch_locoprop.study.data.curves import curves


class Autoencoder(lightning.LightningModule):
    """An autoencoder with widths 784, 200, 50, 10, 50, 200, 784; its sigmoid is inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(784, 200), nn.Tanh(), nn.Linear(200, 50), nn.Tanh(), nn.Linear(50, 10)),
            *(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 784)),
        )

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        (images,) = batch
        logits = self.network(images)
        # The sum over pixels, averaged over images.
        loss = 784 * F.binary_cross_entropy_with_logits(logits, images)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        opt = LocoProp(self.network, output_transfer="sigmoid")
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)]


def main(arguments: Sequence[str] | None = None, **trainer: Any) -> Autoencoder:
    """Train the autoencoder; `trainer` has more settings of Lightning's `Trainer`."""
    options = parsed(arguments)
    checkpoint = options.folder / "last.ckpt"
    if options.resume and not checkpoint.is_file():
        raise SystemExit(f"No checkpoint in {options.folder}. Run this without --resume first.")
    lightning.seed_everything(0, verbose=False)
    model = Autoencoder()
    images = TensorDataset(curves(options.images, seed=0))
    fit = lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        # With a version counter, a second run would keep last.ckpt and write last-v1.ckpt.
        callbacks=[ModelCheckpoint(options.folder, checkpoint.stem, enable_version_counter=False)],
        default_root_dir=options.folder,
        **trainer,
    )
    loader = DataLoader(images, options.batch_size)
    fit.fit(model, loader, ckpt_path=checkpoint if options.resume else None)
    print(fit.optimizers[0].summary())
    return model


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = framework_parser("A deep autoencoder of curves with Lightning.", "runs/lightning")
    parser.add_argument("--images", type=count, default=1000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
