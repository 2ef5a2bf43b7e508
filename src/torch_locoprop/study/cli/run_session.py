"""Train runs in their folders, show their progress, and say how to continue after a signal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import Console

from torch_locoprop.study.cli import exit_codes
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training import tensorboard
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.processes import ALONE, Processes
from torch_locoprop.study.training.progress import watching
from torch_locoprop.study.training.run_folder import (
    Checkpoint,
    Metrics,
    NoCheckpointError,
    RunFolder,
)
from torch_locoprop.study.training.run_result import RunResult, result_of
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.training.stop_signals import Terminated

RATE_ZERO = (
    "The learning rate of epoch 1 is zero in the paper's schedule: running averages settle and the "
    "weights stay. Give --schedule linear to start above zero."
)


def messages() -> Console:
    """Return the console for messages, which standard output does not get."""
    return Console(stderr=True, highlight=False, markup=False)


@dataclass
class RunSession:
    """The runs of one command.

    Args:
        data: The images.
        data_dir: The option `--data-dir`, for the command that continues a run.
        quiet: Show no progress.
        logs: The folder for TensorBoard.
        several: True if the command trains several runs and continues them when it is given again.
        processes: The processes that train each run together; only the first prints.
    """

    data: Dataset
    data_dir: Path | None = None
    quiet: bool = False
    logs: Path | None = None
    several: bool = False
    processes: Processes = ALONE
    console: Console = field(default_factory=messages)
    _explained: bool = False

    def __post_init__(self) -> None:
        if not self.processes.is_first:
            self.quiet, self.logs, self.console = True, None, Console(quiet=True)

    def train(
        self, config: RunConfig, folder: Path, *, resume: bool, restart: bool = False
    ) -> RunResult:
        """Train the run in a folder; Ctrl-C and SIGTERM end the command.

        Args:
            config: The configuration.
            folder: The folder of the run.
            resume: Continue a run in the folder.
            restart: Start an unfinished run in the folder again from epoch 0.

        Raises:
            RunError: If the folder has another run, or one that cannot be continued.
        """
        there = self.processes.on_first(
            lambda: resume and RunFolder(folder).exists and result_of(folder).finished
        )
        try:
            result = self._train_or_ask(config, folder, resume, restart)
        except KeyboardInterrupt as error:
            self._say_how_to_continue(error, folder)
            raise typer.Exit(exit_codes.of_interruption(error)) from None
        if there and not self.quiet:
            self.console.print(f"{folder} is already finished.", soft_wrap=True)
        return result

    def _train_or_ask(
        self, config: RunConfig, folder: Path, resume: bool, restart: bool
    ) -> RunResult:
        """Train the run; on a terminal, ask before one without a checkpoint starts again."""
        try:
            return self._train(config, folder, resume, restart)
        except NoCheckpointError as error:
            asks = self.console.is_terminal and sys.stdin.isatty()
            if not asks or self.processes.are_several:
                raise
            self.console.print(str(error), soft_wrap=True)
            if not typer.confirm("Start again from epoch 0 now?", err=True):
                raise RunError(f"{folder} was left as it is.") from error
        return self._train(config, folder, resume, True)

    def _train(self, config: RunConfig, folder: Path, resume: bool, restart: bool) -> RunResult:
        with (
            watching(self.console, config.method, config.epochs, quiet=self.quiet) as watch,
            tensorboard.logging(self.logs, config, RunFolder(folder), self.data) as log,
        ):

            def on_resume(checkpoint: Checkpoint) -> None:
                if not self.quiet:
                    place = f"{checkpoint.place} of {config.epochs}"
                    self.console.print(f"Continuing {folder} from {place}.", soft_wrap=True)

            def on_epoch(row: Metrics) -> None:
                watch(row)
                log(row)
                if row.epoch == 1:
                    self._explain_rate(config)

            return run(
                config,
                folder,
                resume=resume,
                restart=restart,
                data=self.data,
                on_resume=on_resume,
                on_epoch=on_epoch,
                processes=self.processes,
            )

    def _explain_rate(self, config: RunConfig) -> None:
        """Say once why the first epoch has changed nothing, if its learning rate is zero."""
        is_zero = config.rate(len(self.data.train))(0, 0) == 0
        if is_zero and not self.quiet and not self._explained:
            self.console.print(RATE_ZERO, soft_wrap=True)
            self._explained = True

    def _say_how_to_continue(self, error: KeyboardInterrupt, folder: Path) -> None:
        words = ["locoprop", "train", "--resume", "--out", str(folder)]
        words += [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        if self.processes.are_several:
            words = [*under_torchrun(self.processes.size), *words[1:]]
        again = f"Continue with: {shlex.join(words)}"
        if not RunFolder(folder).exists:  # it does not say what to train
            again = "Give the same command again to start the run."
        if self.several:
            again = "Give the same command again to continue."
        self.console.print(f"{stopped(error)}{_saved(folder)}. {again}", soft_wrap=True)


def under_torchrun(processes: int) -> list[str]:
    """Return the words that start the command in several processes of one machine."""
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "torch_locoprop_command"]


def stopped(error: KeyboardInterrupt) -> str:
    """Return what stopped the command, as the first word of a message."""
    return "Terminated" if isinstance(error, Terminated) else "Interrupted"


def _saved(folder: Path) -> str:
    """Return which checkpoint a run has; empty if it has none."""
    try:
        checkpoint = RunFolder(folder).checkpoint()
    except RunError:
        return ""
    return "" if checkpoint is None else f", with a checkpoint after {checkpoint.place}"
