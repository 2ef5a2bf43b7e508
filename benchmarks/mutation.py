"""Do the tests notice small changes of the mathematics? All mutants, and which survive.

    python -m benchmarks.mutation --minutes 300 --most 5 60 --out benchmarks/results/mutation.json
    python -m benchmarks.mutation --again benchmarks/results/mutation.json --out again.json

A first run of the tests finds which of them cover which line (kept in ``--work``, some minutes). For
each mutant, those that cover the changed line run in order of their duration, up to ``--most`` seconds
of them, until one fails. A mutant that no test fails survives; with several numbers, survivors are
tried again with more seconds. A mutant that runs into the limit of time is counted by itself. The score
is killed / (killed + survived + not covered). ``--again`` tries the survivors of an earlier result,
``--each 3`` three mutants of every file, ``--only paper/gram.py`` those of some files; ``--tests paper
solvers`` runs the tests of these folders.

``equivalent_mutants.json`` says of survivors why no result changes. Each reason names a line of the
source, as text, and changes on it; the reason holds for all places of the line with this change.

A mutant inside of a function is put into a process that has imported everything and collected all
tests, which takes milliseconds; one outside of functions is imported by a process of its own, which
takes seconds and is tried last. Outcomes are kept in ``--work``: the same command goes on where it was.
A killed mutant is tried again if its file changes, a survivor if any source or test does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.mutants import Mutant, mutants_of
from benchmarks.mutants_live import Swaps, swaps
from benchmarks.mutation_coverage import ROOT, SOURCES, Coverage, digest_of
from benchmarks.mutation_trials import ImportedTrials, LiveTrials, run_pytest, use_sources

PACKAGES = ("paper", "solvers", "stepping", "baselines")
TESTS = ("paper", "solvers", "config", "layers", "stepping", "recording", "reporting", "promises")
TESTS = (*TESTS, "baselines", "fuzz", "functional")
REASONS = Path(__file__).with_name("equivalent_mutants.json")
Named = tuple[str, Mutant]
"""A mutant with its file, relative to the package."""


def sample(seed: int) -> Iterator[Named]:
    """Yield all mutants of the packages in a random order, with the file of each."""
    files = sorted(path for package in PACKAGES for path in (SOURCES / package).rglob("*.py"))
    found = [(str(f.relative_to(SOURCES)), m) for f in files for m in mutants_of(f.read_text())]
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
        self.read()

    def read(self) -> None:
        """Read the file, to which other processes may have added lines."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = map(json.loads, lines)
        self._known = {(row["file"], row["place"], row["source"]): row for row in rows}

    def of(self, file: str, mutant: Mutant) -> str | None:
        """Return the last outcome of a mutant of the present source of a file."""
        row = self._known.get((file, mutant.place, source_digest(file)))
        return None if row is None else row["outcome"]

    def is_final(self, file: str, mutant: Mutant, tests: str, most: float) -> bool:
        """Return True for a mutant that is killed or was tried with these tests for as long."""
        row = self._known.get((file, mutant.place, source_digest(file)))
        if row is None:
            return False
        return row["outcome"] == "killed" or (row["tests"] == tests and row["most"] >= most)

    def add(self, file: str, mutant: Mutant, outcome: str, tests: str, most: float) -> None:
        """Store and print the outcome of a mutant.

        Args:
            file: The file of the mutant.
            mutant: The mutant.
            outcome: What became of it.
            tests: The digest of the tests, of :class:`Coverage`.
            most: The seconds of tests that it was given.
        """
        tried = {"source": source_digest(file), "tests": tests, "most": most}
        row = {"file": file, **asdict(mutant), "outcome": outcome, **tried}
        with open(self._path, "a") as lines:
            lines.write(json.dumps(row) + "\n")
        self._known[file, mutant.place, row["source"]] = row
        print(outcome, file, mutant.line, mutant.was, "->", mutant.becomes, flush=True)


@cache
def source_digest(file: str) -> str:
    """Return a digest of the source of a file of the package."""
    return digest_of([(SOURCES / file).read_bytes()])


