"""Compare the host's work in a training step between two versions of the library.

    python -m benchmarks.host_time --other OTHER/src --turns 7 --out host-time.json

The model is as deep as the study's deep autoencoder and so narrow that its arithmetic takes no time:
what is left is the work of Python, which bounds an ordinary loop on a GPU. `passes` is a forward and a
backward pass with the hooks of the optimizer, `step` is `opt.step()`, `bare` are the passes without
optimizer. Each version runs in processes of its own, in turns; the table has medians of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import thread_time

from benchmarks.options import add_options

METHODS = ("locoprop-m", "locoprop-s")
LAYERS, WIDTH, ROWS, STEPS, WARM = 18, 8, 4, 400, 50
KEYS = ("bare", "passes", "step")


def measure(method: str) -> dict[str, float]:
    """Return the median milliseconds of each part with the library that is imported."""
    import torch
    from torch import nn

    from torch_locoprop import LocoProp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    x = torch.rand(ROWS, WIDTH)
    loss_fn = nn.BCEWithLogitsLoss(reduction="sum")
    times: dict[str, list[float]] = {key: [] for key in KEYS}

    def passes() -> None:
        loss_fn(model(x), x).backward()

    for number in range(STEPS):
        start = thread_time()
        passes()
        if number >= WARM:
            times["bare"].append(thread_time() - start)
        model.zero_grad()
    opt = LocoProp(model, lr=1e-4, variant=method, gamma=10.0, output_transfer="sigmoid")
    for number in range(STEPS):
        start = thread_time()
        passes()
        middle = thread_time()
        opt.step()
        end = thread_time()
        opt.zero_grad()
        if number >= WARM:
            times["passes"].append(middle - start)
            times["step"].append(end - middle)
    return {key: 1000 * median(found) for key, found in times.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure both versions in turns, or one in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, help="folder with the package of the other version")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--measure", choices=METHODS, help=argparse.SUPPRESS)
    add_options(parser, "out")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    if options.other is None:
        parser.error("Give --other, the folder with the package of the other version.")
    root = Path(__file__).parents[1]
    sources = {"before": options.other.resolve(), "after": root / "src"}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for _ in range(options.turns):
        for method in METHODS:
            for version, source in sources.items():
                command = [sys.executable, __file__, "--measure", method]
                own = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{root}"}
                done = subprocess.run(command, env=own, check=True, capture_output=True, text=True)
                for key, value in json.loads(done.stdout).items():
                    parts = found.setdefault(method, {}).setdefault(key, {})
                    parts.setdefault(version, []).append(round(value, 4))
    print(f"{'':20} {'before':>9} {'after':>9} {'ratio':>7}   ms, medians of {options.turns} turns")
    for method, parts in found.items():
        for key, times in parts.items():
            before, after = median(times["before"]), median(times["after"])
            print(f"{method:12} {key:7} {before:9.3f} {after:9.3f} {after / before:7.3f}")
    if options.out is not None:
        options.out.write_text(json.dumps({"milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
