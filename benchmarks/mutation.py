"""Do the tests notice small changes of the mathematics? A sample of mutants, and which survive.

    python -m benchmarks.mutation --minutes 25 --out benchmarks/results/mutation.json
    python -m benchmarks.mutation --again benchmarks/results/mutation.json --out again.json

A first run of the tests finds which of them cover which line (kept in ``--work``, a few minutes). For
each mutant, those that cover the changed line run in order of their duration, up to ``--most`` seconds
of them, until one fails. A mutant that no test fails survives; one that runs into the limit of time is
counted by itself. The score is killed / (killed + survived + not covered). ``--again`` tries the
survivors of an earlier result, ``--each 3`` three mutants of every file, ``--only paper/gram.py`` those
of some files; ``--tests paper solvers`` runs the tests of these folders.

``equivalent_mutants.json`` says of survivors why no result changes. Each reason names a line of the
source, as text, and changes on it; the reason holds for all places of the line with this change.

A mutant inside of a function is put into a process that has imported everything and collected all
tests, which takes milliseconds; one outside of functions is imported by a process of its own, which
takes seconds and is tried last. Outcomes are kept in ``--work``: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.mutants import Mutant, applied, mutants_of
from benchmarks.mutants_live import Swaps, live_functions, put_in, swaps

ROOT = Path(__file__).parents[1]
PACKAGES = ("paper", "solvers", "stepping", "baselines")
TESTS = ("paper", "solvers", "config", "layers", "stepping", "recording", "reporting", "promises")
TESTS = (*TESTS, "baselines", "fuzz", "functional")
REASONS = Path(__file__).with_name("equivalent_mutants.json")
LIMIT = 120  # seconds for the tests of one mutant


class Coverage:
    """Which tests cover a line, and how long they take."""

    def __init__(self, work: Path, tests: Iterable[str]) -> None:
        self.work, self._folders = work, [f"tests/{name}" for name in tests]
        if not (work / "durations.xml").exists():
            self._measure()
        from coverage import CoverageData

        data = CoverageData(str(work / "coverage"))
        data.read()
        self._contexts = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        data.close()  # a forked process must not inherit the connection
        self._seconds = self._durations()

    def tests_of(self, file: Path, mutant: Mutant, most: float) -> list[str]:
        """Return tests that cover a mutant, the fastest first, of at most so many seconds."""
        by_line = self._contexts.get(str(file), {})
        lines = range(mutant.line, mutant.last_line + 1)
        contexts = {context for line in lines for context in by_line.get(line, [])}
        if contexts == {""}:  # code that runs when it is imported: every test of the file may tell
            contexts = {context for own in by_line.values() for context in own}
        names = sorted({c.rpartition("|")[0] for c in contexts} & self._seconds.keys())
        if contexts and not names:  # a module of data only: the tests of its package may tell
            package = file.relative_to(ROOT / "src" / "torch_locoprop").parts[0]
            names = sorted(name for name in self._seconds if name.startswith(f"tests/{package}/"))
        chosen, total = [], 0.0
        for name in sorted(names, key=lambda name: self._seconds[name]):
            total += self._seconds[name]
            if total > most and chosen:
                break
            chosen.append(name)
        return chosen

    def at_import(self, file: Path, mutant: Mutant) -> bool:
        """Return True for a line that also runs when its module is imported."""
        by_line = self._contexts.get(str(file), {})
        return any("" in by_line.get(n, []) for n in range(mutant.line, mutant.last_line + 1))

    def _measure(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        options = ["-q", "-k", "not compile", "-p", "no:cacheprovider", "--cov=torch_locoprop"]
        report = ["--cov-context=test", "--cov-report=", f"--junitxml={self.work}/durations.xml"]
        environment = {**os.environ, "COVERAGE_FILE": f"{self.work.resolve()}/coverage"}
        options += ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", *self._folders, *options, *report]
        subprocess.run(command, cwd=ROOT, check=True, env=environment)

    def _durations(self) -> dict[str, float]:
        found = {}
        for case in ElementTree.parse(self.work / "durations.xml").iter("testcase"):
            if all(case.find(tag) is None for tag in ("skipped", "failure", "error")):
                path = case.attrib["classname"].replace(".", "/") + ".py"
                found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
        return found


class ImportedTrials:
    """Runs tests on a copy of the sources, in processes forked from one that has imported torch."""

    def __init__(self, work: Path) -> None:
        self._copy = (work / "src").resolve()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(ROOT / "src", self._copy, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self._copy, quiet=1)
        sys.path.insert(0, str(self._copy))
        os.environ["PYTHONPATH"] = str(self._copy)

    def outcome(self, file: str, mutant: Mutant, tests: list[str]) -> str:
        """Return ``killed``, ``survived`` or ``timeout`` for a mutant of a file."""
        path = self._copy / "torch_locoprop" / file
        before = path.read_text()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(applied(mutant, before))
        try:
            return outcome_of(lambda: run_pytest(tests))
        finally:
            path.write_text(before)


class LiveTrials:
    """Runs tests in processes forked from one that has imported all modules and collected all tests.

    A plugin of pytest: its loop over the collected tests is replaced by a loop over mutants.
    """

    def __init__(self, loop: Callable[[LiveTrials], None]) -> None:
        self._loop = loop
        self._failed = False

    def pytest_runtestloop(self, session: Any) -> bool:
        """Try all mutants."""
        self._items = {item.nodeid: item for item in session.items}
        self._functions = live_functions(str(ROOT / "src"))
        gc.freeze()  # or every forked process would copy all objects when it collects garbage
        self._loop(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notice a failed test."""
        self._failed |= report.failed

    def outcome(self, changes: Swaps, tests: list[str]) -> str:
        """Return ``killed``, ``survived`` or ``timeout`` for a mutant."""
        return outcome_of(lambda: self._run(changes, [self._items[name] for name in tests]))

    def _run(self, changes: Swaps, items: list[Any]) -> int:
        put_in(changes, self._functions)
        for item in items:
            # Without a next test, all fixtures of this one are torn down.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed:
                return 1
        return 0


