"""The protocol of the paper: its tasks, and the settings of each method on a task.

The defaults in the records are for MNIST, tanh, the standard model and batches of 1000; `tasks` has
settings for other tasks where the defaults do not fit. Settings of a search for another task can be
given with `--config`.
"""

from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.methods import TUNED, Method, TaskSettings, iterations

# Eigendecompositions for the wide model take seconds, so Shampoo is not run there with @1 or @10.
_RENEWED = ("kfac@10", "shampoo@100")


def _settings_of(method: Method, task: str, local_steps: int | None) -> TaskSettings:
    """Return settings on a task, overridden by those for a number of local iterations."""
    keys = [task] if local_steps is None else [task, iterations(local_steps)]
    found = [method.tasks[key] for key in keys if key in method.tasks]
    settings = {name: value for each in found for name, value in each.settings.items()}
    return TaskSettings(settings, found[-1].source if found else "")


PROTOCOL = Scale(
    tasks={
        "standard": {"dataset": "mnist"},
        "wide": {"dataset": "mnist", "model": "wide"},
        "deep": {"dataset": "mnist", "model": "deep"},
        "relu": {"dataset": "mnist", "transfer": "relu"},
        "fashion-mnist": {"dataset": "fashion-mnist"},
        "curves": {"dataset": "curves"},
        "batch-100": {"dataset": "mnist", "batch_size": 100},
    },
    renewed={
        "standard": ("kfac@1", "kfac@10", "kfac@100", "shampoo@1", "shampoo@10", "shampoo@100"),
        "wide": ("kfac@10", "kfac@100", "shampoo@100"),
        "deep": ("kfac@1", "kfac@10", "kfac@100", "shampoo@10", "shampoo@100"),
        "relu": _RENEWED,
        "fashion-mnist": _RENEWED,
        "curves": _RENEWED,
        "batch-100": _RENEWED,
    },
    settings_of=_settings_of,
    # The best of results/searches; RMSProp's are the reference's.
    solvers={
        "sgd": TaskSettings({"lr": 2.646e-06, "gamma": 500.0}, f"{TUNED}, 8 trials of 30 epochs"),
        **dict.fromkeys(
            ("momentum", "nesterov"),
            TaskSettings(
                {"lr": 2.086e-07, "gamma": 100.0, "momentum": 0.9984},
                f"{TUNED}, 16 trials of 30 epochs",
            ),
        ),
        "adagrad": TaskSettings(
            {"lr": 0.01669, "gamma": 100.0, "eps": 6.406e-08}, f"{TUNED}, 8 trials of 30 epochs"
        ),
        "adam": TaskSettings(
            {
                "lr": 0.0003593,
                "gamma": 10.0,
                "momentum": 0.973,
                "decay": 0.9985,
                "eps": 2.154e-06,
            },
            f"{TUNED}, 16 trials of 30 epochs",
        ),
        "rmsprop": TaskSettings({}),
    },
)
