"""Compare optimizers by the steps and seconds that they need to reach the loss of the first method.

Every method has the same number of trials, which differ in the learning rate and have the first seed.
The best trial by validation loss gives the learning rate of the other seeds, and is itself the run of
the first seed. All runs have the same number of steps and the same schedule.

Runs share the GPU, so their own seconds do not compare methods. The seconds to equal loss are steps
times the time of a step that was measured with nothing else running (`timing.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import timing
from comparison import Comparison
from training import Record, Run, finished, shown

Cell = float | str  # a number, or why there is none


@dataclass
class EqualLoss(Comparison):
    """All runs of a task in one folder.

    Args:
        trials: learning rates that each method tries: the first ones of its grid.
    """

    trials: int = 5

    @property
    def length(self) -> timing.Length:
        """The length of the measurement of a step's time: half of that of other comparisons.

        The time of a step varies less if the GPU is busy and not the host.
        """
        full = timing.length(self.steps)
        return timing.Length(min(full.warm_up, 120), min(full.turns, 5), full.turn)

    def searches(self, name: str) -> list[Run]:
        """Return the runs of a method's trials."""
        chosen = self.task.methods[name].trials()[: self.trials]
        folder = self.folder / "runs"
        return [Run(name, trial, self.seeds[0], self.steps, folder) for trial in chosen]

    def at_edge(self, name: str) -> bool:
        """Return True if the chosen learning rate is the lowest or highest of three or more."""
        tried = [record["settings"]["lr"] for record in self.tried(name)]
        return len(tried) > 2 and self.settings(name)["lr"] in (min(tried), max(tried))

    def compare(self) -> None:
        """Make all trials, then the other seeds of methods whose trials are all finished."""
        measured = self.timings()["methods"]
        # The slowest first: started last, it would run alone in the end.
        names = sorted(self.methods, key=lambda name: -measured[name]["ms_per_step"])
        each = self.trials + len(self.seeds) - 1
        seconds = each * self.steps * sum(measured[name]["ms_per_step"] for name in names) / 1000
        self.console.print(
            f"All trials and seeds take about {seconds:.0f} s, without evaluations.",
            highlight=False,
        )
        self.make(_in_turns([self.searches(name) for name in names]), "trials")
        ready = [name for name in names if len(self.tried(name)) == self.trials]
        self.make(_in_turns([self.at_equal_steps(name) for name in ready]), self.task.name)

    def table(self) -> str:
        """Return the results as a Markdown table, with a number for each seed."""
        timings = self.known_timings()
        if timings is None:
            raise SystemExit(f"No timings in {self.folder}. Run this without --table first.")
        first, parts = self.methods[0], ("validation loss", *self.task.shown)
        targets = self._records(first)
        headings = ["method", "settings", "trials", *parts, "ms a step", "MiB"]
        headings += [f"steps to {first}'s loss", f"seconds to {first}'s loss"]
        lines = [headings, ["---"] * len(headings)]
        for name in self.methods:
            records, cost = self._records(name), timings["methods"][name]
            steps = [steps_to(*pair) for pair in zip(records, targets, strict=True)]
            each = cost["ms_per_step"] / 1000
            seconds = [each * cell if isinstance(cell, float) else cell for cell in steps]
            lines.append(
                [
                    name,
                    self._settings_shown(name),
                    self._trials_shown(name),
                    *(_shown([_final(record, part) for record in records], 4) for part in parts),
                    f"{cost['ms_per_step']:.2f}",
                    f"{cost['memory_mib']:.0f}",
                    _shown(steps, 0),
                    _shown(seconds, 1),
                ]
            )
        precision = "bfloat16 autocast" if self.task.bf16 else "TF32 if available"
        note = (
            f"{self.steps} steps; seeds {', '.join(map(str, self.seeds))}; {timings['machine']}, "
            f"{precision}, PyTorch {timings['torch']}. Trials: learning rates that were tried, with "
            "the first seed; edge: the best is the lowest or highest of them. "
            f"Steps to {first}'s loss: until the validation loss is down to {first}'s last one with "
            "the same seed, interpolated linearly between evaluations. Seconds: these steps, times "
            "the time of a step alone on the machine. MiB: peak memory."
        )
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note, ""])

    def _records(self, name: str) -> list[Record | None]:
        return [finished(self.task, run) for run in self.at_equal_steps(name)]

    def _settings_shown(self, name: str) -> str:
        settings = self.settings(name).items()
        text = ", ".join(f"{setting} {shown(value)}" for setting, value in settings)
        return f"{text} (edge)" if self.at_edge(name) else text

    def _trials_shown(self, name: str) -> str:
        done = len(self.tried(name))
        return str(done) if done == self.trials else f"{done} of {self.trials}"


def steps_to(record: Record | None, target: Record | None) -> Cell:
    """Return the step at which a run has the last validation loss of another, or why there is none."""
    if record is None or target is None or target["diverged"]:
        return "–"
    if record["diverged"]:
        return "diverged"
    goal = target["final"]["validation loss"]
    curve = [(point["step"], point["validation loss"]) for point in record["curve"]]
    if curve[0][1] <= goal:
        return float(curve[0][0])
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= goal:
            return float(before + (after - before) * (above - goal) / (above - below))
    return "not reached"


def _final(record: Record | None, part: str) -> Cell:
    if record is None:
        return "–"
    return "diverged" if record["diverged"] else float(record["final"][part])


def _shown(cells: Sequence[Cell], digits: int) -> str:
    words = [cell if isinstance(cell, str) else f"{cell:.{digits}f}" for cell in cells]
    return words[0] if len(set(words)) == 1 and isinstance(cells[0], str) else ", ".join(words)


def _in_turns(runs: Sequence[Sequence[Run]]) -> list[Run]:
    """Return the first run of each method, then the second one of each, and so on."""
    return [run for turn in zip(*runs, strict=True) for run in turn]
