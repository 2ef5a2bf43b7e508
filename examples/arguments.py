"""Command-line arguments that several examples share."""

from __future__ import annotations

import argparse
from pathlib import Path


def framework_parser(description: str, folder: str) -> argparse.ArgumentParser:
    """Return a parser with the options of the three framework examples.

    Args:
        description: what the example trains, for `--help`.
        folder: the default folder of checkpoints.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument("--batch-size", type=count, default=100)
    parser.add_argument("--accumulate", type=count, default=1, help="batches for each step")
    parser.add_argument("--folder", type=Path, default=Path(folder), help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser


def count(text: str) -> int:
    """Convert an argument to an integer of at least 1; argparse reports other values."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
