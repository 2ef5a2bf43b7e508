"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

OPTIONS: dict[str, dict[str, Any]] = {
    "device": {
        "default": "cuda" if torch.cuda.is_available() else "cpu",
        "help": "cpu or cuda (default: cuda if there is a GPU)",
    },
    "threads": {"type": int, "help": "threads of the CPU (default: as torch chooses)"},
    "out": {"type": Path, "help": "write the measurements to this JSON file"},
    "show": {"type": Path, "help": "read measurements from such a file; measure nothing"},
    "figure": {"type": Path, "help": "write the figure to this .png file and to a .pdf beside it"},
}


def add_options(parser: argparse.ArgumentParser, *names: str, **more: Any) -> None:
    """Add the options of these names; `more` are further arguments of `add_argument`."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name], **more)
