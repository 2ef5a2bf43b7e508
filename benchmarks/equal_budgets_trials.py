"""The trials of `benchmarks.equal_budgets`: drawing settings, and the files that keep them.

`trials.json` has the task, the sampler, each method's space and the trials. A trial is a method, its
number, the seed of its run and the settings that were drawn. `results.jsonl` repeats the trial in each
line and adds the outcome.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_locoprop.study import methods as registered
from torch_locoprop.study.methods.search_space import Choices, Domain, Space, Span, from_dict
from torch_locoprop.study.tuning import spaces

FOLDER = Path(__file__).parents[1] / "results" / "equal-budgets" / "standard"

TASK = {
    "dataset": "mnist",
    "model": "standard",
    "transfer": "tanh",
    "epochs": 100,
    "batch_size": 1000,
}

SAMPLER = {"name": "torch.quasirandom.SobolEngine, scrambled", "seed": 0}

WIDTH = 0.25
"""The width of the box around a best trial, as a part of the logarithmic width of its space."""

Trial = dict[str, Any]


def read_trials(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's `trials.json`."""
    return dict(json.loads((folder / "trials.json").read_text()))


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_pending(trial: Trial, results: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no result is that of the trial."""
    names = ("method", "trial", "seed")
    return not any(all(trial[name] == line[name] for name in names) for line in results)


def add_trials(folder: Path, content: dict[str, Any], new: Sequence[Trial]) -> None:
    """Append trials that are not in the file yet, and write it."""
    content["trials"] += [trial for trial in new if is_pending(trial, content["trials"])]
    folder.mkdir(parents=True, exist_ok=True)
    spaces_text = ",\n".join(
        f"  {json.dumps(method)}: {json.dumps(space)}"
        for method, space in content["spaces"].items()
    )
    trials_text = ",\n".join("  " + json.dumps(trial) for trial in content["trials"])
    (folder / "trials.json").write_text(
        f'{{\n "task": {json.dumps(content["task"])},\n "sampler": {json.dumps(content["sampler"])},'
        f'\n "spaces": {{\n{spaces_text}\n }},\n "trials": [\n{trials_text}\n ]\n}}\n'
    )


def draw(folder: Path, methods: Sequence[str], count: int) -> None:
    """Write `trials.json` with so many trials of each method from its space."""
    found = {method: spaces.of(registered.get(method)) for method in methods}
    content: dict[str, Any] = {
        "task": TASK,
        "sampler": SAMPLER,
        "spaces": {
            method: {name: domain.to_dict() for name, domain in space.items()}
            for method, space in found.items()
        },
        "trials": [],
    }
    trials = [
        _trial(method, number, 0, dict(zip(space, map(_at, point, space.values()), strict=True)))
        for method, space in found.items()
        for number, point in enumerate(_points(len(space), 0, count))
    ]
    add_trials(folder, content, trials)


def around(
    content: Mapping[str, Any], results: Sequence[Mapping[str, Any]], method: str, count: int
) -> list[Trial]:
    """Return so many more trials of a method, in a box around its best one.

    The box has a quarter of the logarithmic width of the space in every setting, and is not cut off at
    the ends of the space. Of choices it has the best and its neighbours.
    """
    best = best_of(results, method)
    space = space_of(content, method)
    first = sum(t["method"] == method and t["seed"] == 0 for t in content["trials"])
    trials = []
    for number, point in enumerate(_points(len(space), first, count), first):
        settings = {
            name: _near(best["settings"][name], u, domain)
            for u, (name, domain) in zip(point, space.items(), strict=True)
        }
        trials.append(_trial(method, number, 0, settings))
    return trials


def winners(
    content: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    method: str,
    seeds: Sequence[int],
) -> list[Trial]:
    """Return the best trial of a method at other seeds."""
    best = best_of(results, method)
    return [_trial(method, best["trial"], seed, best["settings"]) for seed in seeds]


def best_of(results: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any]:
    """Return the result of a method at seed 0 with the lowest train loss at the end."""
    ended = [
        line
        for line in results
        if line["method"] == method and line["seed"] == 0 and not line["diverged"]
    ]
    if not ended:
        raise ValueError(f"No trial of {method} has come to its end. Run some first.")
    return min(ended, key=lambda line: line["train_loss"])


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
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=SAMPLER["seed"])
    found: list[list[float]] = engine.fast_forward(first).draw(count).double().tolist()
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
    return _at(position(value, domain) + WIDTH * (u - 0.5), domain)


def _trial(method: str, number: int, seed: int, settings: dict[str, Any]) -> Trial:
    return {"method": method, "trial": number, "seed": seed, "settings": settings}
