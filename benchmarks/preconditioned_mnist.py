"""LocoProp-M with few preconditioned iterations on MNIST, averaged over batches: where does it end?

    export TORCH_LOCOPROP_DATA=.data
    python -m benchmarks.preconditioned_mnist --device cuda --precision tf32 --processes 8 --out FOLDER

`solver="preconditioned"` solves each batch's local problem by itself. What remains over many batches
depends on how their solutions are averaged, so here one solver does both. In each step, one to four
checked iterations find the displacement of a layer; its Nesterov average over the steps is then taken
as it is (`plain`), divided by the root mean square of each output's displacements (`rows`), or replaced
by its polar factor, as in the spectral step (`polar`). C of the preconditioner is a running average
over batches too, and its inverse is renewed every tenth step: the preconditioner decides how fast
iterations are, not where they go.

First every setting of `TRIALS` runs for `--trial-epochs`, beside the spectral step and LocoProp-M with
RMSProp. Then the best one runs for `--epochs` and for `--short-epochs` at three seeds, and the best of
each other form and variant at one. Last, the time of a step alone is measured, as one CUDA graph. Runs
are folders of the study; `summary.json` has all losses and times.

With `rows`, one iteration can do without its check: that is `solver="preconditioned-averaged"` of the
library, whose step is one product of the gradient with the inverse. Its runs alone, beside LocoProp-M
with RMSProp, and the seconds that the steps of a run take:

    python -m benchmarks.preconditioned_mnist --device cuda --precision tf32 --only unchecked \\
        --processes 10 --out FOLDER

`--trials 1` runs it at its defaults only, at all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.clock import milliseconds
from benchmarks.options import add_options
from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.preconditioning import average_size
from torch_locoprop.paper.spectral import has_fast_bf16
from torch_locoprop.paper.tensors import Tensors, join, split, spread
from torch_locoprop.solvers import AveragedPreconditioned, Preconditioned, Spectral
from torch_locoprop.solvers.base import Numbers, States
from torch_locoprop.solvers.spectral import Direction
from torch_locoprop.study.data import datasets
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.methods.record import Method, names, register
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.runner import run

OTHERS = ("locoprop-m", "locoprop-spectral")  # methods of the study to compare with
NAME = "locoprop-preconditioned"
UNCHECKED_NAME = "locoprop-averaged"


@dataclass(frozen=True)
class Averaged(Preconditioned):
    """Preconditioned iterations, whose displacements are averaged over the batches.

    Args:
        form: what is done with the average: `plain`, `rows` or `polar`.
        across: weight of the past in the average of displacements.
        every: number of steps between two renewals of C.
        averaging: weight of the past in the running average of C, at each renewal.
    """

    form: str = "plain"
    across: float = 0.9
    every: int = 10
    averaging: float = 0.8
    stateless = False
    ignores = frozenset({"momentum", "eps", "local_decay"})

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        state = dict(states["weight"])
        if self.renews(problem.number) or "inverse" not in state:
            square = self.square(problem)
            past = state.get("gram", square)
            state["gram"] = torch.lerp(square, past, self.averaging)
            state["inverse"] = self.inverse(state["gram"], dispatch.inverse)
        moved = self.displacement(problem, state["inverse"], local_steps, dispatch.product)
        past = state["average"] if "average" in state else torch.zeros_like(moved)
        state["average"] = torch.lerp(moved, past, self.across)
        found = torch.lerp(moved, state["average"], self.across)
        if self.form == "polar":
            return self._bounded(problem, states, numbers, found, state)
        if self.form == "rows":
            state["rows"], factor = average_size(state.get("rows"), moved, 0.95)
            found = 0.2 * factor * found
        step = split(found, problem.start)
        new = {
            name: t + spread(numbers[name].lr, t) * step[name] for name, t in problem.start.items()
        }
        return new, {**states, "weight": state}

    def _bounded(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        found: Tensor,
        state: Tensors,
    ) -> tuple[Tensors, States]:
        """Return the step along the polar factor of a displacement, as the spectral step takes it."""
        dtype = torch.bfloat16 if found.is_cuda and has_fast_bf16(found) else None
        some = (join(problem.backprop).abs().sum((-2, -1), keepdim=True) != 0).to(found)
        direction = Direction(-found, state, some, dtype)
        factor = dispatch.polar(direction.matrix, dtype)
        return Spectral(bias_rate=0.0).displaced(problem, states, numbers, direction, factor)

    def phase(self, number: int) -> int:
        return int(self.renews(number))

    def renews(self, number: int) -> bool:
        """Return True if C and its inverse are renewed in a step."""
        return Spectral(every=self.every).renews(number)


class Recorded(LocoProp):
    """LocoProp whose steps can be recorded, although its solver is not one of the library's."""

    capturable = True  # type: ignore[assignment]


