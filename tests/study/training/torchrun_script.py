"""Started by torchrun: run commands one after another on tiny float64 images.

Arguments: a folder, and commands as JSON. The folder gets RANK-N.json with the outcome of command N. In
the first command the second process gets Ctrl-C twice, as if from the terminal and from torchrun.
"""

import contextlib
import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import tiny
import torch

from torch_locoprop.study.cli import main as cli
from torch_locoprop.study.data import datasets
from torch_locoprop.study.training import runner
from torch_locoprop.study.training.processes import joined

INTERRUPTED = 7
"""The step with the signals, counted from 0: the second one of epoch 3."""


def main(folder: str, commands: str) -> None:
    torch.set_default_dtype(torch.float64)
    datasets.load = lambda *_, **__: tiny.data(dtype=torch.float64)
    step, steps = runner._Training._step, itertools.count()

    def interrupted(self: runner._Training, *given: object) -> None:
        if next(steps) == INTERRUPTED and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        step(self, *given)

    runner._Training._step = interrupted  # type: ignore[method-assign]
    with joined("cpu"):
        for number, command in enumerate(json.loads(commands)):
            out, err, code = io.StringIO(), io.StringIO(), 0
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    cli.main(command)
                except SystemExit as end:
                    code = int(end.code or 0)
            outcome = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
            path = Path(folder) / f"{os.environ['RANK']}-{number}.json"
            path.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
