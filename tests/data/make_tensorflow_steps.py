"""Writes ``tensorflow_steps.json``: weights after each step of TensorFlow's six first-order methods.

The methods are those of ``tf.compat.v1.train``, with which the paper's results were computed. Run it in
an environment of its own, which needs nothing of this project::

    python -m venv tensorflow-environment
    tensorflow-environment/bin/pip install tensorflow==2.21.0
    tensorflow-environment/bin/python tests/data/make_tensorflow_steps.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

STEPS = 25
SIZE = 4
RATES = [0.5, 1.0, 2.0, 0.0]  # factors of the learning rate, in turn, in the cases with a schedule

# TensorFlow rounds settings to float32, so those below are sums of few powers of two. Its defaults are
# not, nor are the powers of Adam's two factors.
EXACT, ROUNDED = 1e-13, 1e-6
# The name of our method, its settings by our names, if the learning rate has a schedule, and how far
# our weights may be off. Settings that are left out have TensorFlow's defaults.
CASES: list[tuple[str, dict[str, float], bool, float]] = [
    ("sgd", {"lr": 0.125}, False, EXACT),
    ("sgd", {"lr": 0.03125}, True, EXACT),
    ("momentum", {"lr": 0.125, "momentum": 0.875}, False, EXACT),
    ("momentum", {"lr": 0.03125, "momentum": 0.5}, True, EXACT),
    ("nesterov", {"lr": 0.125, "momentum": 0.875}, False, EXACT),
    ("nesterov", {"lr": 0.03125, "momentum": 0.5}, True, EXACT),
    ("adagrad", {"lr": 0.125}, False, ROUNDED),
    ("adagrad", {"lr": 0.25, "eps": 2**-10}, True, EXACT),
    ("rmsprop", {"lr": 0.015625}, False, ROUNDED),
    (
        "rmsprop",
        {"lr": 2**-7, "momentum": 1 - 2**-10, "decay": 1 - 2**-4, "eps": 2**-17},
        False,
        EXACT,
    ),
    ("rmsprop", {"lr": 0.25, "momentum": 0.5, "decay": 0.5, "eps": 0.125}, True, EXACT),
    ("adam", {}, False, ROUNDED),
    (
        "adam",
        {"lr": 2**-7, "momentum": 1 - 2**-4, "decay": 1 - 2**-10, "eps": 2**-27},
        False,
        ROUNDED,
    ),
    ("adam", {"lr": 0.125, "momentum": 0.5, "decay": 0.25, "eps": 2**-10}, True, EXACT),
]


def gradients() -> list[list[float]]:
    """Return gradients of many magnitudes, with zeros among them."""
    numbers = random.Random(0)
    scales = [1.0, 1e-6, 1e3, 0.0, 1.0]
    return [
        [scales[(t + i) % len(scales)] * numbers.gauss(0, 1) for i in range(SIZE)]
        for t in range(STEPS)
    ]


def run(name: str, settings: dict[str, float], scheduled: bool) -> list[list[float]]:
    """Return the weights after each step, computed by TensorFlow in float64."""
    import tensorflow as tf

    train = tf.compat.v1.train
    step = 0
    rest: dict[str, Any] = dict(settings)
    base = rest.pop("lr", 1e-3)

    def rate() -> float:
        return base * (RATES[step % len(RATES)] if scheduled else 1.0)

    if name == "sgd":
        optimizer = train.GradientDescentOptimizer(rate)
    elif name in ("momentum", "nesterov"):
        optimizer = train.MomentumOptimizer(rate, use_nesterov=name == "nesterov", **rest)
    elif name == "adagrad":
        own = {"initial_accumulator_value": rest["eps"]} if "eps" in rest else {}
        optimizer = train.AdagradOptimizer(rate, **own)
    elif name == "rmsprop":
        names = {"decay": "decay", "momentum": "momentum", "eps": "epsilon"}
        optimizer = train.RMSPropOptimizer(rate, **{names[key]: rest[key] for key in rest})
    else:
        names = {"momentum": "beta1", "decay": "beta2", "eps": "epsilon"}
        own = {names[key]: rest[key] for key in rest}
        optimizer = train.AdamOptimizer(rate, **own) if settings else train.AdamOptimizer()
    weight = tf.Variable([1.0, -2.0, 0.5, 0.0], dtype=tf.float64)
    path = []
    for gradient in gradients():
        optimizer.apply_gradients([(tf.constant(gradient, dtype=tf.float64), weight)])
        path.append(weight.numpy().tolist())
        step += 1
    return path


def main() -> None:
    import tensorflow as tf

    made = {
        "tensorflow": tf.__version__,
        "start": [1.0, -2.0, 0.5, 0.0],
        "rates": RATES,
        "gradients": gradients(),
        "cases": [
            {"method": name, "settings": settings, "scheduled": scheduled, "tolerance": tolerance}
            | {"weights": run(name, settings, scheduled)}
            for name, settings, scheduled, tolerance in CASES
        ],
    }
    text = json.dumps(made, indent=1)
    Path(__file__).with_name("tensorflow_steps.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