SETTINGS: dict[str, Any] = {
    "variant": "locoprop-m",
    "form": "plain",
    "lr": 1.0,
    "gamma": 0.01,
    "local_steps": 1,
    "across": 0.9,
    "damping": 0.01,
    "every": 10,
    "averaging": 0.8,
}


def build(model: nn.Module, settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of a run with checked iterations."""
    own = ("form", "across", "damping", "every", "averaging")
    return Recorded(
        model,
        variant=settings["variant"],
        output_transfer="sigmoid",
        solver=Averaged(**{name: settings[name] for name in own}),
        lr=settings["lr"],
        gamma=settings["gamma"],
        local_steps=settings["local_steps"],
        local_reduction="mean",
        decay=0.95,
        weight_decay=settings.get("weight_decay", 0.0),
    )


def build_unchecked(model: nn.Module, settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of a run with the solver of the library."""
    return LocoProp(
        model,
        variant="locoprop-m",
        output_transfer="sigmoid",
        solver=AveragedPreconditioned(every=settings["every"]),
        lr=settings["lr"],
        weight_decay=settings.get("weight_decay", 0.0),
    )


def add_methods() -> None:
    """Add the methods to the study in this process; not on import, for tests list all methods."""
    if NAME not in names():
        register(Method(NAME, build, SETTINGS, "not tuned", label="LocoProp-M preconditioned"))
        label = "LocoProp-M averaged"
        register(Method(UNCHECKED_NAME, build_unchecked, OF_UNCHECKED, "not tuned", label=label))


def trial(form: str, T: int, **more: Any) -> dict[str, Any]:
    """Return the settings of a trial."""
    return {"form": form, "local_steps": T, **more}


def polar(T: int, lr: float, gamma: float, **more: Any) -> dict[str, Any]:
    """Return the settings of a trial with the polar factor."""
    return trial("polar", T, lr=lr, gamma=gamma, across=0.85, damping=0.02, **more)


S = {"variant": "locoprop-s"}
TRIALS: list[dict[str, Any]] = [
    polar(1, 0.015, 0.03),  # with one iteration gamma is a factor that the polar factor removes
    polar(2, 0.015, 0.01),
    polar(2, 0.015, 0.1),
    polar(2, 0.015, 1.0),
    polar(4, 0.015, 0.01),
    polar(4, 0.015, 0.1),
    polar(4, 0.015, 1.0),
    polar(1, 0.015, 0.03, **S),
    polar(2, 0.015, 0.03, **S),
    polar(4, 0.015, 0.03, **S),
    polar(1, 0.01, 0.03),
    polar(1, 0.025, 0.03),
    polar(2, 0.01, 0.1),
    polar(2, 0.025, 0.1),
    polar(3, 0.015, 0.1) | {"damping": 0.1},
    polar(2, 0.015, 0.1) | {"averaging": 0.95},
    trial("rows", 1, lr=0.01),
    trial("rows", 1, lr=0.03),
    trial("rows", 2, lr=0.03, gamma=0.1),
    trial("plain", 1, gamma=0.001),
    trial("plain", 2, gamma=0.002),
    trial("plain", 3, gamma=0.01, across=0.0, averaging=0.0, every=1),  # no average at all
    trial("plain", 3, gamma=0.003, across=0.0, averaging=0.0, every=1),
    trial("plain", 3, gamma=0.005, across=0.0),
]
OF_UNCHECKED: dict[str, Any] = {"lr": 0.03, "every": 10}
UNCHECKED: list[dict[str, Any]] = [{}, {"lr": 0.02}, {"lr": 0.01}, {"every": 20}, {"lr": 0.045}]


def key_of(settings: Mapping[str, Any], defaults: Mapping[str, Any] = SETTINGS) -> str:
    """Return a short name of the settings that differ from the defaults."""
    own = {name: value for name, value in settings.items() if value != defaults[name]}
    return "-".join(f"{name}={value}" for name, value in own.items()) or "defaults"


def work(jobs: Any, results: Any, deadline: float) -> None:
    """Train the configurations of a queue until it is empty or the time is over."""
    torch.set_num_threads(1)
    add_methods()
    while time.time() < deadline:
        try:
            name, values, folder = jobs.get_nowait()
        except queue.Empty:
            return
        try:
            result = run(RunConfig(**values), folder, checkpoint_seconds=1e9)
            last = result.metrics[-1]
            found = {
                "train": last.train_loss,
                "test": last.test_loss,
                "seconds": last.seconds,
                "diverged": last.diverged,
                "losses": [round(row.train_loss, 3) for row in result.metrics],
            }
        except Exception:
            found = {"error": traceback.format_exc()[-1500:]}
        results.put((name, values, found))


def train_all(
    configs: list[tuple[str, dict[str, Any]]], options: argparse.Namespace, deadline: float
) -> list[dict[str, Any]]:
    """Train configurations in several processes, and return what those that ended have reached."""
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for name, values in configs:
        jobs.put((name, values, str(options.out / name)))
    time.sleep(0.2)  # the queue is filled by a thread
    count = min(options.processes, len(configs))
    workers = [context.Process(target=work, args=(jobs, results, deadline)) for _ in range(count)]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while any(worker.is_alive() for worker in workers) or not results.empty():
        try:
            name, values, row = results.get(timeout=0.5)
        except queue.Empty:
            if time.time() > deadline + options.grace:
                for worker in workers:
                    worker.terminate()
                break
            continue
        same = {key: values[key] for key in ("method", "settings", "seed", "epochs")}
        found.append({"name": name, **same, **row})
        if "error" in row:
            print(name, row["error"], flush=True)
        else:
            print(
                f"{name}: {row['train']:.3f} ({row['test']:.3f}) {row['seconds']:.1f} s", flush=True
            )
    for worker in workers:
        worker.join()
    return found


def step_milliseconds(values: dict[str, Any]) -> float:
    """Return the milliseconds of a step of a configuration alone, as one CUDA graph on a GPU."""
    add_methods()
    config = RunConfig(**values)
    images = datasets.load(config.dataset).train[: config.batch_size].to(config.device)
    with matmul_precision(config.precision):
        model = config.build_model().to(config.device)
        step = TrainingStep(model, reconstruction_loss, config.build_optimizer(model))
        few = 2 if config.device == "cpu" else 60
        for _ in range(few):
            step(images, images)
        return statistics.median(
            milliseconds(lambda: step(images, images), 5 * few, config.device) for _ in range(5)
        )


def steps_of(values: dict[str, Any]) -> int:
    """Return the number of steps of a run."""
    config = RunConfig(**values)
    return config.epochs * math.ceil(len(datasets.load(config.dataset).train) / config.batch_size)


def save(folder: Path, content: dict[str, Any]) -> None:
    """Write what was measured so far, should the machine's time end."""
    folder.mkdir(parents=True, exist_ok=True)  # the runs make it too, if any has begun
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")


def run_unchecked(
    config: Callable[..., dict[str, Any]],
    content: dict[str, Any],
    options: argparse.Namespace,
    deadline: float,
) -> None:
    """Run the settings without a check and LocoProp-M with RMSProp, and time their steps.

    The first setting, the defaults, has all seeds.

    Args:
        config: returns the configuration of a run with these settings, epochs and seed.
        content: what the summary has so far; this function adds to it.
        options: the options of the command line.
        deadline: when no other run is started.
    """
    add_methods()
    chosen, seeds, epochs = UNCHECKED[: options.trials], range(options.seeds), options.epochs

    def unchecked(settings: dict[str, Any], seed: int = 0) -> dict[str, Any]:
        return {**config(settings, epochs, seed), "method": UNCHECKED_NAME}

    wanted = [(chosen[0], seed) for seed in seeds] + [(settings, 0) for settings in chosen[1:]]
    runs = [(f"{key_of(s, OF_UNCHECKED)}-s{seed}", unchecked(s, seed)) for s, seed in wanted]
    reference = {**config({}, epochs), "method": "locoprop-m"}
    runs += [(f"locoprop-m-s{seed}", {**reference, "seed": seed}) for seed in seeds]
    content["runs"] = train_all(runs, options, deadline)
    content["ms a step"] = clock = {}
    content["seconds of all steps"] = seconds = {}
    save(options.out, content)
    # The learning rate changes no work: one of the settings stands for all with the same period.
    periods = {s.get("every", OF_UNCHECKED["every"]): s for s in reversed(chosen)}
    timed = {f"unchecked, every {n}": unchecked(s) for n, s in periods.items()}
    for name, values in {**timed, "locoprop-m": reference}.items():
        clock[name] = step_milliseconds(values)
        seconds[name] = 1e-3 * clock[name] * steps_of(values)
        print(f"{name}: {clock[name]:.3f} ms a step alone, {seconds[name]:.2f} s", flush=True)
        save(options.out, content)


def main() -> None:
    """Run trials and the best settings of each kind, and write their losses and times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="standard")
    parser.add_argument("--trial-epochs", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--short-epochs", type=int, default=50, help="of the best one, once more")
    parser.add_argument("--only", choices=("unchecked",), help="no other runs than these")
    parser.add_argument("--trials", type=int, help="only so many of the settings")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0, help="when no other run is started")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for runs to end")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    add_options(parser, "device", "out")
    options = parser.parse_args()
    began = time.time()
    deadline = began + 60 * options.minutes
    task = {
        "method": NAME,
        "dataset": "mnist",
        "model": options.model,
        "precision": options.precision,
        "device": options.device,
    }

    def config(settings: dict[str, Any], epochs: int, seed: int = 0) -> dict[str, Any]:
        warm_up = min(5, max(epochs // 2, 0))
        own = {"epochs": epochs, "warmup_epochs": warm_up, "seed": seed}
        return {**task, **own, "settings": settings}

    content: dict[str, Any] = {
        "command": "python -m benchmarks.preconditioned_mnist",
        "trial epochs": options.trial_epochs,
        "epochs": options.epochs,
        "environment": environment(options.device),
    }
    if options.only == "unchecked":
        run_unchecked(config, content, options, deadline)
        return
    chosen = TRIALS[: options.trials]
    trials = [
        (f"trial-{number:02d}-{key_of(s)}", config(s, options.trial_epochs))
        for number, s in enumerate(chosen)
    ]
    for method in OTHERS:
        trials.insert(
            0, (f"trial-{method}", {**config({}, options.trial_epochs), "method": method})
        )
    found = train_all(trials, options, began + 60 * options.minutes * 0.6)
    content["trials"] = found
    save(options.out, content)
    best: dict[str, dict[str, Any]] = {}
    own = [row for row in found if row["method"] == NAME]
    ended = [row for row in own if not row.get("diverged", True)]
    for row in sorted(ended, key=lambda row: float(row["train"])):
        settings = {**SETTINGS, **row["settings"]}
        best.setdefault(f"{settings['form']}-{settings['variant']}", row["settings"])
    first, *others = best or ["none"]
    seeds, epochs = range(options.seeds), options.epochs
    wanted = [(first, epochs, seed) for seed in seeds] + [(each, epochs, 0) for each in others]
    wanted += [(first, options.short_epochs, seed) for seed in seeds]
    final = [
        (f"{NAME}-{kind}-{count}-epochs-s{seed}", config(best[kind], count, seed))
        for kind, count, seed in wanted
        if best
    ]
    content["runs"] = train_all(final, options, deadline) if best else []
    content["ms a step"] = clock = {}
    save(options.out, content)
    for kind, settings in best.items():
        clock[kind] = step_milliseconds(config(settings, options.epochs))
        print(f"{kind}: {clock[kind]:.2f} ms a step alone", flush=True)
    for method in OTHERS:
        plain = {**config({}, options.epochs), "method": method}
        clock[method] = step_milliseconds(plain)
        print(f"{method}: {clock[method]:.2f} ms a step alone", flush=True)
        save(options.out, content)


if __name__ == "__main__":
    main()
