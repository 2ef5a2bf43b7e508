"""The command `python -m benchmarks.fingerprints`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.fingerprints import __doc__ as description
from benchmarks.fingerprints import distributed
from benchmarks.fingerprints.cases import cases
from benchmarks.fingerprints.digests import Prints, differences
from benchmarks.fingerprints.training import fingerprint


def fingerprints(only: str = "") -> Prints:
    """Return the digests of all runs whose name contains `only`.

    A run that raises an exception has the text of the exception in place of its digests.
    """
    found: Prints = {}
    for name, case in cases().items():
        if only in name:
            try:
                found[name] = fingerprint(case)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found | distributed.fingerprints(lambda name: only in name)


def load(path: Path, only: str = "") -> Prints:
    """Return the digests in a file, for runs whose name contains `only`."""
    return {name: own for name, own in json.loads(path.read_text()).items() if only in name}


def main() -> None:
    """Parse the arguments, then write fingerprints or compare two files of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fingerprints",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="train all models and write the digests here")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name contains TEXT")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two such files")
    options = parser.parse_args()
    if options.compare:
        one, other = (load(path, options.only) for path in options.compare)
        lines = differences(one, other)
        print(*lines, f"{len(lines)} of {len({*one, *other})} runs differ.", sep="\n")
        sys.exit(bool(lines))
    if options.out is None:
        parser.error("give --out FILE or --compare A B")
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = fingerprints(options.only)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    errors = {name: own["error"] for name, own in found.items() if "error" in own}
    for name, error in errors.items():
        print(f"{name}: {error}")
    print(f"{len(found)} runs in {time.perf_counter() - start:.0f} s, {len(errors)} raised errors.")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
