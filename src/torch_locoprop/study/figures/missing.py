"""What a figure lacks, and why, in few words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Missing:
    """Lines that are not in a figure, by their task and the reason."""

    lines: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, task: str, line: str, reason: str) -> None:
        """Remember that this line is missing, once."""
        same = self.lines.setdefault((task, reason), [])
        if line not in same:
            same.append(line)

    def told(self, tasks: Collection[str]) -> tuple[str, ...]:
        """Return a phrase for every reason, with the tasks unless it is all of these."""
        where: dict[str, list[str]] = {}
        for (task, reason), lines in self.lines.items():
            where.setdefault(f"{', '.join(lines)} ({reason})", []).append(task)
        return tuple(
            phrase if set(some) == set(tasks) else f"{', '.join(some)}: {phrase}"
            for phrase, some in where.items()
        )
