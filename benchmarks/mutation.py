"""Do the tests notice small changes of the mathematics? A sample of mutants, and which survive.

    python -m benchmarks.mutation --minutes 25 --out benchmarks/results/mutation.json
    python -m benchmarks.mutation --again benchmarks/results/mutation.json --out again.json

A first run of the tests finds which of them cover which line (kept in ``--work``, a few minutes). For
each mutant, those that cover the changed line run in order of their duration, up to ``--most`` seconds
of them, until one fails. A mutant that no test fails survives; one that runs into the limit of time is
counted by itself. The score is killed / (killed + survived + not covered). ``--again`` tries the
survivors of an earlier result, ``--each 3`` three mutants of every file.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.mutants import Mutant, applied, mutants_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("paper", "solvers", "stepping", "baselines")
TESTS = ("paper", "solvers", "config", "layers", "stepping", "recording", "reporting", "promises")
TESTS = (*TESTS, "baselines", "fuzz")
LIMIT = 120  # seconds for the tests of one mutant


class Coverage:
    """Which tests cover a line, and how long they take."""

    def __init__(self, work: Path) -> None:
        self.work = work
        if not (work / "durations.xml").exists():
            self._measure()
        from coverage import CoverageData

        self._data = CoverageData(str(work / "coverage"))
        self._data.read()
        self._seconds = self._durations()

    def tests_of(self, file: Path, mutant: Mutant, most: float) -> list[str]:
        """Return tests that cover a mutant, the fastest first, of at most so many seconds."""
        by_line = self._data.contexts_by_lineno(str(file))
        lines = range(mutant.line, mutant.last_line + 1)
        contexts = {context for line in lines for context in by_line.get(line, [])}
        if contexts == {""}:  # code that runs when it is imported: every test of the file may tell
            contexts = {context for own in by_line.values() for context in own}
        names = sorted({c.rpartition("|")[0] for c in contexts} & self._seconds.keys())
        chosen, total = [], 0.0
        for name in sorted(names, key=lambda name: self._seconds[name]):
            total += self._seconds[name]
            if total > most and chosen:
                break
            chosen.append(name)
        return chosen

    def _measure(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        folders = [f"tests/{name}" for name in TESTS]
        options = ["-q", "-k", "not compile", "-p", "no:cacheprovider", "--cov=torch_locoprop"]
        report = ["--cov-context=test", "--cov-report=", f"--junitxml={self.work}/durations.xml"]
        environment = {**os.environ, "COVERAGE_FILE": f"{self.work.resolve()}/coverage"}
        command = [sys.executable, "-m", "pytest", *folders, *options, *report]
        subprocess.run(command, cwd=ROOT, check=True, env=environment)

    def _durations(self) -> dict[str, float]:
        found = {}
        for case in ElementTree.parse(self.work / "durations.xml").iter("testcase"):
            if all(case.find(tag) is None for tag in ("skipped", "failure", "error")):
                path = case.attrib["classname"].replace(".", "/") + ".py"
                found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
        return found


class Trials:
    """Runs tests on a copy of the sources, in processes forked from one that has imported torch."""

    def __init__(self, work: Path) -> None:
        self._copy = (work / "src").resolve()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(ROOT / "src", self._copy, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self._copy, quiet=1)
        os.environ |= {"PYTHONPATH": str(self._copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(self._copy))
        import hypothesis
        import pytest  # noqa: F401
        import scipy.optimize  # noqa: F401
        import torch

        torch.set_num_threads(1)
        hypothesis.settings.register_profile("mutants", database=None, derandomize=True)
        hypothesis.settings.load_profile("mutants")
        assert "torch_locoprop" not in sys.modules

    def outcome(self, file: str, source: str, tests: list[str]) -> str:
        """Return ``killed``, ``survived`` or ``timeout`` for a source in place of a file."""
        if not tests:
            return "not covered"
        path = self._copy / "torch_locoprop" / file
        before = path.read_text()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(source)
        try:
            code = self._run(tests)
        finally:
            path.write_text(before)
        return {0: "survived", None: "timeout"}.get(code, "killed")

    def _run(self, tests: list[str]) -> int | None:
        """Return the exit code of pytest; None if it took too long."""
        child = os.fork()
        if child == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            import pytest

            quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-cov"]
            imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest began
            os._exit(int(pytest.main([*quiet, *imported, *tests])))
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def sample(seed: int) -> Iterator[tuple[str, Mutant]]:
    """Yield all mutants of the packages in a random order, with the file of each."""
    top = ROOT / "src" / "torch_locoprop"
    files = sorted(path for package in PACKAGES for path in (top / package).rglob("*.py"))
    found = [(str(f.relative_to(top)), m) for f in files for m in mutants_of(f.read_text())]
    random.Random(seed).shuffle(found)
    yield from found


def of_every_file(mutants: Iterable[tuple[str, Mutant]], each: int) -> Iterator[tuple[str, Mutant]]:
    """Yield the first mutants of every file, ``each`` of them or all that it has."""
    seen: Counter[str] = Counter()
    for file, mutant in mutants:
        seen[file] += 1
        if seen[file] <= each:
            yield file, mutant


def survivors(result: dict[str, Any]) -> Iterator[tuple[str, Mutant]]:
    """Yield the mutants of an earlier result that survived, where the source still has them."""
    kept = {(one["file"], one["was"], one["becomes"]) for one in result["survivors"]}
    for file, mutant in sample(0):
        if (file, mutant.was, mutant.becomes) in kept:
            yield file, mutant


def main() -> None:
    """Try mutants for some time and write the score and the survivors to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/mutation"))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--most", type=float, default=30, help="seconds of tests for one mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="try the survivors of an earlier result")
    parser.add_argument("--each", type=int, help="try so many mutants of every file")
    given = parser.parse_args()
    os.chdir(ROOT)
    coverage = Coverage(given.work)
    trials = Trials(given.work)
    everything = list(sample(given.seed))
    chosen = everything
    if given.again is not None:
        chosen = list(survivors(json.loads(given.again.read_text())))
    if given.each is not None:
        chosen = list(of_every_file(chosen, given.each))
    top, end = ROOT / "src" / "torch_locoprop", time.monotonic() + 60 * given.minutes
    counts: Counter[str] = Counter()
    lived: list[dict[str, Any]] = []
    for file, mutant in chosen:
        source = (top / file).read_text()
        tests = coverage.tests_of(top / file, mutant, given.most)
        outcome = trials.outcome(file, applied(mutant, source), tests)
        counts[outcome] += 1
        change = {"file": file, "line": mutant.line, "was": mutant.was, "becomes": mutant.becomes}
        print(outcome, *change.values(), len(tests), flush=True)
        if outcome in ("survived", "not covered"):
            lived.append({**change, "outcome": outcome, "tests": len(tests)})
        judged = counts["killed"] + counts["survived"] + counts["not covered"]
        result = {
            "command": " ".join(["python -m benchmarks.mutation", *sys.argv[1:]]),
            "packages": PACKAGES,
            "mutants": len(everything),
            "tried": sum(counts.values()),
            **counts,
            "score": round(counts["killed"] / max(judged, 1), 3),
            "survivors": lived,
        }
        given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main()
