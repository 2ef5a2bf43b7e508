"""Run tests on several versions of PyTorch, each in an environment of its own.

    python -m benchmarks.matrix --out matrix.md tests/paper tests/solvers

An environment has the library, PyTorch and the packages of the tests, and is kept in ``--work`` for the
next call. Tests that need another package are skipped, as the table says. ``--index URL`` is an index
with builds for the CPU, such as PyTorch's own; without it, pip's usual one is asked, whose builds for
Linux come with gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
VERSIONS = (
    "2.9.0",
    "2.11.0",
    "2.13.0",
)  # the oldest that pyproject.toml allows, one between, newest
PACKAGES = ("numpy", "scipy", "mpmath", "pytest", "hypothesis", "rich", "typer", "matplotlib")


def environment(version: str, work: Path, index: str | None) -> Path:
    """Return the Python of an environment with one version of PyTorch, made if it is not there."""
    folder = work / f"torch-{version}"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    source = [] if index is None else ["--index-url", index]
    subprocess.run([*install, f"torch=={version}", *source], check=True)
    subprocess.run([*install, *PACKAGES, "-c", str(ROOT / "constraints.txt")], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    stamp.touch()
    return python


def outcome(python: Path, tests: list[str], report: Path) -> tuple[dict[str, int], Counter[str]]:
    """Run tests and return the numbers of their outcomes, and how often each reason to skip came up."""
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-k", "not compile", *tests], cwd=ROOT, env=own, check=False)
    suite = ElementTree.parse(report).getroot()[0]
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    reasons: Counter[str] = Counter()
    for skipped in suite.iter("skipped"):
        reasons[skipped.attrib.get("message", "no reason")] += 1
    return count, reasons


def row(version: str, count: dict[str, int], reasons: Counter[str]) -> str:
    """Return the line of the table for one version."""
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    why = "; ".join(f"{number}: {reason}" for reason, number in reasons.most_common())
    return f"| {version} | {passed} | {failed} | {why or '–'} |"


def main(arguments: list[str] | None = None) -> None:
    """Run the tests on all versions and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--index", default=os.environ.get("TORCH_INDEX"))
    parser.add_argument("--work", type=Path, default=Path("runs/matrix"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    lines = ["| PyTorch | passed | failed | skipped, and why |", "| --- | --- | --- | --- |"]
    broken = False
    for version in given.versions:
        try:
            python = environment(version, given.work, given.index)
        except subprocess.CalledProcessError as error:
            lines.append(f"| {version} | – | – | not installed: {error.cmd[-1]} |")
            broken = True
        else:
            report = (given.work / f"torch-{version}.xml").resolve()
            count, reasons = outcome(python.absolute(), given.tests, report)
            lines.append(row(version, count, reasons))
            broken |= count["failures"] + count["errors"] > 0
        given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(broken)


if __name__ == "__main__":
    main()
