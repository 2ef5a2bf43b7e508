"""Long checks: killed and resumed runs, many steps without growth of memory, many optimizers.

    python -m benchmarks.soak --kills 1000 --steps 100000 --optimizers 1000 --out soak.json

- A training run and a search of settings are killed (SIGKILL) at random moments and resumed, over and
  over. Each that gets to its end must have the same bits as one that nobody disturbed.
- A model trains for many steps with each of several methods; the memory of the process and the number
  of Python objects may not grow after the first tenth.
- Many optimizers are made for one model, used once and dropped; nothing of them may stay.

It prints what it does, and exits with 1 if a promise is broken. A count of 0 leaves a check out.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.steady import resident_mib
from benchmarks.step_table import write
from torch_locoprop import LocoProp
from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.tuning import campaign, spaces

# What a process imports, some of it in its first step: without it, a kill would mostly hit imports.
PRELOADED = (
    *("torch._dynamo", "torch_locoprop.study.training.runner"),
    *("torch_locoprop.study.tuning.search", "torch_locoprop.study.methods"),
)
LONGEST = 0.8  # seconds between start and kill of a process, or as long as one takes undisturbed
GROWTH_MIB = 8.0  # of the resident memory, that the allocator may take after the first steps
METHODS: dict[str, dict[str, Any]] = {
    "general": {},
    "locoprop-m": {"preset": "paper-m", "lr": 1e-4},
    "locoprop-s": {"preset": "paper-s", "lr": 1e-4},
    "exact": {"variant": "locoprop-s", "solver": "exact", "lr": 1e-3},
}


class BrokenPromiseError(AssertionError):
    """Raised if a check fails."""


# ---- killed and resumed ----------------------------------------------------------------------------


def data() -> Dataset:
    """Return a few small images, the same in each call."""
    draw = torch.rand(50, 12, generator=torch.Generator().manual_seed(7))
    return Dataset("curves", draw[:40], draw[40:], "made for the soak test")


def train(folder: str, started: Event, epochs: int) -> None:
    """Resume a run to its end."""
    torch.set_num_threads(1)
    started.set()
    config = RunConfig("locoprop-m", model="12-8-3", batch_size=15, epochs=epochs, warmup_epochs=1)
    run(config, folder, resume=True, data=data(), checkpoint_seconds=0.0)


def tune(folder: str, started: Event, trials: int) -> None:
    """Resume a search to its end."""
    torch.set_num_threads(1)
    started.set()
    base = RunConfig("adam", model="12-8-3", batch_size=15, epochs=6)
    space = spaces.of(methods.get("adam"), ranges={"lr": "1e-4:1e-1"})
    campaign.tune(base, space, folder, trials=trials, population=3, data=data())


def run_bits(folder: Path) -> Any:
    """Return all that a run has computed, without times."""
    files = RunFolder(folder)
    losses = [(row.epoch, row.train_loss, row.test_loss) for row in files.metrics()]
    saved = files.checkpoint()
    assert saved is not None
    states = [list(state.items()) for state in saved.optimizer["state"].values()]
    tensors = [*saved.model.values(), *(value for state in states for _, value in state)]
    return losses, [tensor.tolist() for tensor in tensors]


def search_bits(folder: Path) -> Any:
    """Return the settings and the losses of all trials of a search, without times."""
    rows = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def survive_kills(
    work: Callable[[str, Event, int], None],
    size: int,
    bits: Callable[[Path], Any],
    kills: int,
    seed: int,
) -> dict[str, int]:
    """Kill a piece of work at random moments, and compare each end with an undisturbed one.

    Args:
        work: resumes the work in a folder to its end, in a process of its own.
        size: how long it is: epochs or trials.
        bits: returns what the work has computed in a folder.
        kills: number of kills.
        seed: of the moments.

    Returns:
        The numbers of kills, of kills that hit a process which had written to its folder, and of ends.
    """
    # A server that has imported torch forks every process, which takes milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    moments, done, wrote, ended = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as place:

        def begin(folder: Path) -> Any:
            started = context.Event()
            process = context.Process(target=work, args=(str(folder), started, size))
            process.start()
            if not started.wait(60):
                raise BrokenPromiseError("a process did not start")
            return process

        def finish(folder: Path) -> Any:
            process = begin(folder)
            process.join()
            if process.exitcode != 0:
                raise BrokenPromiseError(f"a resumed process ended with {process.exitcode}")
            return bits(folder)

        expected = finish(Path(place) / "undisturbed")
        began = time.monotonic()  # of the first process the server has to be started
        check_same(finish(Path(place) / "again"), expected, "without kills")
        longest = max(LONGEST, time.monotonic() - began)
        folder = Path(place) / "0"
        while done < kills:
            before = files(folder)
            process = begin(folder)
            process.join(moments.uniform(0, longest))
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                done += 1
                wrote += files(folder) != before
                continue
            if process.exitcode != 0:
                raise BrokenPromiseError(f"a resumed process ended with {process.exitcode}")
            ended += 1
            check_same(bits(folder), expected, f"after {done} kills")
            folder = Path(place) / str(ended)
        check_same(finish(folder), expected, f"after {done} kills")
    return {"kills": done, "after_a_write": wrote, "ends": ended + 1}


def files(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of all files in a folder."""
    found = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]


