"""Find the settings of the demo's methods: a random search, the same number of trials for each.

    OMP_NUM_THREADS=1 python benchmarks/tune_demo.py

Every trial is the demo's own training run. The lowest train loss after the last epoch wins; a run
that becomes non-finite counts as diverged. All trials go to benchmarks/tune_demo.json, best first,
and the winners stand in src/torch_locoprop/study/contest.py.
"""

import argparse
import json
import math
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from torch_locoprop.study.contest import EPOCHS, METHODS, Method, contest_task
from torch_locoprop.study.training import train

# Log-uniform. The learning rate has two decades for every method, placed by a short pilot; all else
# is shared.
LEARNING_RATE = {
    "LocoProp-M": (1e-5, 1e-3),
    "LocoProp-S": (1e-5, 1e-3),
    "RMSProp": (1e-4, 1e-2),
    "Adam": (1e-4, 1e-2),
}
ONE_MINUS_MOMENTUM = (3e-3, 0.3)
ONE_MINUS_DECAY = (1e-3, 0.3)
EPS = (1e-10, 1e-5)
GAMMA = (10.0, 100.0, 1000.0)


def sample(method: Method, rng: random.Random) -> dict[str, float]:
    """Return one random setting, rounded so that it can be copied exactly."""

    def log_uniform(low: float, high: float) -> float:
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")

    setting = {
        "lr": log_uniform(*LEARNING_RATE[method.name]),
        "momentum": round(1 - log_uniform(*ONE_MINUS_MOMENTUM), 4),
        "decay": round(1 - log_uniform(*ONE_MINUS_DECAY), 4),
        "eps": log_uniform(*EPS),
    }
    if method.kind["optimizer"] == "locoprop":
        setting["gamma"] = rng.choice(GAMMA)
    return setting


def trial(method: Method, setting: dict[str, float], epochs: int) -> dict[str, object]:
    """Return the setting and the losses at the end of its run, None where they are not finite."""
    torch.set_num_threads(1)
    _, run = train(contest_task(epochs=epochs), method.kind | setting)
    losses = {"train_loss": run.train_loss[-1], "test_loss": run.test_loss[-1]}
    return {
        "setting": setting,
        **{name: None if run.diverged else round(loss, 3) for name, loss in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=24, help="per method (default: 24)")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help=f"of a trial (default: {EPOCHS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random settings (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()

    began = time.perf_counter()
    results = {}
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for method in METHODS:
            rng = random.Random(args.seed)
            settings = [sample(method, rng) for _ in range(args.trials)]
            futures = [pool.submit(trial, method, setting, args.epochs) for setting in settings]
            trials = [future.result() for future in futures]
            trials.sort(key=lambda done: (done["train_loss"] is None, done["train_loss"] or 0.0))
            results[method.name] = trials
            print(
                f"{method.name:<11} {trials[0]['train_loss']}  {trials[0]['setting']}", flush=True
            )
    record = {
        "trials": args.trials,
        "epochs": args.epochs,
        "seed": args.seed,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "methods": results,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
