"""Functions that several subcommands share: options to configurations, and loading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import RunFolder

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
        ValueError: If the file is not a configuration; the message begins with its name.
    """
    if config is None:
        folder = None if resumed is None else RunFolder(resumed)
        return dict(folder.description()["config"]) if folder and folder.exists else {}
    if config.is_dir():
        raise ValueError(f"{config} is a folder. Give a file, such as {config / 'config.json'}.")
    try:
        content = json.loads(config.read_text())
    except OSError as error:
        raise ValueError(f"{config}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{config} is not a JSON file ({error}).") from error
    fields = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise ValueError(f"{config} is not a configuration: it must be a JSON object.")
    try:
        configuration(fields).check_settings()
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from error
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


def seed_numbers(seeds: str) -> tuple[int, ...]:
    """Return the seeds of the option `--seeds`, numbers between commas, each once.

    Raises:
        ValueError: If the text is not such a list.
    """
    parts = seeds.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"Invalid --seeds {seeds!r}. Must be numbers >= 0, such as 0,1,2.")
    return tuple(dict.fromkeys(map(int, parts)))


def task_options(config: RunConfig) -> list[str]:
    """Return the options that give the task of a configuration, without those at their defaults."""
    usual = RunConfig(config.method, device=config.device)
    given = {name: getattr(config, name) for name in TASK if name != "device"}
    return [
        word
        for name, value in given.items()
        if value != getattr(usual, name)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


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