class Round:
    """Tries mutants with the tests that cover them, up to so many seconds of tests for each."""

    def __init__(self, coverage: Coverage, outcomes: Outcomes, most: float, end: float) -> None:
        self._coverage, self._outcomes, self._most, self._end = coverage, outcomes, most, end

    def run(self, chosen: list[Named], trials: ImportedTrials) -> None:
        """Try all mutants without a final outcome until the time is over, the fast ones first."""
        live: list[tuple[Named, Swaps]] = []
        imported: list[Named] = []
        for file, mutant in chosen:
            if self._outcomes.is_final(file, mutant, self._coverage.digest, self._most):
                continue
            path = SOURCES / file
            changes = swaps(mutant, path.read_text(), str(path))
            if not self._tests(file, mutant):
                self._add(file, mutant, "not covered")
            elif changes and not self._coverage.at_import(file, mutant):
                live.append(((file, mutant), changes))
            else:
                imported.append((file, mutant))
        if live:
            in_live_process(self._coverage, lambda trials: self._try_live(live, trials))
            self._outcomes.read()
        imported += [named for named, _ in live if self._outcomes.of(*named) == "unable"]
        for file, mutant in imported:
            if time.monotonic() < self._end:
                tests = self._tests(file, mutant)
                self._add(file, mutant, trials.outcome(file, mutant, tests, self._limit))

    def _try_live(self, live: list[tuple[Named, Swaps]], trials: LiveTrials) -> None:
        for (file, mutant), changes in live:
            if time.monotonic() < self._end:
                tests = self._tests(file, mutant)
                self._add(file, mutant, trials.outcome(changes, tests, self._limit))

    def _tests(self, file: str, mutant: Mutant) -> list[str]:
        return self._coverage.tests_of(file, mutant, self._most)

    @property
    def _limit(self) -> float:
        return 30 + 8 * self._most

    def _add(self, file: str, mutant: Mutant, outcome: str) -> None:
        self._outcomes.add(file, mutant, outcome, self._coverage.digest, self._most)


def in_live_process(coverage: Coverage, loop: Callable[[LiveTrials], None]) -> None:
    """Call a function in a process that has collected the tests that were measured."""
    child = os.fork()
    if child == 0:
        use_sources(ROOT / "src")
        os._exit(run_pytest(coverage.paths, [LiveTrials(coverage.seconds, loop)]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 5):  # 5: pytest itself has run no test
        raise RuntimeError(f"The process that tries mutants ended with {code}.")


def leave_out_failing(coverage: Coverage) -> None:
    """Leave out tests that fail alone on unchanged sources, which would kill every mutant."""
    report = coverage.folder / "failing.txt"
    if not report.exists():
        in_live_process(coverage, lambda trials: trials.write_failing(report))
    for name in report.read_text().splitlines():
        print("left out, fails without a mutant:", name)
        del coverage.seconds[name]


def score_of(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return counts of outcomes with the share of mutants that are killed."""
    judged = counts["killed"] + counts["survived"] + counts["not covered"]
    return {
        **counts,
        "score": round(counts["killed"] / max(judged, 1), 4),
        "score without justified": round(
            counts["killed"] / max(judged - counts["justified"], 1), 4
        ),
    }


def result_of(chosen: list[Named], outcomes: Outcomes) -> dict[str, Any]:
    """Return counts and scores of mutants, and what is to say about those that are not killed."""
    known_reasons = reasons()
    keys = {f: reason_keys(f) for f in {file for file, _ in chosen}}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    left = []
    for file, mutant in sorted(chosen, key=lambda named: (named[0], named[1].place)):
        outcome, why = outcomes.of(file, mutant), known_reasons.get(keys[file][mutant])
        if outcome is None:
            continue
        package = file.partition("/")[0]
        found = [outcome]
        if outcome in ("survived", "not covered"):
            found += ["justified"] if why else []
        if outcome != "killed":
            change = {"line": mutant.line, "was": mutant.was, "becomes": mutant.becomes}
            row = {"file": file, **change, "outcome": outcome}
            left.append(row | ({"why": why} if why else {}))
        for each in ("all", package):
            counts[each].update(found)
    return {
        "mutants": len(chosen),
        "tried": sum(outcomes.of(*named) is not None for named in chosen),
        **score_of(counts.pop("all", Counter())),
        "by package": {name: score_of(counts[name]) for name in sorted(counts)},
        "survivors": left,
    }


def revision() -> str:
    """Return the commit that is checked out, with a plus sign if sources or tests differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "src", "tests")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main() -> None:
    """Try mutants for some time and write the score and the survivors to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/mutation"))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument(
        "--most", type=float, nargs="+", default=[30], help="seconds of tests for one mutant"
    )
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
    leave_out_failing(coverage)
    chosen = list(sample(given.seed))
    if given.again is not None:
        chosen = list(survivors(json.loads(given.again.read_text())))
    if given.only is not None:
        chosen = [(f, m) for f, m in chosen if f.startswith(tuple(given.only))]
    if given.each is not None:
        chosen = list(of_every_file(chosen, given.each))
    outcomes, trials = Outcomes(given.work / "outcomes.jsonl"), ImportedTrials(given.work)
    end = time.monotonic() + 60 * given.minutes
    for most in given.most:
        Round(coverage, outcomes, most, end).run(chosen, trials)
    result = {
        "command": " ".join(["python -m benchmarks.mutation", *sys.argv[1:]]),
        "revision": revision(),
        "packages": PACKAGES,
        "tests": given.tests,
        **result_of(chosen, outcomes),
    }
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print({name: value for name, value in result.items() if name != "survivors"})


if __name__ == "__main__":
    main()
