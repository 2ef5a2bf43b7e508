"""`locoprop methods`: the records it lists."""

import json
from typing import Any

import pytest

from torch_locoprop.study import methods
from torch_locoprop.study.methods import Choices, Method


def test_without_a_name_it_lists_all(run: Any) -> None:
    code, out, _ = run("methods")
    assert code == 0
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert set(lines) == set(methods.names())
    assert "LocoProp-S" in lines["locoprop-s"]
    assert methods.get("locoprop-s").source in lines["locoprop-s"]
    listed = json.loads(run("methods", "--json")[1])
    assert [each["name"] for each in listed] == list(methods.names())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("locoprop-m", ["gamma", "10.0", "10,100,500,1000,2000,3000,5000"]),
        ("locoprop-m", ["solver", "rmsprop", ""]),
        ("kfac@10", ["every", "10", ""]),
        ("kfac@10", ["decay", "0.95", "0.9:0.999"]),
    ],
)
def test_with_a_name_it_shows_defaults_and_ranges(run: Any, name: str, line: list[str]) -> None:
    code, out, _ = run("methods", name)
    assert code == 0
    assert out.startswith(name)
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in out.splitlines()]
    assert line in rows


@pytest.mark.usefixtures("own_methods")
def test_a_method_with_words_or_with_nothing_to_search(run: Any) -> None:
    def build(model: Any, settings: Any) -> Any:
        raise NotImplementedError

    words = {"kind": Choices(("a", "b"))}
    methods.register(Method("words", build, {"kind": "a"}, "untuned", space=words))
    methods.register(Method("nothing", build, {"width": 3}, "untuned"))
    code, out, _ = run("methods", "words", "nothing")
    assert code == 0
    assert "a,b" in out
    assert "width" in out


def test_an_unknown_name_is_an_error(run: Any) -> None:
    code, _, err = run("methods", "adan")
    assert code == 2
    assert "Did you mean 'adam'" in err
