"""Print a table of the runs under a folder of results, as Markdown.

    python benchmarks/results_table.py results/mnist-tanh-standard

One row a method and its settings, the best final train loss first; several numbers are several seeds,
and curves are their means. Seconds are of all epochs, from runs that had the machine to themselves.
"""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

from torch_locoprop.study import methods
from torch_locoprop.study.config import RunConfig
from torch_locoprop.study.population_run import without_numbers
from torch_locoprop.study.runner import RunResult, result_of

EPOCHS = (20, 40, 60, 80)
TIMINGS = Path("results/timings")


def label(config: RunConfig) -> str:
    """The method, and those of its settings that are not what it is registered with."""
    usual = methods.get(config.method).settings
    if "local_steps" in usual and config.settings["local_steps"] != usual["local_steps"]:
        return f"{config.method}, T = {config.settings['local_steps']}"
    return config.method


def seconds(config: RunConfig) -> str:
    """Seconds of all epochs, by the timing run of the same method and model."""
    task = without_numbers(replace(config, epochs=1, seed=0, precision="fp32"))
    for path in TIMINGS.glob("*/config.json"):
        timing = result_of(path.parent)
        if without_numbers(replace(timing.config, epochs=1, seed=0, precision="fp32")) == task:
            first, last = timing.metrics[1], timing.metrics[-1]
            each = (last.seconds - first.seconds) / (last.epoch - first.epoch)
            return f"{each * config.epochs:.0f}"
    return ""


def row(runs: list[RunResult]) -> list[str]:
    """A line of the table: runs that differ in nothing but the seed."""
    runs = sorted(runs, key=lambda run: run.config.seed)
    config, last = runs[0].config, [run.metrics[-1] for run in runs]
    if any(end.diverged for end in last):
        ends = [f"diverged in epoch {end.epoch}" for end in last if end.diverged]
        return [label(config), *("" for _ in EPOCHS), ", ".join(ends), "", ""]
    return [
        label(config),
        *(f"{mean(run.metrics[epoch].train_loss for run in runs):.1f}" for epoch in EPOCHS),
        ", ".join(f"{end.train_loss:.2f}" for end in last),
        ", ".join(f"{end.test_loss:.1f}" for end in last),
        seconds(config),
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    groups: dict[str, list[RunResult]] = defaultdict(list)
    for path in sorted(folder.glob("*/config.json")):
        run = result_of(path.parent)
        groups[json.dumps({**run.config.to_dict(), "seed": 0}, sort_keys=True)].append(run)
    runs = sorted(
        groups.values(), key=lambda same: (same[0].diverged, same[0].metrics[-1].train_loss)
    )
    head = [
        "method", *(f"epoch {epoch}" for epoch in EPOCHS), "train, 100", "test, 100", "seconds",
    ]  # fmt: skip
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *map(row, runs)]
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
