"""All tasks of `defaults` by name, and the groups that its option `--tasks` knows."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import odd_tasks
from benchmarks.default_tasks import Task, held_out, large, ordinary

_MADE = (*ordinary(), *large(), *held_out(), *odd_tasks.tasks())
TASKS = {task.name: task for task in _MADE}
"""All tasks by name."""

SHORT = 600
"""Tasks of at most so many steps make the group `short`, the others `long`."""


def _is_ordinary(task: Task) -> bool:
    return not (task.large or task.held_out or task.odd)


GROUPS: dict[str, Callable[[Task], bool]] = {
    "all": _is_ordinary,
    "short": lambda task: _is_ordinary(task) and task.steps <= SHORT,
    "long": lambda task: _is_ordinary(task) and task.steps > SHORT,
    "large": lambda task: task.large,
    "held-out": lambda task: task.held_out,
    "odd": lambda task: task.odd,
}


def selected(names: list[str]) -> list[Task]:
    """Return the tasks of these names; a name may be one of `GROUPS` or the start of several names.

    Raises:
        ValueError: If a name matches no task.
    """
    found: dict[str, Task] = {}
    for name in names:
        matching = [task for task in TASKS.values() if _matches(task, name)]
        if not matching:
            known = ", ".join([*GROUPS, *TASKS])
            raise ValueError(f"Unknown task {name!r}. Known: {known}.")
        found |= {task.name: task for task in matching}
    return [task for task in TASKS.values() if task.name in found]


def _matches(task: Task, name: str) -> bool:
    if name in GROUPS:
        return GROUPS[name](task)
    return task.name == name or task.name.startswith(f"{name}-")
