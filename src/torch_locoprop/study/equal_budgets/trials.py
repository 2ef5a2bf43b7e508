"""The trials of the protocol of equal budgets: drawing settings, and the files that keep them.

A folder has two files. `trials.json` has the task, the sampler, each method's space and the trials. A
trial is a method, its number, the seed of its run, the settings that were drawn and, in a study, its
stage. `results.jsonl` has a line for every trial that has ended, with the trial and its outcome.

The settings of all methods come from one sampler, a scrambled Sobol sequence with a fixed seed, over
the spaces of `torch_locoprop.study.tuning.spaces`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_locoprop.study import methods as registered
from torch_locoprop.study.atomic_files import write
from torch_locoprop.study.methods.search_space import Choices, Domain, Space, Span, from_dict
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.tuning import spaces

SEED = 0
SAMPLER = {"name": "torch.quasirandom.SobolEngine, scrambled", "seed": SEED}

WIDTH = 0.25
"""The width of the box around a best trial, as a part of the logarithmic width of its space."""

IDENTITY = ("method", "trial", "seed", "stage")
"""The keys that identify a trial; the value of a missing stage is None."""

Trial = dict[str, Any]
Line = Mapping[str, Any]


def read_trials(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's `trials.json`."""
    return dict(json.loads((folder / "trials.json").read_text()))


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no such file.

    A half-written last line, which a kill or a full disk may leave, is not a result.

    Raises:
        RunError: If another line is broken.
    """
    if not path.is_file():
        return []
    results = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            results.append(dict(json.loads(line)))
        except ValueError as error:
            if not line.endswith("\n"):
                break
            raise RunError(
                f"Line {number} of {path} is not a result ({error}). Remove the line; its trial is "
                "trained again."
            ) from error
    return results


def identity(trial: Line) -> tuple[Any, ...]:
    """Return what tells a trial, or the line of its result, from others."""
    return tuple(trial.get(name) for name in IDENTITY)


def is_pending(trial: Trial, results: Sequence[Line]) -> bool:
    """Return True if no result is that of the trial."""
    return all(identity(line) != identity(trial) for line in results)


def write_trials(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace `trials.json`, with one line for each method's space and for each trial."""
    parts = []
    for key, value in content.items():
        if key == "spaces":
            lines = (f"  {json.dumps(name)}: {json.dumps(space)}" for name, space in value.items())
            parts.append(' "spaces": {\n' + ",\n".join(lines) + "\n }")
        elif key == "trials":
            lines = ("  " + json.dumps(trial) for trial in value)
            parts.append(' "trials": [\n' + ",\n".join(lines) + "\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    write(folder / "trials.json", "{\n" + ",\n".join(parts) + "\n}\n")


def add_trials(folder: Path, content: dict[str, Any], new: Sequence[Trial]) -> None:
    """Append trials that are not in the file yet, and write it."""
    content["trials"] += [trial for trial in new if is_pending(trial, content["trials"])]
    write_trials(folder, content)


def empty(task: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Return the content of a `trials.json` without trials."""
    return {
        "task": dict(task),
        "sampler": SAMPLER,
        "spaces": {method: space_to_dict(method) for method in methods},
        "trials": [],
    }


def space_to_dict(method: str) -> dict[str, Any]:
    """Return the space in which a method's settings are drawn, as JSON stores it."""
    space = spaces.of(registered.get(method))
    return {name: domain.to_dict() for name, domain in space.items()}


def spread(content: Mapping[str, Any], method: str, first: int, count: int) -> list[Trial]:
    """Return trials of a method that are spread over its space.

    Args:
        content: The content of `trials.json`.
        method: The method.
        first: The number of the first of these trials, and of its point of the sequence.
        count: The number of trials.
    """
    space = space_of(content, method)
    points = _points(len(space), first, count)
    return [
        _trial(method, number, 0, dict(zip(space, map(_at, point, space.values()), strict=True)))
        for number, point in enumerate(points, first)
    ]


def around(
    content: Mapping[str, Any], results: Sequence[Line], method: str, count: int
) -> list[Trial]:
    """Return more trials of a method, in a box around its best one.

    The box has a quarter of the logarithmic width of the space in every setting, and is not cut off at
    the ends of the space: a best value at an end is searched beyond it. Of choices it has the best and
    its neighbours.
    """
    best = best_of(results, method)
    space = space_of(content, method)
    first = sum(is_search(t) and t["method"] == method for t in content["trials"])
    trials = []
    for number, point in enumerate(_points(len(space), first, count), first):
        settings = {
            name: _near(best["settings"][name], u, domain)
            for u, (name, domain) in zip(point, space.items(), strict=True)
        }
        trials.append(_trial(method, number, 0, settings))
    return trials


def at_seeds(best: Line, seeds: Sequence[int]) -> list[Trial]:
    """Return the trial of a result at other seeds."""
    return [_trial(best["method"], best["trial"], seed, best["settings"]) for seed in seeds]


def is_search(trial: Line) -> bool:
    """Return True for a trial, or its result, that is no repetition of a best one."""
    return bool(trial["seed"] == 0 and trial.get("stage") in (None, "search"))


def best_of(results: Sequence[Line], method: str, by: str = "train_loss") -> Line:
    """Return the result of a method's search with the lowest loss at the end.

    Args:
        results: The results of all methods.
        method: The method.
        by: The loss: ``train_loss``, or in a study ``held_out_loss``.

    Raises:
        ValueError: If no trial has ended without diverging.
    """
    ended = [line for line in results if line["method"] == method and is_search(line)]
    ended = [line for line in ended if not line["diverged"]]
    if not ended:
        raise ValueError(f"No trial of {method} has come to its end. Run some first.")
    return min(ended, key=lambda line: math.inf if line[by] is None else line[by])


def space_of(content: Mapping[str, Any], method: str) -> Space:
    """Return the space of a method."""
    return {name: from_dict(text) for name, text in content["spaces"][method].items()}


def position(value: Any, domain: Domain) -> float:
    """Return where in its domain a setting is: from 0, the lower end, to 1."""
    if isinstance(domain, Choices):
        return domain.values.index(value) / (len(domain.values) - 1)
    number = 1 - value if domain.of_rest else value
    return math.log(number / domain.low) / math.log(domain.high / domain.low)


def _points(dimensions: int, first: int, count: int) -> list[list[float]]:
    """Return points of the unit cube, from the first-th of the sequence on."""
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=SEED)  # type: ignore[no-untyped-call]
    found: list[list[float]] = engine.fast_forward(first).draw(count).double().tolist()  # type: ignore[no-untyped-call]
    return found


def _at(u: float, domain: Domain) -> Any:
    """Return the setting at a position of its domain, to four digits of what is log-uniform."""
    if isinstance(domain, Choices):
        return domain.values[min(int(u * len(domain.values)), len(domain.values) - 1)]
    number = float(f"{domain.low * (domain.high / domain.low) ** u:.4g}")
    return float(f"{domain.setting(number):.12g}")


def _near(value: Any, u: float, domain: Domain) -> Any:
    """Return the setting at a position of the box around a value."""
    if isinstance(domain, Choices):
        place = domain.values.index(value)
        return _at(u, Choices(domain.values[max(place - 1, 0) : place + 2]))
    assert isinstance(domain, Span)
    setting = _at(position(value, domain) + WIDTH * (u - 0.5), domain)
    return max(setting, 0.0) if domain.of_rest else setting  # no average has a negative factor


def _trial(method: str, number: int, seed: int, settings: dict[str, Any]) -> Trial:
    return {"method": method, "trial": number, "seed": seed, "settings": settings}
