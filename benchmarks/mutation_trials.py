"""Whether tests fail with a mutant: in processes forked from one that has imported everything."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.mutants import Mutant, applied
from benchmarks.mutants_live import Swaps, live_functions, put_in
from benchmarks.mutation_coverage import ROOT, SELECTED, SOURCES

KILLED, UNABLE = 1, 70  # the codes of a process in which a test failed, or which could not try


class ImportedTrials:
    """Runs tests on a copy of the sources, in processes forked from one that has imported torch."""

    def __init__(self, work: Path) -> None:
        self._copy = (work / "src").resolve()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(ROOT / "src", self._copy, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self._copy, quiet=1)

    def outcome(self, file: str, mutant: Mutant, tests: list[str], limit: float) -> str:
        """Return ``killed``, ``survived`` or ``timeout`` for a mutant of a file."""
        path = self._copy / SOURCES.name / file
        before = path.read_text()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(applied(mutant, before))

        def run() -> int:
            use_sources(self._copy)
            return run_pytest(tests)

        try:
            return outcome_of(run, limit)
        finally:
            path.write_text(before)


class LiveTrials:
    """Runs tests in processes forked from one that has imported all modules and collected all tests.

    A plugin of pytest: its loop over the collected tests is replaced by a loop over mutants.

    Args:
        needed: The names of all tests that the loop may name.
        loop: Called with this object.
    """

    def __init__(self, needed: Iterable[str], loop: Callable[[LiveTrials], None]) -> None:
        self._needed, self._loop = sorted(needed), loop
        self._failed = False

    def pytest_runtestloop(self, session: Any) -> bool:
        """Try all mutants."""
        self._items = {item.nodeid: item for item in session.items}
        missing = [name for name in self._needed if name not in self._items]
        if missing:  # each would count as a test that fails
            raise LookupError(f"{len(missing)} measured tests are not collected: {missing[:3]}")
        self._functions = live_functions(str(ROOT / "src"))
        if not self._functions:
            raise LookupError("The tests import another copy of the package.")
        gc.freeze()  # or every forked process would copy all objects when it collects garbage
        self._loop(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notice a failed test."""
        self._failed |= report.failed

    def outcome(self, changes: Swaps, tests: list[str], limit: float) -> str:
        """Return ``killed``, ``survived``, ``timeout``, or ``unable`` if it cannot be put in."""

        def run() -> int:
            try:
                complete = put_in(changes, self._functions)
            except ValueError:  # the code has other free variables than the function
                complete = False
            return self._first_failure(tests) if complete else UNABLE

        return outcome_of(run, limit)

    def write_failing(self, report: Path) -> None:
        """Write the names of the needed tests that fail here on unchanged sources, one by one."""

        part = report.with_suffix(".part")

        def run() -> int:
            with open(part, "w") as failed:
                for name in self._needed:
                    self._failed = False
                    if self._first_failure([name]):
                        failed.write(f"{name}\n")
            return 0

        if outcome_of(run, 3600) != "survived":
            raise RuntimeError("The tests of unchanged sources did not come to an end.")
        part.rename(report)

    def _first_failure(self, names: list[str]) -> int:
        for name in names:
            item = self._items[name]
            # Without a next test, all fixtures of this one are torn down.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed:
                return KILLED
        return 0


def outcome_of(run: Callable[[], int], limit: float) -> str:
    """Return what a function finds in a forked process, within a limit in seconds.

    Args:
        run: Returns 0 if no test fails. An exception of its own counts as a test that fails.
        limit: After so many seconds the process is ended.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = KILLED
        try:
            code = run()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", UNABLE: "unable"}.get(code, "killed")
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def use_sources(folder: Path) -> None:
    """Let this process, and those that it starts, import the package from a folder."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def run_pytest(tests: list[str], plugins: list[Any] | None = None) -> int:
    """Run tests in this process, up to the first that fails, and return the exit code."""
    import hypothesis
    import pytest

    # A test that is slow beside other programs has not failed.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "mutants", database=None, derandomize=True, deadline=None, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("mutants")
    quiet = ["-x", "-q", *SELECTED, "-p", "no:xdist", "--no-cov"]
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest began
    return int(pytest.main([*quiet, *imported, *tests], plugins=plugins))
