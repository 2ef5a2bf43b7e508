"""A small scale for a quick look at every figure: generated images, small models, minutes on a CPU.

The settings, `quick` in the records of methods, are the best of two to ten trials each, most of them on
the first task, by the final train loss at one seed; those of LocoProp and RMSProp start from the
settings of the demo. They suffice for pictures, but are not tuned.
"""

from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.methods import Method, TaskSettings

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


def _settings_of(method: Method, task: str, local_steps: int | None) -> TaskSettings:
    """Return a method's quick settings on a task, the same for every number of local iterations."""
    settings = {**method.quick, **method.quick_tasks.get(task, {})}
    return TaskSettings(settings, _ORIGIN if settings else "")


QUICK = Scale(
    tasks=_TASKS,
    renewed={
        "standard": ("kfac@1", "kfac@10", "shampoo@1", "shampoo@10"),
        "wide": ("kfac@10", "shampoo@10", "shampoo@50"),
        "deep": ("kfac@10", "shampoo@10", "shampoo@50"),
        **dict.fromkeys(("relu", "fashion-mnist", "curves", "batch-100"), _RENEWED),
    },
    settings_of=_settings_of,
    solvers={solver: TaskSettings(settings, _ORIGIN) for solver, settings in _SOLVERS.items()},
    targets=(100.0, 90.0, 80.0),
    images=IMAGES,
    threads=1,  # more threads gain little on such small matrices and lose much on a busy machine
    note=f"quick version, on {IMAGES[0]:,} generated curves",
)
