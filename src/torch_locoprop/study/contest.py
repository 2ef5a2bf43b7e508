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
    """Return the demo's task: `images` curves to train on and a quarter as many others to test on."""
    if images < 4:
        raise ValueError(f"Invalid images={images}. Must be at least 4: a quarter as many are drawn for the test.")
    train, test = curves(images + images // 4, seed=seed).tensor_split([images])
    return Task(train, test, SIZES, epochs=epochs, batch_size=BATCH_SIZE, seed=seed)


@dataclass(frozen=True)
class Method:
    """A name for tables and figures, what the method is, and the settings that the search found for it."""

    name: str
    colour: str
    kind: dict[str, Any]
    tuned: dict[str, float]

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `LocoProp`."""
        return self.kind | self.tuned


LOCAL = {"local_steps": 10, "solver": "rmsprop"}

# One iteration on the local problem is BackProp, whatever the variant: with gamma = 1 the solver sees the gradient of
# the loss itself. So these are RMSProp and Adam as TensorFlow defines them, which is what the paper compares with.
BACKPROP = {"variant": "locoprop-s", "local_steps": 1, "gamma": 1.0}

# Found by `python benchmarks/tune_demo.py`: 24 random trials of each method, lowest train loss after the last epoch.
METHODS = (
    Method(
        "LocoProp-M",
        "#0b5fa5",
        {"variant": "locoprop-m"} | LOCAL,
        {"lr": 1e-4, "gamma": 10.0, "momentum": 0.9, "decay": 0.9, "eps": 1e-5},
    ),
    Method(
        "LocoProp-S",
        "#4fb3d9",
        {"variant": "locoprop-s"} | LOCAL,
        {"lr": 1e-4, "gamma": 10.0, "momentum": 0.9, "decay": 0.9, "eps": 1e-5},
    ),
    Method(
        "RMSProp",
        "#c8401a",
        BACKPROP | {"solver": "rmsprop"},
        {"lr": 1e-3, "momentum": 0.9, "decay": 0.99, "eps": 1e-5},
    ),
    Method(
        "Adam",
        "#eaa221",
        BACKPROP | {"solver": "adam"},
        {"lr": 3e-3, "momentum": 0.9, "decay": 0.99, "eps": 1e-8},
    ),
)
