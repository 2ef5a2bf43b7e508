"""Print a table of the runs under a folder of results, as Markdown.

    python benchmarks/results_table.py results/mnist-tanh-standard
    python benchmarks/results_table.py results/mnist-tanh-standard --varied
    python benchmarks/results_table.py results/mnist-tanh-standard --reach 60 55 53 52
    python benchmarks/results_table.py results/mnist-tanh-standard --reach 53 52 51 \
        --clock results/timings/cuda-graphs.json

One row a method and its settings, the best final train loss first; several numbers are several seeds,
and curves are their means. Seconds are of all epochs, from runs that had the machine to themselves.
Runs with other local iterations or another local solver than a method is registered with are a table
of their own: `--varied`. `--reach` has instead the epoch after which each was first at these train
losses, by the mean of its seeds and in the schedule of its whole run, and the seconds till then.
`--clock` takes the milliseconds of a step from a file of `benchmarks.graph_clock` for these seconds, in
which every method's step is a CUDA graph, and shows the methods of that file only.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

from torch_locoprop.study import methods
from torch_locoprop.study.figures.run_library import GraphClock
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.population_run import without_numbers
from torch_locoprop.study.training.run_result import RunResult, result_of

EPOCHS = (20, 40, 60, 80)
TOLD = {"solver": "local {}", "local_steps": "T = {}", "lr": "lr = {:g}", "gamma": "gamma = {:g}"}
IMAGES = 60_000  # training images of MNIST and Fashion-MNIST
TIMINGS = Path(__file__).parents[1] / "results" / "timings"


def changed(config: RunConfig) -> dict[str, object]:
    """The settings that are not what the method is registered with."""
    usual = methods.get(config.method).settings
    return {name: value for name, value in config.settings.items() if value != usual[name]}


def is_varied(config: RunConfig) -> bool:
    """Whether the run is a variation on its method."""
    return not changed(config).keys().isdisjoint(("local_steps", "solver"))


def label(config: RunConfig) -> str:
    """The method, and what sets it apart from the registered one."""
    own = changed(config)
    told = [text.format(own[name]) for name, text in TOLD.items() if name in own]
    return ", ".join([config.method, *told])


def seconds_per_epoch(config: RunConfig) -> float | None:
    """By the timing run of the same method and model, if there is one."""
    task = without_numbers(replace(config, epochs=1, seed=0, precision="fp32"))
    for path in sorted(TIMINGS.glob("*/config.json")):
        timing = result_of(path.parent)
        if without_numbers(replace(timing.config, epochs=1, seed=0, precision="fp32")) == task:
            first, last = timing.metrics[1], timing.metrics[-1]
            return (last.seconds - first.seconds) / (last.epoch - first.epoch)
    return None


def seconds(config: RunConfig) -> str:
    """Seconds of all epochs, where they were timed."""
    each = seconds_per_epoch(config)
    return "" if each is None else f"{each * config.epochs:.0f}"


def final(runs: list[RunResult]) -> tuple[bool, float]:
    """The order of the table: by the mean of the last train losses, what diverged at the end."""
    return any(run.diverged for run in runs), mean(run.metrics[-1].train_loss for run in runs)


def at(epoch: int, runs: list[RunResult]) -> str:
    """The mean train loss after that epoch, if all runs came so far."""
    if any(len(run.metrics) <= epoch for run in runs):
        return ""
    return f"{mean(run.metrics[epoch].train_loss for run in runs):.1f}"


def row(runs: list[RunResult]) -> list[str]:
    """A line of the table: runs that differ in nothing but the seed."""
    runs = sorted(runs, key=lambda run: run.config.seed)
    config, last = runs[0].config, [run.metrics[-1] for run in runs]
    if any(end.diverged for end in last):
        ends = [f"diverged in epoch {end.epoch}" for end in last if end.diverged]
        return [label(config), *("" for _ in EPOCHS), ", ".join(ends), "", ""]
    if not all(run.finished for run in runs):
        ends = [f"{end.train_loss:.2f} in epoch {end.epoch}" for end in last]
        return [label(config), *(at(epoch, runs) for epoch in EPOCHS), ", ".join(ends), "", ""]
    return [
        label(config),
        *(at(epoch, runs) for epoch in EPOCHS),
        ", ".join(f"{end.train_loss:.2f}" for end in last),
        ", ".join(f"{end.test_loss:.1f}" for end in last),
        seconds(config),
    ]


def passed(level: float, runs: list[RunResult]) -> int | None:
    """The first epoch after which the mean train loss was at most this."""
    for epoch in range(min(len(run.metrics) for run in runs)):
        if mean(run.metrics[epoch].train_loss for run in runs) <= level:
            return epoch
    return None


def reach_row(
    levels: list[float], runs: list[RunResult], clock: GraphClock | None = None
) -> list[str]:
    """Epoch and seconds to each level."""
    config = runs[0].config
    each = seconds_per_epoch(config) if clock is None else clock.seconds(config, IMAGES)
    epochs = [passed(level, runs) for level in levels]
    cells = [
        "–" if epoch is None else f"{epoch}" if each is None else f"{epoch}: {epoch * each:.1f} s"
        for epoch in epochs
    ]
    return [label(runs[0].config), *cells, "not timed" if each is None else f"{each:.3f}"]


def gathered(folder: Path, varied: bool) -> list[list[RunResult]]:
    """The runs of the folder, or the variations among them, by all but the seed; the best first."""
    groups: dict[str, list[RunResult]] = defaultdict(list)
    for path in sorted(folder.glob("*/config.json")):
        run = result_of(path.parent)
        if is_varied(run.config) == varied:
            groups[json.dumps({**run.config.to_dict(), "seed": 0}, sort_keys=True)].append(run)
    return sorted(groups.values(), key=final)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def table(folder: Path, varied: bool = False) -> str:
    """The runs of the folder, or the variations among them, as Markdown."""
    epochs = [f"epoch {epoch}" for epoch in EPOCHS]
    head = ["method", *epochs, "train, 100", "test, 100", "seconds"]
    return markdown(head, [row(runs) for runs in gathered(folder, varied)])


def reach_table(
    folder: Path,
    levels: list[float],
    varied: bool = False,
    clock: GraphClock | None = None,
) -> str:
    """When each passed the levels, as Markdown: `epoch: seconds`."""
    head = ["method", *(f"train loss {level:g}" for level in levels), "seconds per epoch"]
    shown = [
        runs
        for runs in gathered(folder, varied)
        if clock is None or clock.seconds(runs[0].config, IMAGES) is not None
    ]
    return markdown(head, [reach_row(levels, runs, clock) for runs in shown])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--varied", action="store_true", help="other local iterations and local solvers instead"
    )
    parser.add_argument(
        "--reach", type=float, nargs="+", metavar="LOSS", help="when these train losses were passed"
    )
    parser.add_argument("--clock", type=Path, help="seconds from this file of graph_clock")
    given = parser.parse_args()
    if given.clock and not given.reach:
        parser.error("--clock needs --reach.")
    if given.reach:
        clock = GraphClock.read(given.clock) if given.clock else None
        print(reach_table(given.folder, given.reach, given.varied, clock))
    else:
        print(table(given.folder, given.varied))
