"""Runs of `defaults`: train a model of a task by a method, and keep the result in a cache.

A run is divided into `PARTS` parts of equally many steps. Its result has the mean training loss of
each part and the time at the end of each; all numbers of the tables come from these. The loss of a
step is that of its batch before the update.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_locoprop
from benchmarks.clock import now
from benchmarks.default_groups import TASKS
from benchmarks.default_methods import OURS, build
from benchmarks.default_tasks import Data, Task

PARTS = 20
FINAL = 2
"""The final loss is the mean over the last so many parts: over the last tenth of the steps."""

ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Variables of the processes that train, unless they are set already.

With the first, threads do not wait busily for a core that another program has. With the second, the
products in bfloat16 of torch's Muon work on processors that lack some instructions.
"""


@dataclass(frozen=True)
class Job:
    """What a run is.

    Args:
        task: name of the task.
        method: name of the method.
        settings: its settings.
        seed: seed of the weights and of the batches.
        device: `cpu` or `cuda`.
    """

    task: str
    method: str
    settings: Mapping[str, Any]
    seed: int
    device: str

    @property
    def key(self) -> str:
        """A hash of all that decides the result: the code of `ours` too."""
        parts = {
            **asdict(self),
            "settings": sorted(self.settings.items()),
            "fingerprint": TASKS[self.task].fingerprint,
            "code": code_fingerprint() if self.method == OURS else None,
        }
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Args:
        key: the key of its job.
        job: the job as a dictionary.
        losses: mean training loss of each part; shorter if the run diverged.
        seconds: time from the start to the end of each part.
        test: test loss at the end, or None if the run diverged.
        error: the error that ended the run, or None.
        timed: True if the times were measured on an otherwise idle machine.
        threads: threads of the CPU.
        torch: version of torch.
    """

    key: str
    job: dict[str, Any]
    losses: list[float]
    seconds: list[float]
    test: float | None
    error: str | None
    timed: bool
    threads: int
    torch: str

    @property
    def final(self) -> float:
        """The mean training loss of the last tenth of the steps; infinite if the run diverged."""
        if len(self.losses) < PARTS:
            return math.inf
        return sum(self.losses[-FINAL:]) / FINAL

    def at(self, seconds: float) -> float:
        """Return the training loss at a time: the mean of the last two parts, interpolated.

        A run that is faster than that has its final loss. Before the end of the first part the loss
        is that of the first part.
        """
        if len(self.losses) < PARTS:
            return math.inf
        means = [
            sum(part) / len(part)
            for end in range(1, PARTS + 1)
            if (part := self.losses[max(0, end - FINAL) : end])
        ]
        if seconds <= self.seconds[0]:
            return means[0]
        for end in range(1, PARTS):
            if seconds <= self.seconds[end]:
                before, after = self.seconds[end - 1 : end + 1]
                share = (seconds - before) / (after - before)
                return (1 - share) * means[end - 1] + share * means[end]
        return means[-1]


@lru_cache(maxsize=1)
def code_fingerprint() -> str:
    """Return a hash of the library's source files without its study and baselines."""
    root = Path(torch_locoprop.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[0] not in ("study", "baselines"):
            digest.update(f"{place}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# ---- one run ------------------------------------------------------------------------------------


@lru_cache(maxsize=3)
def _data(task: str, folder: Path | None, device: str) -> Data:
    return TASKS[task].data(folder, device)


def indices(size: int, batch: int, seed: int, device: str) -> Iterator[Tensor]:
    """Yield the indices of batches without end, every epoch in a new order."""
    numbers = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=numbers).to(device)
        yield from order.split(batch)[: size // batch]


def train(job: Job, folder: Path | None, timed: bool = False, steps: int | None = None) -> Result:
    """Return the result of a run.

    Args:
        job: what to run.
        folder: the folder with data.
        timed: the machine is idle, so that times count.
        steps: another number of steps than that of the task, for tests; a multiple of `PARTS`.
    """
    task = TASKS[job.task]
    losses: list[float] = []
    seconds: list[float] = []
    test = error = None
    try:
        test = _train(task, job, _data(job.task, folder, job.device), losses, seconds, steps)
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as problem:
        if job.method != OURS:
            raise
        last = traceback.extract_tb(problem.__traceback__)[-1]
        error = f"{type(problem).__name__}: {problem} ({Path(last.filename).name}:{last.lineno})"
    return Result(
        *(job.key, asdict(job), losses, seconds, test, error),
        *(timed, torch.get_num_threads(), torch.__version__),
    )


def _train(
    task: Task, job: Job, data: Data, losses: list[float], seconds: list[float], steps: int | None
) -> float | None:
    """Train, append to `losses` and `seconds`, and return the test loss unless the run diverged."""
    torch.manual_seed(job.seed)
    model = task.model().to(job.device)
    optimizer = build(job.method, model, task, job.settings)
    batches = indices(data.size, task.batch, job.seed, job.device)
    began = now(job.device)
    for _ in range(PARTS):
        part = []
        for _ in range((steps or task.steps) // PARTS):
            inputs, targets = data.batch(next(batches))
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            part.append(loss.detach())
        mean = torch.stack(part).double().mean().item()
        if not math.isfinite(mean):
            return None
        losses.append(_rounded(mean))
        seconds.append(_rounded(now(job.device) - began))
    model.eval()
    with torch.no_grad():
        inputs, targets = data.test
        value = task.loss(model(inputs), targets).item()
    if getattr(task.loss, "reduction", "mean") == "sum":  # as for a batch
        value *= task.batch / len(inputs)
    return _rounded(value) if math.isfinite(value) else None


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


# ---- many runs ----------------------------------------------------------------------------------


def read_results(path: Path) -> list[Result]:
    """Return the results in a file of `defaults`."""
    return [Result(**row) for row in json.loads(path.read_text())["runs"]]


class Cache:
    """Results by the keys of their jobs: files of a folder, and those of a published file.

    Args:
        folder: the folder to which new results are written.
        published: a file of `defaults` with results that need not be computed again, if it exists.
    """

    def __init__(self, folder: Path, published: Path | None) -> None:
        self._folder = folder
        known = read_results(published) if published and published.is_file() else []
        self._published = {result.key: result for result in known}

    def get(self, key: str, timed: bool) -> Result | None:
        """Return the result of that key, with `timed` only one whose times count."""
        path = self._folder / f"{key}.json"
        own = Result(**json.loads(path.read_text())) if path.is_file() else None
        for result in (own, self._published.get(key)):
            if result is not None and (result.timed or not timed):
                return result
        return None

    def put(self, result: Result) -> None:
        """Write a result, in one atomic step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{result.key}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(result)))
        part.replace(path)


def _prepare(threads: int) -> None:
    warnings.simplefilter("ignore")  # of ours in each run; `summary()` has the same
    torch.set_num_threads(threads)


def run_all(
    jobs: Iterable[Job],
    cache: Cache,
    *,
    folder: Path | None,
    processes: int,
    threads: int,
    timed: bool,
) -> dict[str, Result]:
    """Return the results of jobs by their keys; run those that the cache does not have.

    Runs happen in processes of their own, and a line is printed for each. Results with an error are
    not kept in the cache.
    """
    wanted = {job.key: job for job in jobs}
    found = {key: result for key in wanted if (result := cache.get(key, timed)) is not None}
    missing = [job for key, job in wanted.items() if key not in found]
    missing.sort(key=lambda job: -TASKS[job.task].steps)  # the longest first
    if not missing:
        return found
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    print(f"{len(missing)} runs, {len(found)} more are in the cache", flush=True)
    began = time.time()
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_prepare, initargs=(threads,)
    ) as pool:
        futures = {pool.submit(train, job, folder, timed): job for job in missing}
        for count, future in enumerate(as_completed(futures), 1):
            job, result = futures[future], future.result()
            found[result.key] = result
            if result.error is None:
                cache.put(result)
            shown = " ".join(f"{name}={value}" for name, value in job.settings.items())
            loss = result.error or f"{result.final:.5g}"
            spent = f"{result.seconds[-1]:.1f} s" if result.seconds else "-"
            print(
                f"{count}/{len(missing)} {time.time() - began:.0f} s: {job.task} {job.method} "
                f"{shown} seed {job.seed}: {loss}, {spent}",
                flush=True,
            )
    return found
