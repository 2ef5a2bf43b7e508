"""What a figure lacks, and why, in few words."""

from __future__ import annotations

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

    def told(self, *, several_tasks: bool) -> tuple[str, ...]:
        """Return a phrase for every reason, and task where there are several."""
        return tuple(
            (f"{task}: " if several_tasks else "") + f"{', '.join(lines)} ({reason})"
            for (task, reason), lines in self.lines.items()
        )