def check_same(found: Any, expected: Any, when: str) -> None:
    if found != expected:
        raise BrokenPromiseError(f"{when}, the result is another one than without kills")


# ---- memory ----------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def steps_without_growth(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train for many steps; compare memory and objects after a tenth of them and at the end."""
    net, x = model(), torch.rand(32, 8)
    opt = LocoProp(net, output_transfer="sigmoid", **settings)
    marks = {}
    for step in range(1, steps + 1):
        nn.functional.binary_cross_entropy_with_logits(net(x), x).backward()
        opt.step()
        opt.zero_grad()
        if step in (steps // 10, steps):
            gc.collect()
            marks[step] = (resident_mib() or 0.0, len(gc.get_objects()))
    (first, objects), (last, after) = marks[steps // 10], marks[steps]
    if last - first > GROWTH_MIB or after > objects + 50:
        raise BrokenPromiseError(f"memory grew: {marks}")
    if not all(p.isfinite().all() for p in net.parameters()):
        raise BrokenPromiseError("weights are not finite")
    return {"steps": steps, "grown_mib": round(last - first, 2), "new_objects": after - objects}


def optimizers_dropped(count: int) -> dict[str, Any]:
    """Make, use and drop optimizers of one model; nothing of them may stay."""
    net, x, marks = model(), torch.rand(32, 8), []
    for number in range(count):
        opt = LocoProp(
            net, output_transfer="sigmoid", **list(METHODS.values())[number % len(METHODS)]
        )
        nn.functional.binary_cross_entropy_with_logits(net(x), x).backward()
        opt.step()
        opt.zero_grad()
        del opt
        if number + 1 in (count // 10, count):
            gc.collect()
            marks.append((resident_mib() or 0.0, len(gc.get_objects())))
    hooks = [h for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    hooks += [p._post_accumulate_grad_hooks or {} for p in net.parameters()]
    if any(hooks) or marks[-1][1] > marks[0][1] + 50 or marks[-1][0] - marks[0][0] > GROWTH_MIB:
        raise BrokenPromiseError(f"optimizers left something behind: {marks}, {hooks}")
    grown, new = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    return {"optimizers": count, "grown_mib": round(grown, 2), "new_objects": new}


def main(arguments: list[str] | None = None) -> None:
    """Run all checks and write what was done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="of training, and of a search")
    parser.add_argument("--steps", type=int, default=100_000, help="of all methods together")
    parser.add_argument("--optimizers", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=200, help="of the training run")
    parser.add_argument("--trials", type=int, default=24, help="of the search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = ("kills", "steps", "optimizers", "epochs", "trials", "seed")
    counts = " ".join(f"--{name} {getattr(given, name)}" for name in names)
    content: dict[str, Any] = {"command": f"python -m benchmarks.soak {counts}"}
    checks: dict[str, Callable[[], dict[str, Any]]] = {}
    if given.steps:
        for name, own in METHODS.items():
            each = given.steps // len(METHODS)
            checks[f"steps of {name}"] = partial(steps_without_growth, each, own)
    if given.optimizers:
        checks["optimizers"] = partial(optimizers_dropped, given.optimizers)
    often = given.kills, given.seed
    if given.kills and given.epochs:
        checks["training"] = partial(survive_kills, train, given.epochs, run_bits, *often)
    if given.kills and given.trials:
        checks["search"] = partial(survive_kills, tune, given.trials, search_bits, *often)
    for name, check in checks.items():
        began = time.monotonic()
        content[name] = {**check(), "seconds": round(time.monotonic() - began, 1)}
        print(name, content[name], flush=True)
        content["environment"] = environment("cpu")
        if given.out is not None:
            write(given.out, content)


if __name__ == "__main__":
    try:
        main()
    except BrokenPromiseError as error:
        print(f"broken: {error}")
        sys.exit(1)
