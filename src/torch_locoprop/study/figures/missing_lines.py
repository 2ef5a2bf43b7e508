"""The lines that a figure lacks, and the reasons."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Missing:
    """Missing lines by task and reason."""

    lines: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, task: str, line: str, reason: str) -> None:
        """Add a missing line, once."""
        same = self.lines.setdefault((task, reason), [])
        if line not in same:
            same.append(line)

    def phrases(self, tasks: Collection[str]) -> tuple[str, ...]:
        """Return one phrase per reason, with its tasks unless it holds for all of `tasks`."""
        where: dict[str, list[str]] = {}
        for (task, reason), lines in self.lines.items():
            where.setdefault(f"{', '.join(lines)} ({reason})", []).append(task)
        return tuple(
            phrase if set(some) == set(tasks) else f"{', '.join(some)}: {phrase}"
            for phrase, some in where.items()
        )
