"""Compare LocoProp with AdamW, Muon and SOAP on a GPT that predicts the bytes of source code.

    python examples/byte_gpt.py --processes 5    # all trials and seeds, then the table
    python examples/byte_gpt.py --table          # the table of finished runs

The data are source code and documentation found in the packages of this interpreter
(`package_bytes.py`): 60 million bytes for training, 2 million held out. Nothing is downloaded. Every
result has the SHA-256 of its data, and results of other data are refused. Each method tries five
learning rates, and the best one is trained with two more seeds (`equal_loss.py`).

With --minutes, no run is started that would end later, and a run that takes longer than expected is
stopped. Finished runs are kept, and the same command goes on with the others. All of this is made for a
GPU; the README in this folder has the results.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import package_bytes
import torch
import torch.nn.functional as F
from arguments import count
from comparison import add_shared_options, check_device, check_methods
from equal_loss import EqualLoss
from methods import INNER, Optimizers
from next_token import NextToken, Text
from rich.console import Console
from torch import Tensor, nn
from training import Method, write

BYTES = 256  # different values of a byte
HEAD = 64  # width of an attention head

# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: causal self-attention, then two linear layers for each position.

    Queries, keys and values have a layer each, and no layer has a bias. So Muon, SOAP and LocoProp
    train the same matrices, and each matrix has one purpose. To AdamW, three layers equal one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width, bias=False)
        self.hidden_in = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden = F.gelu(self.hidden_in(self.hidden_norm(x)))
        result: Tensor = x + self.hidden_out(hidden)
        return result

    def attention(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.attention_out(found.transpose(1, 2).flatten(2))
        return result


class GPT(nn.Module):
    """A GPT; returns the logits `[N, context, 256]` of the next byte at each position."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # With the smaller deviation, the sum over all blocks has the variance of one.
                blocks = 2 * layers if name.endswith("_out.weight") else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(blocks))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[-1], device=text.device)
        x = self.bytes(text) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


# ---- the methods --------------------------------------------------------------------------------

# Muon, SOAP and LocoProp train the matrices of the blocks. Beside each of them, AdamW trains the
# embeddings, the norms and the head at this rate.
MAKE = Optimizers({"inner": INNER}, other_lr=2e-3)
# The last two learning rates were chosen when the first three had been tried: if the lowest of these
# was the best, two lower ones, else one on each side of the best. Muon's momentum is the one that was
# better on tiny Shakespeare than 0.95.
METHODS = {
    "adamw": Method(MAKE.by_adamw, {"lr": 2e-3}, [{"lr": [2e-3, 1e-3, 4e-3, 5e-4, 2.5e-4]}]),
    "muon": Method(
        MAKE.by_muon,
        {"lr": 8e-3, "momentum": 0.9},
        [{"lr": [8e-3, 4e-3, 1.6e-2, 5.7e-3, 1.13e-2]}],
    ),
    "soap": Method(
        MAKE.by_soap_and_adamw,
        {"lr": 4e-3, "momentum": 0.95},
        [{"lr": [4e-3, 2e-3, 8e-3, 2.8e-3, 5.7e-3]}],
    ),
    "locoprop-spectral": Method(
        MAKE.by_spectral,
        {"lr": 1.5e-2, "momentum": 0.9, "layers": "inner"},
        [{"lr": [1.5e-2, 7.5e-3, 3e-2, 3.75e-3, 1.88e-3]}],
    ),
    "locoprop": Method(MAKE.by_default, {"lr": 4e-2}, [{"lr": [4e-2, 2e-2, 8e-2, 1e-2, 5e-3]}]),
}


# ---- the task -----------------------------------------------------------------------------------

# So many that the steps of all trials and seeds take eight minutes on an H200.
STEPS = 500