def outcome_of(run: Callable[[], int]) -> str:
    """Return what a function finds in a forked process: it returns 0 if no test fails."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = 1
        try:
            code = run()
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def run_pytest(tests: list[str], plugins: list[Any] | None = None) -> int:
    """Run tests in this process, up to the first that fails, and return the exit code."""
    import hypothesis
    import pytest

    hypothesis.settings.register_profile("mutants", database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    quiet = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--no-cov",
        "-k",
        "not compile",
    ]
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest began
    return int(pytest.main([*quiet, *imported, *tests], plugins=plugins))


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


def reasons() -> dict[tuple[str, str, str, str], str]:
    """Return why mutants change no result, by file, text of the line, and the change."""
    return {
        (file, one["line"], *change): one["why"]
        for file, entries in json.loads(REASONS.read_text()).items()
        for one in entries
        for change in one["changes"]
    }


def reason_keys(file: str) -> dict[Mutant, tuple[str, str, str, str]]:
    """Return the mutants of a file, each with its key in :func:`reasons`."""
    source = (ROOT / "src" / "torch_locoprop" / file).read_text()
    lines = [line.strip() for line in source.splitlines()]
    return {m: (file, lines[m.line - 1], m.was, m.becomes) for m in mutants_of(source)}


class Outcomes:
    """The outcomes of mutants in a file, one line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {key_of(row): row["outcome"] for row in map(json.loads, lines)}

    def add(self, file: str, mutant: Mutant, outcome: str) -> None:
        """Store and print the outcome of a mutant."""
        row = {"file": file, **asdict(mutant), "outcome": outcome}
        with open(self._path, "a") as lines:
            lines.write(json.dumps(row) + "\n")
        self.known[key_of(row)] = outcome
        print(outcome, file, mutant.line, mutant.was, "->", mutant.becomes, flush=True)


def key_of(row: Mapping[str, Any]) -> tuple[str, int]:
    """Return what identifies a mutant: its file, and its number in the file."""
    return row["file"], row["place"]


def try_all(
    chosen: list[tuple[str, Mutant]], coverage: Coverage, outcomes: Outcomes, given: Any
) -> None:
    """Try all mutants without an outcome until the time is over, the fast ones first."""
    top, end = ROOT / "src" / "torch_locoprop", time.monotonic() + 60 * given.minutes
    live, imported = [], []
    for file, mutant in chosen:
        if (file, mutant.place) in outcomes.known:
            continue
        tests = coverage.tests_of(top / file, mutant, given.most)
        changes = swaps(mutant, (top / file).read_text(), str(top / file))
        if not tests:
            outcomes.add(file, mutant, "not covered")
        elif changes and not coverage.at_import(top / file, mutant):
            live.append((file, mutant, tests, changes))
        else:
            imported.append((file, mutant, tests))

    def try_live(trials: LiveTrials) -> None:
        for file, mutant, tests, changes in live:
            if time.monotonic() < end:
                outcomes.add(file, mutant, trials.outcome(changes, tests))

    child = os.fork()
    if child == 0:
        os._exit(run_pytest([f"tests/{name}" for name in given.tests], [LiveTrials(try_live)]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 5):  # 5: pytest itself has run no test
        raise RuntimeError(f"The process that tries mutants ended with {code}.")
    trials = ImportedTrials(given.work)
    for file, mutant, tests in imported:
        if time.monotonic() < end:
            outcomes.add(file, mutant, trials.outcome(file, mutant, tests))


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
    parser.add_argument("--only", nargs="+", help="try mutants of these files or folders")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders of the tests that run")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    coverage = Coverage(given.work, given.tests)
    everything = list(sample(given.seed))
    chosen = everything
    if given.again is not None:
        chosen = list(survivors(json.loads(given.again.read_text())))
    if given.only is not None:
        chosen = [(f, m) for f, m in chosen if f.startswith(tuple(given.only))]
    if given.each is not None:
        chosen = list(of_every_file(chosen, given.each))
    import torch

    torch.set_num_threads(1)
    try_all(chosen, coverage, Outcomes(given.work / "outcomes.jsonl"), given)
    known = Outcomes(given.work / "outcomes.jsonl").known
    tried = [(f, m, known[f, m.place]) for f, m in chosen if (f, m.place) in known]
    counts = Counter(outcome for _, _, outcome in tried)
    known_reasons = reasons()
    why = {
        (f, m): known_reasons[key]
        for f in {file for file, _, _ in tried}
        for m, key in reason_keys(f).items()
        if key in known_reasons
    }
    left = [(f, m, outcome) for f, m, outcome in tried if outcome in ("survived", "not covered")]
    justified = sum((f, m) in why for f, m, _ in left)
    judged = counts["killed"] + counts["survived"] + counts["not covered"]
    result = {
        "command": " ".join(["python -m benchmarks.mutation", *sys.argv[1:]]),
        "packages": PACKAGES,
        "mutants": len(everything),
        "tried": len(tried),
        **counts,
        "score": round(counts["killed"] / max(judged, 1), 3),
        "justified": justified,
        "score without justified": round(counts["killed"] / max(judged - justified, 1), 3),
        "survivors": [
            {"file": f, "line": m.line, "was": m.was, "becomes": m.becomes, "outcome": outcome}
            | ({"why": why[f, m]} if (f, m) in why else {})
            for f, m, outcome in left
        ],
    }
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print({name: value for name, value in result.items() if name != "survivors"})


if __name__ == "__main__":
    main()
