"""Search spaces: those of the paper, narrowed ones, and those of registered methods."""

from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.study import methods
from torch_locoprop.study.methods import Choices, Method, Span
from torch_locoprop.study.methods.search_space import Domain, Space, from_dict
from torch_locoprop.study.tuning import spaces

RATE, EPS = Span(1e-7, 0.1), Span(1e-10, 1e-5)
AVERAGE = Span(1e-3, 0.1, of_rest=True)
GAMMA = Choices((10.0, 100.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0))


def own(settings: dict[str, Any]) -> Method:
    def build(model: nn.Module, settings: Any) -> Optimizer:
        raise NotImplementedError

    return Method("mine", build, settings, "untuned")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("sgd", {"lr": RATE}),
        ("momentum", {"lr": RATE, "momentum": AVERAGE}),
        ("adam", {"lr": RATE, "momentum": AVERAGE, "decay": AVERAGE, "eps": EPS}),
        (
            "locoprop-m",
            {"lr": RATE, "gamma": GAMMA, "momentum": AVERAGE, "decay": AVERAGE, "eps": EPS},
        ),
    ],
)
def test_the_papers_spaces(method: str, expected: Space) -> None:
    assert spaces.of(methods.get(method)) == expected


def test_the_papers_second_order_spaces() -> None:
    both = {"lr": Span(1e-7, 10.0), "momentum": AVERAGE, "decay": AVERAGE}
    assert spaces.of(methods.get("shampoo")) == {**both, "eps": Span(1e-10, 0.1)}
    # The paper's damping ends at 0.1, and its K-FAC has no clip.
    wider = {"damping": Span(1e-10, 10.0), "clip": Span(1e-3, 1.0)}
    assert spaces.of(methods.get("kfac@10")) == {**both, **wider}


TUNED = [name for name in methods.names() if "untuned" not in methods.get(name).source]


@pytest.mark.parametrize("name", TUNED)
def test_defaults_that_were_tuned_lie_inside(name: str) -> None:
    """A search can find defaults that were tuned; untuned defaults may be outside."""
    method = methods.get(name)
    for setting, domain in spaces.of(method).items():
        value = method.settings[setting]
        if isinstance(domain, Choices):  # or between: a search may have been told another range
            numbers = [each for each in domain.values if isinstance(each, float)]
            assert value in domain.values or min(numbers) < value < max(numbers)
        else:
            number = 1 - value if domain.of_rest else value
            assert domain.low * (1 - 1e-9) <= number <= domain.high * (1 + 1e-9), setting


@pytest.mark.parametrize(
    ("solver", "numbers"),
    [
        ("sgd", set()),
        ("exact", set()),
        ("momentum", {"momentum"}),
        ("nesterov", {"momentum"}),
        ("adagrad", {"eps"}),
        ("rmsprop", {"momentum", "decay", "eps"}),
        ("adam", {"momentum", "decay", "eps"}),
    ],
)
def test_what_the_solver_does_not_use_is_not_searched(solver: str, numbers: set[str]) -> None:
    space = spaces.of(methods.get("locoprop-s"), fixed={"solver": solver})
    assert set(space) == {"lr", "gamma"} | numbers


def test_a_method_of_ones_own_is_searched_where_names_are_known() -> None:
    space = spaces.of(own({"lr": 0.1, "eps": 1e-8, "colour": "red", "width": 3}))
    assert space == {"lr": RATE, "eps": EPS}
    ranges = {"width": "2:8", "colour": "red,green", "lr": "1e-3:1"}
    space = spaces.of(own({"lr": 0.1, "colour": "red", "width": 3}), ranges=ranges)
    assert space == {
        "lr": Span(1e-3, 1.0),
        "width": Span(2, 8, whole=True),
        "colour": Choices(("red", "green")),
    }
    with pytest.raises(
        ValueError, match=r"No setting of mine is left to tune. Its settings are colour"
    ):
        spaces.of(own({"colour": "red"}))


def test_a_range_is_of_the_setting_and_a_search_of_its_distance_from_one() -> None:
    space = spaces.of(methods.get("adam"), ranges={"momentum": "0.8:0.99"}, fixed={"lr": 1e-3})
    assert "lr" not in space
    domain = space["momentum"]
    assert domain == Span(0.01, 0.2, of_rest=True)
    assert domain.ends == (0.99, 0.8)
    assert spaces.of(methods.get("adam"), ranges={"momentum": "0:0.9"})["momentum"].ends == (
        0.9,
        0,
    )


def test_values_have_the_type_of_the_setting() -> None:
    space = spaces.of(
        methods.get("locoprop-m"),
        ranges={"gamma": "10,100", "local_steps": "5,10", "regularizer": "null,l2"},
    )
    assert space["gamma"] == Choices((10.0, 100.0))
    assert all(isinstance(value, float) for value in space["gamma"].ends)
    assert space["local_steps"].ends == (5, 10)
    assert space["regularizer"].ends == (None, "l2")


@pytest.mark.parametrize(
    "domain", [RATE, AVERAGE, GAMMA, Span(2, 8, whole=True), Choices(("a", None))]
)
def test_domains_go_through_json(domain: Domain) -> None:
    assert from_dict(domain.to_dict()) == domain


@pytest.mark.parametrize(
    ("ranges", "fixed", "message"),
    [
        ({"rate": "1:2"}, {}, "Unknown setting of adam 'rate'"),
        ({}, {"rate": 1}, "Unknown setting of adam 'rate'"),
        ({"lr": "1:2"}, {"lr": 1}, "lr has a range and a value"),
        ({"lr": "2:1"}, {}, "Invalid --range lr=2:1"),
        ({"lr": "0:1"}, {}, "above 0"),
        ({"lr": "1:inf"}, {}, "Invalid --range lr=1:inf"),
        ({"lr": "a:b"}, {}, "could not convert"),
        ({"lr": "1:2:3"}, {}, "Invalid --range"),
        ({"lr": "1"}, {}, "two or more different values"),
        ({"lr": "1,1"}, {}, "two or more different values"),
        ({"lr": "1,x"}, {}, "could not convert"),
        ({"momentum": "0.5:1"}, {}, "Invalid --range momentum=0.5:1"),
        ({"momentum": "-1:0.5"}, {}, "at least 0 and below 1"),
    ],
)
def test_bad_ranges_are_told(ranges: dict[str, str], fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spaces.of(methods.get("adam"), ranges=ranges, fixed=fixed)


def test_a_range_of_whole_numbers_has_whole_ends() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        spaces.of(methods.get("kfac"), ranges={"every": "1.5:10"})
