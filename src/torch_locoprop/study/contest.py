"""What the demo compares, as data: one task, and four methods with their tuned settings."""

from dataclasses import dataclass
from typing import Any

from torch_locoprop.study.curves import SIDE, curves
from torch_locoprop.study.training import Task

SIZES = (SIDE * SIDE, 250, 100, 20)
BATCH_SIZE = 200
IMAGES = 4000
EPOCHS = 25


def contest_task(*, images: int = IMAGES, epochs: int = EPOCHS, seed: int = 0) -> Task:
    """Return the demo's task: so many curves to train on and a quarter as many others to test."""
    if images < 4:
        raise ValueError(
            f"Invalid images={images}. Must be at least 4: a quarter as many are drawn for the test."
        )
    train, test = curves(images + images // 4, seed=seed).tensor_split([images])
    return Task(train, test, SIZES, epochs=epochs, batch_size=BATCH_SIZE, seed=seed)


@dataclass(frozen=True)
class Method:
    """How tables and figures show a method, what it is, and the settings the search found."""

    name: str
    colour: str
    kind: dict[str, Any]
    tuned: dict[str, float]

    @property
    def settings(self) -> dict[str, Any]:
        """What `train` takes: the optimizer's name and its keyword arguments."""
        return self.kind | self.tuned


LOCAL = {"optimizer": "locoprop", "local_steps": 10, "solver": "rmsprop"}

# Found by `python benchmarks/tune_demo.py`: 24 random trials each, the lowest final train loss wins.
METHODS = (
    Method(
        "LocoProp-M",
        "#0b5fa5",
        {"variant": "locoprop-m"} | LOCAL,
        {"lr": 0.000168, "momentum": 0.9718, "decay": 0.9636, "eps": 1.68e-06, "gamma": 10.0},
    ),
    Method(
        "LocoProp-S",
        "#4fb3d9",
        {"variant": "locoprop-s"} | LOCAL,
        {"lr": 3.07e-05, "momentum": 0.9866, "decay": 0.857, "eps": 9.02e-10, "gamma": 1000.0},
    ),
    Method(
        "RMSProp",
        "#c8401a",
        {"optimizer": "rmsprop"},
        {"lr": 0.00327, "momentum": 0.83, "decay": 0.806, "eps": 1.63e-06},
    ),
    Method(
        "Adam",
        "#eaa221",
        {"optimizer": "adam"},
        {"lr": 0.0066, "momentum": 0.723, "decay": 0.898, "eps": 3.24e-06},
    ),
)
