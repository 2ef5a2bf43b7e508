"""Find the settings of the demo's methods: a random search with the same number of trials and seed for each.

    OMP_NUM_THREADS=1 python benchmarks/tune_demo.py

Every trial is the demo's own training run. The best is the one with the lowest train loss after the last epoch; a run
that becomes non-finite counts as diverged and cannot win. Results, all trials included, go to benchmarks/tune_demo.json;
the winners stand in src/torch_locoprop/study/methods.py.
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

from torch_locoprop.study.demo import EPOCHS, IMAGES, demo_task
from torch_locoprop.study.methods import METHODS, Method
from torch_locoprop.study.training import train

# Ranges of the logarithm. The learning rates span the same number of decades for every method; the rest is shared.
LEARNING_RATE = {
    "LocoProp-M": (1e-6, 1e-3),
    "LocoProp-S": (1e-6, 1e-3),
    "RMSProp": (1e-5, 1e-2),
    "Adam": (1e-4, 1e-1),
}
GAMMA = (1.0, 10.0, 100.0, 1000.0)
ONE_MINUS_MOMENTUM = (3e-3, 0.3)
ONE_MINUS_DECAY = (1e-3, 0.3)
EPS = (1e-10, 1e-5)


def sample(method: Method, rng: random.Random) -> dict[str, float]:
    """Return one random setting, rounded to three digits so that it can be copied exactly."""

    def log_uniform(low: float, high: float) -> float:
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")

    setting = {
        "lr": log_uniform(*LEARNING_RATE[method.name]),
        "momentum": round(1 - log_uniform(*ONE_MINUS_MOMENTUM), 4),
        "decay": round(1 - log_uniform(*ONE_MINUS_DECAY), 4),
        "eps": log_uniform(*EPS),
    }
    if "gamma" not in method.kind:
        setting["gamma"] = rng.choice(GAMMA)
    return setting


def trial(method: Method, setting: dict[str, float], epochs: int) -> dict[str, object]:
    """Return the setting with the losses at the end of its run; None stands for a loss that is not finite."""
    torch.set_num_threads(1)
    _, run = train(demo_task(images=IMAGES, epochs=epochs, seed=0), method.kind | setting)
    finite = not run.diverged
    return {
        "setting": setting,
        "train_loss": round(run.train_loss[-1], 3) if finite else None,
        "test_loss": round(run.test_loss[-1], 3) if finite else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=24, help="per method (default: 24)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of a trial (default: {EPOCHS})")
    parser.add_argument("--seed", type=int, default=0, help="of the random settings (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--methods", nargs="+", default=[method.name for method in METHODS])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()

    began = time.perf_counter()
    results = {}
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for method in (method for method in METHODS if method.name in args.methods):
            rng = random.Random(args.seed)
            settings = [sample(method, rng) for _ in range(args.trials)]
            futures = [pool.submit(trial, method, setting, args.epochs) for setting in settings]
            trials = [future.result() for future in futures]
            trials.sort(key=lambda done: (done["train_loss"] is None, done["train_loss"]))
            results[method.name] = trials
            print(f"{method.name:<11} {trials[0]['train_loss']:8.2f}  {trials[0]['setting']}", flush=True)
    record = {
        "command": f"python benchmarks/tune_demo.py --trials {args.trials} --epochs {args.epochs} --seed {args.seed}",
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "methods": results,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
