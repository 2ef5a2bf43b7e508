"""Which tests cover which line of the sources, and how long each test takes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.mutants import Mutant

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "torch_locoprop"
# Also the longer tests, but none that compiles: these take many seconds each.
SELECTED = ["-m", "", "-k", "not compile", "-p", "no:cacheprovider"]


class Coverage:
    """The result of one run of tests, measured when these tests of these sources have none yet.

    Args:
        work: A folder for results.
        tests: Files or folders below ``tests``. Only tests among them are ever named: a test that was
            measured but does not run would otherwise look as if it had failed.
    """

    def __init__(self, work: Path, tests: Iterable[str]) -> None:
        self.paths = [f"tests/{name}" for name in tests]
        self.digest = digest_of([*self.paths, *contents("src"), *contents("tests")])
        self.folder = work / f"measured-{self.digest}"
        if not (self.folder / "durations.xml").exists():
            self._measure()
        from coverage import CoverageData

        data = CoverageData(str(self.folder / "coverage"))
        data.read()
        self._contexts = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        data.close()  # a forked process must not inherit the connection
        self.seconds = durations(self.folder / "durations.xml")

    def tests_of(self, file: str, mutant: Mutant, most: float) -> list[str]:
        """Return tests that cover a mutant, the fastest first, of at most so many seconds."""
        by_line = self._contexts.get(str(SOURCES / file), {})
        lines = range(mutant.line, mutant.last_line + 1)
        contexts = {context for line in lines for context in by_line.get(line, [])}
        if contexts == {""}:  # code that runs when it is imported: every test of the file may tell
            contexts = {context for own in by_line.values() for context in own}
        names = sorted({c.rpartition("|")[0] for c in contexts} & self.seconds.keys())
        if contexts and not names:  # a module of data only: the tests of its package may tell
            package = file.partition("/")[0]
            names = sorted(name for name in self.seconds if name.startswith(f"tests/{package}/"))
        return fastest(names, self.seconds, most)

    def at_import(self, file: str, mutant: Mutant) -> bool:
        """Return True for a line that also runs when its module is imported."""
        by_line = self._contexts.get(str(SOURCES / file), {})
        return any("" in by_line.get(n, []) for n in range(mutant.line, mutant.last_line + 1))

    def _measure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self.folder / "durations.xml"
        report = ["--cov-context=test", "--cov-report=", f"--junitxml={done}.part"]
        environment = {**os.environ, "COVERAGE_FILE": f"{self.folder.resolve()}/coverage"}
        command = [sys.executable, "-m", "pytest", *self.paths, "-q", *SELECTED, *report]
        command += ["--cov=torch_locoprop", "-p", "no:xdist"]
        subprocess.run(command, cwd=ROOT, check=True, env=environment)
        Path(f"{done}.part").rename(done)


def fastest(names: Iterable[str], seconds: dict[str, float], most: float) -> list[str]:
    """Return the fastest tests, of at most so many seconds; at least one where there is any."""
    chosen: list[str] = []
    total = 0.0
    for name in sorted(names, key=lambda name: seconds[name]):
        total += seconds[name]
        if total > most and chosen:
            break
        chosen.append(name)
    return chosen


def durations(report: Path) -> dict[str, float]:
    """Return the seconds of all tests that passed, by name, from a report in JUnit's format."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if all(case.find(tag) is None for tag in ("skipped", "failure", "error")):
            path = case.attrib["classname"].replace(".", "/") + ".py"
            found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


def contents(folder: str) -> list[bytes]:
    """Return the contents of all Python files of a folder of the repository."""
    return [path.read_bytes() for path in sorted((ROOT / folder).rglob("*.py"))]


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Return a short digest of texts and contents."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()[:12]
