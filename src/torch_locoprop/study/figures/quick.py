"""A small scale for a quick look at every figure: generated images, small models, minutes on a CPU.

The settings are the best of two to ten trials each, most of them on the first task, by the final train
loss at one seed; those of LocoProp and RMSProp start from the settings of the demo. They suffice for
pictures, but are not tuned.
"""

from torch_locoprop.study.figures.catalog import SOLVERS, Scale

IMAGES = (4000, 1000)

_TASK = {
    "dataset": "curves",
    "model": "784-100-50-12",
    "batch_size": 200,
    "epochs": 15,
    "warmup_epochs": 1,
    "schedule": "linear",
}
_RENEWED = ("kfac@10", "shampoo@10")

_SETTINGS = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.01},
    "nesterov": {"lr": 0.01},
    "adagrad": {"lr": 0.1},
    "rmsprop": {"lr": 6e-3, "momentum": 0.83, "decay": 0.9, "eps": 1e-6},
    "adam": {"lr": 0.012, "momentum": 0.8, "decay": 0.95, "eps": 1e-6},
    "locoprop-m": {
        "lr": 2.5e-4,
        "gamma": 10.0,
        "momentum": 0.95,
        "decay": 0.964,
        "eps": 1.7e-6,
    },
    "locoprop-s": {
        "lr": 3.07e-5,
        "gamma": 1000.0,
        "momentum": 0.987,
        "decay": 0.857,
        "eps": 1e-9,
    },
    "exact-s-muon": {"lr": 0.03, "damping": 1.0},
    "kfac": {"lr": 0.1, "damping": 0.03, "clip": 0.3, "momentum": 0.5},
    "shampoo": {"lr": 2e-3, "momentum": 0.8, "decay": 0.95},
    "muon": {"lr": 0.03},
    "soap": {"lr": 0.03},
    "locoprop-spectral": {"lr": 0.06},
}
_TASKS = {
    "standard": _TASK,
    "wide": {**_TASK, "model": "784-200-100-24"},
    "deep": {**_TASK, "model": "784-100-50-50-50-25-12"},
    "relu": {**_TASK, "transfer": "relu"},
    "fashion-mnist": _TASK,
    "curves": _TASK,
    "batch-100": {**_TASK, "batch_size": 100},
}
_SOLVERS = {
    "sgd": {"lr": 1e-3, "gamma": 10.0},
    "momentum": {"lr": 1e-4, "gamma": 10.0, "momentum": 0.9},
    "nesterov": {"lr": 1e-4, "gamma": 10.0, "momentum": 0.9},
    "adagrad": {"lr": 0.05, "gamma": 10.0, "eps": 0.1},
    "adam": {"lr": 1e-3, "gamma": 10.0, "momentum": 0.9, "decay": 0.99, "eps": 1e-6},
    "rmsprop": {},
}
_ORIGIN = (
    "two to ten trials each at this scale, most on the standard task and T = 10; none is tuned"
)

QUICK = Scale(
    tasks=_TASKS,
    renewed={
        "standard": ("kfac@1", "kfac@10", "shampoo@1", "shampoo@10"),
        "wide": ("kfac@10", "shampoo@10", "shampoo@50"),
        "deep": ("kfac@10", "shampoo@10", "shampoo@50"),
        **dict.fromkeys(("relu", "fashion-mnist", "curves", "batch-100"), _RENEWED),
    },
    settings=_SETTINGS,
    special={"deep": {"rmsprop": {"lr": 3e-3}, "kfac": {"damping": 0.01}}},
    solvers=_SOLVERS,
    origins={
        **{task: dict.fromkeys(_SETTINGS, _ORIGIN) for task in _TASKS},
        SOLVERS: dict.fromkeys(_SOLVERS, _ORIGIN),
    },
    targets=(100.0, 90.0, 80.0),
    images=IMAGES,
    threads=1,  # more threads gain little on such small matrices and lose much on a busy machine
    note=f"quick version, on {IMAGES[0]:,} generated curves",
)
