"""The exit codes of `locoprop`, as listed by `locoprop --help` and on the documentation's page."""

from torch_locoprop.study.training.stop_signals import Terminated

FAILED = 1
"""Something went wrong: a missing file or package, a full disk, a folder with another run."""

USAGE = 2
"""Wrong usage: an unknown option, method or setting, or a value that is not allowed."""

DIVERGED = 3
"""The run diverged; for several runs, all of them."""

INTERRUPTED = 130
"""Ctrl-C."""

TERMINATED = 143
"""SIGTERM, such as from a job scheduler whose time limit is reached."""

MEANING = {
    0: "success",
    FAILED: "failure, such as a missing file or package, or a full disk",
    USAGE: "wrong usage, such as an unknown method or setting",
    DIVERGED: "the run, or every run, diverged",
    INTERRUPTED: "Ctrl-C",
    TERMINATED: "SIGTERM",
}


def of_interruption(error: KeyboardInterrupt) -> int:
    """Return the exit code for Ctrl-C or SIGTERM."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
