"""Compares random programs with the oracle until it is interrupted: ``make fuzz``.

    python -m fuzz.endless [first seed] [number of programs]

Prints the seed of each failure and the smallest program it can be reduced to. Ctrl-C ends it with the
number of programs. The exit code is 1 if one failed.
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
from fuzz.compare import difference, reduced
from fuzz.generate import program


def main() -> None:
    """Run programs from a seed on, and report the failures."""
    torch.set_num_threads(1)
    first = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() // 10**9 * 10**6
    seeds = itertools.count(first)
    if len(sys.argv) > 2:
        seeds = itertools.islice(seeds, int(sys.argv[2]))
    count = failed = 0
    try:
        for seed in seeds:
            told = difference(program(seed))
            count += 1
            if told is not None:
                failed += 1
                print(f"seed {seed}: {told}\nreduced to:\n{reduced(program(seed))}\n", flush=True)
            if count % 500 == 0:
                print(f"{count} programs from seed {first} on, {failed} failed", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{count} programs from seed {first} on, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
