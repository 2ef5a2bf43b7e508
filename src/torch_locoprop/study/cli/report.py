"""`locoprop report`: an HTML page over many runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from torch_locoprop.study import atomic_files
from torch_locoprop.study.cli import options
from torch_locoprop.study.report import comparison, page
from torch_locoprop.study.report.gallery import gallery
from torch_locoprop.study.report.runs import Skipped, find, find_timings
from torch_locoprop.study.training.description import RunError


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folders of runs, searched with all subfolders.  [dim]default: runs[/dim]",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("report.html"),
    title: Annotated[
        str, typer.Option(help="The title of the page.")
    ] = "Deep autoencoders, method by method",
    images: Annotated[
        int, typer.Option(min=0, max=100, help="Test images to reconstruct; 0 for none.")
    ] = 10,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Write an HTML page over many runs: curves, ranking, reconstructions, environment.

    The page is a single file that needs no network. Runs are compared only with
    runs of the same task; seeds of one configuration are one curve. Interrupted
    and diverged runs are marked. Seconds are those of timings that
    [bold]locoprop figure[/bold] made, if the folders have some, and otherwise
    those of the runs.

    [bold]locoprop report[/bold]
        writes report.html for all runs in runs/

    [bold]locoprop report runs results/mnist-tanh-standard --out mnist.html --title "MNIST"[/bold]
        several folders in one page

    [bold]locoprop report --data-dir ~/data --images 16[/bold]
        reconstructions of images in your own folder, for runs with a checkpoint

    [bold]locoprop report --json[/bold]
        prints the rankings as JSON too
    """
    page.plotly()  # raises before any work if plotly is missing
    given = folders or [Path("runs")]
    runs, skipped = find(given)
    if not runs:
        raise RunError(_nothing(given, skipped))
    tasks = comparison.tasks(runs, find_timings(given))
    galleries = [gallery(task, images, data_dir) for task in tasks]
    atomic_files.write(out, page.page(title, tasks, galleries, skipped))
    for folder, reason in skipped:
        typer.echo(f"{folder} is not shown: {reason}", err=True)
    for task, pictures in zip(tasks, galleries, strict=True):
        for reason in pictures.missing:
            typer.echo(f"No reconstructions for {task.title}: {reason}", err=True)
    if as_json:
        rankings = [
            {
                "task": task.about,
                "timed_on": task.clock.machine or None,
                "ranking": page.ranking(task),
            }
            for task in tasks
        ]
        content = page.finite({"report": str(out), "tasks": rankings})
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        titles = [task.title for task in tasks]
        for task in tasks:
            alike = titles.count(task.title) > 1
            name = f"{task.title} · {task.details}" if alike else task.title
            typer.echo(f"{name}: {comparison.summary(task)}")
        typer.echo(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {out}")


def _nothing(folders: list[Path], skipped: list[Skipped]) -> str:
    where = " or ".join(map(str, folders))
    if skipped:
        folder, reason = skipped[0]
        return f"No run in {where} can be read: {folder}: {reason}"
    return (
        f"No runs in {where}. Make some with `locoprop compare locoprop-m rmsprop adam`, or give "
        "another folder: locoprop report FOLDER."
    )
