"""Search the settings of LocoProp and Muon for the demo, with the same number of trials for each.

    python -m benchmarks.tune_demo --folder runs/tune-demo

Each of the two gets `TRIALS` trials of `locoprop tune` (TPE, without pruning) on the task of the demo
at seed 0; the lowest train loss after the last epoch wins. The command continues an interrupted search,
and writes the trials into `tune_demo.json` beside it. That file also has as many trials of RMSProp and
of Adam, from an earlier random search.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.demo.run import EPOCHS, IMAGES, configs
from torch_locoprop.study.tuning import campaign, spaces

RECORD = Path(__file__).with_suffix(".json")
TRIALS = 24
SEED = 0
SEARCHED = ("locoprop-spectral", "muon")
RATES = "1e-3:1e-1"
"""The range of the learning rates; other settings have the ranges of the study."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "benchmarks.tune_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/tune-demo"), help="the searches")
    options = parser.parse_args()
    data = datasets.some_curves(IMAGES, IMAGES // 4, SEED)
    record = json.loads(RECORD.read_text())
    for base in configs(EPOCHS, SEED):
        if base.method not in SEARCHED:
            continue
        result = campaign.tune(
            base,
            spaces.of(methods.get(base.method), ranges={"lr": RATES}),
            options.folder / base.method,
            trials=TRIALS,
            population=1,
            pruning=False,
            data=data,
        )
        record["methods"][base.method] = sorted(map(shown, result.trials), key=_loss)
        print(f"{base.method}: {record['methods'][base.method][0]}", flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def shown(trial: dict[str, Any]) -> dict[str, Any]:
    """Return a trial with four digits of each number; the losses of a diverged one are None."""
    diverged = trial["state"] == "diverged"
    return {
        "setting": {name: float(f"{value:.4g}") for name, value in trial["settings"].items()},
        "train_loss": None if diverged else round(trial["train_loss"], 3),
        "test_loss": None if diverged else round(trial["test_loss"], 3),
    }


def _loss(trial: dict[str, Any]) -> float:
    return float("inf") if trial["train_loss"] is None else trial["train_loss"]


if __name__ == "__main__":
    main()
