"""Runs trained together have the losses of runs trained alone."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.population_run import method_of, train_together
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import run

DATA = tiny.data()

ALL = {"momentum": 0.8, "decay": 0.99, "eps": 1e-3}
MEMBERS: list[tuple[str, list[dict[str, Any]]]] = [
    ("sgd", [{"lr": 1e-2}, {"lr": 1e-1}]),
    ("momentum", [{"lr": 1e-2}, {"lr": 1e-2, "momentum": 0.5}]),
    ("nesterov", [{"lr": 1e-2}, {"lr": 1e-2, "momentum": 0.5}]),
    ("adagrad", [{"lr": 1e-1}, {"lr": 1e-1, "eps": 0.5}]),
    ("rmsprop", [{"lr": 1e-2}, {"lr": 3e-2, **ALL}]),
    ("adam", [{"lr": 1e-2}, {"lr": 3e-2, **ALL}]),
    ("locoprop-m", [{"lr": 1e-3}, {"lr": 3e-3, "gamma": 20.0, **ALL}]),
    ("locoprop-s", [{"lr": 1e-3, "gamma": 10.0}, {"lr": 3e-3, "gamma": 20.0, **ALL}]),
    ("pocoprop-s", [{"lr": 1e-3}, {"lr": 3e-3, "gamma": 5.0, **ALL}]),
    ("pocoprop-m", [{"lr": 1e-3}, {"lr": 3e-3, "gamma": 5.0, **ALL}]),
    ("natural-s", [{"lr": 1e-3, "gamma": 10.0}, {"lr": 3e-3, "gamma": 20.0, **ALL}]),
    ("proxprop", [{"lr": 1e-3, "gamma": 10.0}, {"lr": 3e-3, "gamma": 20.0, **ALL}]),
]


def configs(method: str, members: list[dict[str, Any]], **values: Any) -> list[RunConfig]:
    """Strong weight decay and more than one epoch of warm-up, so that both are seen."""
    task = {"weight_decay": 0.1, "epochs": 6, "warmup_epochs": 2, "seed": 3, **values}
    return [tiny.config(method, settings=own, **task) for own in members]


def check_as_alone(members: list[RunConfig], folder: Path) -> list[tuple[Metrics, ...]]:
    together = train_together(members, DATA)
    for place, (config, rows) in enumerate(zip(members, together, strict=True)):
        alone = run(config, folder / str(place), data=DATA).metrics
        assert [row.epoch for row in rows] == [row.epoch for row in alone]
        assert [row.diverged for row in rows] == [row.diverged for row in alone]
        for mine, other in zip(rows, alone, strict=True):
            if not other.diverged:
                losses = (mine.train_loss, mine.test_loss)
                assert losses == pytest.approx((other.train_loss, other.test_loss), rel=2e-5)
    return together


@pytest.mark.parametrize(("method", "members"), MEMBERS)
def test_together_as_alone(method: str, members: list[dict[str, Any]], tmp_path: Path) -> None:
    together = check_as_alone(configs(method, members), tmp_path)
    first, second = (rows[-1].train_loss for rows in together)
    assert first != pytest.approx(second, rel=1e-3), "the members' numbers made no difference"
    assert first != pytest.approx(together[0][0].train_loss, rel=1e-3), "no weight has moved"


@pytest.mark.filterwarnings("ignore:The local solution")
@pytest.mark.parametrize("method", ["adam", "locoprop-m", "natural-s"])
def test_members_of_several_seeds(method: str, tmp_path: Path) -> None:
    """Initial weights and batches are those of each seed; one that diverges changes nothing else."""
    gamma = {} if method == "adam" else {"gamma": 10.0}
    settings = [{"lr": lr, **gamma} for lr in (1e-3, 1e-3, 1e30, 5e-4)]
    given = zip(configs(method, settings), (3, 4, 5, 3), strict=True)
    members = [replace(config, seed=seed) for config, seed in given]
    together = check_as_alone(members, tmp_path)
    first, second, _, fourth = (rows[-1].train_loss for rows in together)
    assert len({first, second, fourth}) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"transfer": "relu"},
        {"schedule": "linear"},
        {"model": "12-3"},
        {"model": "12-9-6-2", "batch_size": 40},
    ],
)
def test_any_task(values: dict[str, Any], tmp_path: Path) -> None:
    settings = [{"lr": 1e-3, "local_steps": 3}, {"lr": 3e-3, "local_steps": 3}]
    check_as_alone(configs("locoprop-m", settings, **values), tmp_path)


@pytest.mark.parametrize("regularizer", ["l2", "l1"])
def test_regularizers(regularizer: str, tmp_path: Path) -> None:
    settings = [{"lr": lr, "regularizer": regularizer, "solver": "adam"} for lr in (1e-3, 3e-3)]
    check_as_alone(configs("locoprop-s", settings), tmp_path)


def test_a_member_that_diverges_ends_when_it_would_alone(tmp_path: Path) -> None:
    settings = [{"lr": 1e-2}, {"lr": 30.0}, {"lr": 3e38}, {"lr": 1e-1}]
    together = check_as_alone(configs("sgd", settings), tmp_path)
    assert [rows[-1].diverged for rows in together] == [False, True, True, False]
    assert len(together[2]) < 7
    assert math.isnan(together[2][-1].train_loss)


@pytest.mark.filterwarnings("ignore:The local solution")
def test_a_member_whose_every_solution_is_refused_ends_when_it_would_alone(tmp_path: Path) -> None:
    settings = [{"lr": 1e-3, "gamma": 10.0}, {"lr": 1e38, "gamma": 10.0}]
    together = check_as_alone(configs("locoprop-s", settings), tmp_path)
    assert [rows[-1].diverged for rows in together] == [False, True]
    assert len(together[1]) < len(together[0])


def test_members_end_early_and_the_others_do_not_notice() -> None:
    members = configs("adam", [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2)])
    whole = train_together(members, DATA)
    seen: list[list[int]] = []

    def stop(rows: Mapping[int, Metrics]) -> list[int]:
        seen.append(list(rows))
        assert len({row.epoch for row in rows.values()}) == 1
        return {1: [0], 3: [3, 1]}.get(next(iter(rows.values())).epoch, [])

    part = train_together(members, DATA, stop)
    assert seen == [[0, 1, 2, 3]] * 2 + [[1, 2, 3]] * 2 + [[2]] * 3
    assert [len(rows) for rows in part] == [2, 4, 7, 4]
    for mine, other in zip(part, whole, strict=True):
        losses = [row.train_loss for row in mine]
        assert losses == pytest.approx([row.train_loss for row in other[: len(mine)]], rel=1e-6)


def test_all_may_end_early() -> None:
    (rows,) = train_together(configs("adam", [{}]), DATA, lambda rows: [0])
    assert [row.epoch for row in rows] == [0]


def test_the_callers_random_numbers_stay() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_together(configs("adam", [{}], epochs=1), DATA)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("kfac", {}),
        ("muon", {}),
        ("exact-s", {}),
        ("locoprop-s", {"solver": "exact"}),
    ],
)
def test_what_has_no_population(method: str, settings: dict[str, Any]) -> None:
    config = tiny.config(method, settings=settings)
    assert method_of(config) is None
    with pytest.raises(ValueError, match=f"{method} with these settings has no population"):
        train_together([config], DATA)


@pytest.mark.parametrize(
    "other", [{"batch_size": 8}, {"settings": {"local_steps": 3}}, {"epochs": 5}]
)
def test_members_differ_in_numbers_only(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="2 configurations that cannot be trained together"):
        train_together([tiny.config(), tiny.config(**other)], DATA)
    with pytest.raises(ValueError, match="0 configurations"):
        train_together([], DATA)


@pytest.mark.usefixtures("own_methods")
def test_a_record_says_that_a_method_is_a_population() -> None:
    adam = methods.get("adam")
    methods.register(replace(adam, name="mine"))
    methods.register(replace(adam, name="alone", population=None))
    numbers = [{"lr": 1e-3}, {"lr": 1e-2}]
    mine = train_together(configs("mine", numbers), DATA)
    others = train_together(configs("adam", numbers), DATA)
    for row, other in zip(mine, others, strict=True):
        assert [each.train_loss for each in row] == [each.train_loss for each in other]
    assert method_of(tiny.config("alone")) is None
