"""Functions that several subcommands share: options to configurations, loading, and training."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from torch_locoprop.study.cli.main import INTERRUPTED
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training import tensorboard
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.progress import watching
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.run_result import RunResult, result_of
from torch_locoprop.study.training.runner import run

TASK = (
    *("dataset", "model", "transfer", "epochs", "batch_size", "warmup_epochs"),
    *("weight_decay", "seed", "schedule", "precision", "device"),
)


def given_task(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that describe the task."""
    return {name: options[name] for name in TASK if options[name] is not None}


def configuration(values: dict[str, Any]) -> RunConfig:
    """Return the configuration with these fields; the default device is a GPU if there is one."""
    return RunConfig.from_dict({"device": "cuda" if torch.cuda.is_available() else "cpu", **values})


def base_of(config: Path | None, resumed: Path | None) -> dict[str, Any]:
    """Return the fields of a configuration file, or of the run to resume.

    Raises:
        ValueError: If the file is not a configuration.
    """
    if config is None:
        folder = None if resumed is None else RunFolder(resumed)
        return dict(folder.description()["config"]) if folder and folder.exists else {}
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is not a JSON file ({error}).") from error
    fields = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise ValueError(f"{config} is not a configuration: it must be a JSON object.")
    return dict(fields)


def is_for(name: str, text: str) -> bool:
    """Return True if a setting, `KEY=VALUE` or `METHOD.KEY=VALUE`, applies to this method."""
    return text.partition("=")[0].rpartition(".")[0] in ("", name)


def parsed(texts: Iterable[str]) -> dict[str, Any]:
    """Return `KEY=VALUE` texts as settings, with values as in JSON or as plain words.

    Raises:
        ValueError: If a text is not `KEY=VALUE`.
    """
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ValueError(f"Invalid --set {text!r}. Must be KEY=VALUE, such as lr=1e-4.")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def load(name: str, data_dir: Path | None, quiet: bool) -> Dataset:
    """Return the data set, and show a progress bar for each download."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return datasets.load(name, data_dir)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def show(file: str, here: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=here, total=total)

        return datasets.load(name, data_dir, progress=show)


def run_in(
    config: RunConfig,
    folder: Path,
    data: Dataset,
    data_dir: Path | None,
    *,
    quiet: bool,
    resume: bool,
    logs: Path | None = None,
    others: bool = False,
) -> RunResult:
    """Train a run and show its progress; Ctrl-C exits and prints how to continue.

    Args:
        config: The configuration.
        folder: The folder of the run.
        data: The images.
        data_dir: The option `--data-dir`, for the command that continues the run.
        quiet: Show no progress.
        resume: Continue a run in the folder.
        logs: The folder for TensorBoard.
        others: True if the command trains several runs and can be given again to continue.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    there = resume and RunFolder(folder).exists and result_of(folder).finished
    try:
        with (
            watching(console, config.method, config.epochs, quiet=quiet) as watch,
            tensorboard.logging(logs, config, RunFolder(folder), data) as log,
        ):

            def on_epoch(row: Metrics) -> None:
                watch(row)
                log(row)

            result = run(config, folder, resume=resume, data=data, on_epoch=on_epoch)
    except KeyboardInterrupt:
        words = ["locoprop", "train", "--resume", "--out", str(folder)]
        words += [] if data_dir is None else ["--data-dir", str(data_dir)]
        again = f"Continue with: {shlex.join(words)}"
        if others:
            again = "Give the same command again to continue."
        console.print(f"Interrupted. {again}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    if there and not quiet:
        console.print(f"{folder} is already finished.", soft_wrap=True)
    return result