@dataclass(frozen=True)
class ByteGPT(NextToken):
    """Predict the next byte of source code and documentation.

    Args:
        layers: number of blocks.
        width: width of the model.
        train_bytes: number of bytes for training.
        held_out_bytes: number of held-out bytes. Each eighth window of them is for validation, the
            others are for the test.
        sha256: digest of the data.
    """

    context: int = 512
    layers: int = 6
    width: int = 512
    train_bytes: int = 60_000_000
    held_out_bytes: int = 2_000_000
    sha256: str = ""

    name = "byte-gpt"
    methods = METHODS
    shown = ("test loss",)
    followed = ("validation",)

    def load(self, device: torch.device) -> Text:
        if self.source is None:
            raise ValueError("A task without data can show results only.")
        data = package_bytes.read(self.source, self.sha256).to(device)
        train, held_out = data.split([self.train_bytes, self.held_out_bytes])
        inputs, labels = self.windows(held_out.long())
        if len(inputs) < 2 or len(train) <= self.context:
            raise SystemExit(
                f"{self.train_bytes} bytes for training and {self.held_out_bytes} held out are too few "
                f"for windows of {self.context} bytes. Ask for more with --train-bytes and "
                "--held-out-bytes, or for a smaller --context."
            )
        chosen = torch.arange(len(inputs), device=device) % 8 == 0
        parts = {"validation": (inputs[chosen], labels[chosen])}
        parts["test"] = (inputs[~chosen], labels[~chosen])
        return Text(BYTES, train, parts)

    def model(self, data: Text) -> nn.Module:
        return GPT(self.layers, self.width, self.context)


# ---- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.monotonic()
    options = _parser().parse_args(arguments)
    folder = options.out or Path("results/examples") / ByteGPT.name
    names = options.methods or list(METHODS)
    check_methods(METHODS, names)
    task = _known(folder) if options.table else _new(folder, options)
    comparison = EqualLoss(
        task,
        options.device,
        folder,
        names,
        options.seeds,
        options.steps,
        options.steps,
        options.processes,
        started + 60 * options.minutes,
        Console(),
        options.trials,
    )
    with comparison:
        if not options.table:
            comparison.compare()
    comparison.show_table()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of finished runs without training"
    )
    add_shared_options(parser, STEPS)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="start no run that would end more minutes from now; the same command goes on",
    )
    parser.add_argument(
        "--trials", type=_trials, default=5, help="learning rates to try (default: 5, all)"
    )
    sizes = parser.add_argument_group("model and data")
    for option, default in (
        ("--layers", ByteGPT.layers),
        ("--width", ByteGPT.width),
        ("--context", ByteGPT.context),
        ("--batch-size", ByteGPT.batch_size),
        ("--train-bytes", ByteGPT.train_bytes),
        ("--held-out-bytes", ByteGPT.held_out_bytes),
    ):
        kind = _width if option == "--width" else count
        sizes.add_argument(option, type=kind, default=default, help=f"(default: {default})")
    sizes.add_argument(
        "--data-dir",
        type=Path,
        default=Path("runs/package-bytes"),
        help="folder of the collected bytes (default: runs/package-bytes)",
    )
    return parser


def _trials(text: str) -> int:
    number, most = count(text), min(len(method.trials()) for method in METHODS.values())
    if number > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, not {number}")
    return number


def _width(text: str) -> int:
    number = count(text)
    if number % HEAD:
        raise argparse.ArgumentTypeError(f"must be a multiple of {HEAD}, not {number}")
    return number


def _new(folder: Path, options: argparse.Namespace) -> ByteGPT:
    """Return the task of the options, and write what it is to the folder of results.

    Raises:
        SystemExit: the folder has results of another task or of other data.
    """
    check_device(options.device)
    data = package_bytes.collect(options.data_dir, options.train_bytes, options.held_out_bytes)
    task = ByteGPT(
        data.path,
        bf16=options.device.startswith("cuda"),
        context=options.context,
        batch_size=options.batch_size,
        layers=options.layers,
        width=options.width,
        train_bytes=data.train,
        held_out_bytes=data.held_out,
        sha256=data.sha256,
    )
    task.load(torch.device("cpu"))  # report unusable data here, once, and not in every process
    path = _about(folder)
    if path.exists() and _known(folder).description != task.description:
        raise SystemExit(
            f"{folder} has results of another task: {_known(folder).description} instead of "
            f"{task.description}. Choose another folder with --out."
        )
    write(path, {"task": task.description, "data": data.description})
    return task


def _known(folder: Path) -> ByteGPT:
    """Return the task of the results in a folder, without its data."""
    path = _about(folder)
    if not path.exists():
        raise SystemExit(f"No results in {folder}. Run this without --table first.")
    return ByteGPT(None, **json.loads(path.read_text())["task"])


def _about(folder: Path) -> Path:
    return folder / "task.json"


if __name__ == "__main__":
    main()
