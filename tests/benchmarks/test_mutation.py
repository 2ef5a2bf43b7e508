"""Mutants: which changes of a source are made, and whether tests that notice them are run."""

from pathlib import Path

import pytest

from benchmarks.mutants import Mutant, applied, mutants_of
from benchmarks.mutation import of_every_file


def changes(source: str) -> list[str]:
    return [f"{each.was} -> {each.becomes}" for each in mutants_of(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a + b", ["a + b -> a - b"]),
        ("x = a @ b", []),
        ("x = -a", ["-a -> +a"]),
        ("x = not a", ["not a -> not not a"]),
        ("x = a < b", ["a < b -> a <= b"]),
        ("x = a is None or b", ["a is None or b -> a is None and b", "a is None -> a is not None"]),
        ("x = 2", ["2 -> 3", "2 -> 1"]),
        ("x = True", ["True -> False"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("x = a.sum()", ["a.sum() -> a.mean()"]),
        ("a.clear()", ["a.clear() -> None"]),
        ("x += a", ["x += a -> x -= a"]),
        ('"""Docstring 1 + 1."""', []),
        ("raise ValueError(1 + 1)", []),
        ("x: int | None = None", []),
        ("if TYPE_CHECKING:\n    x = 1 + 1", []),
    ],
)
def test_what_is_changed(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


def test_a_mutant_differs_in_one_place() -> None:
    source = "def f(a, b):\n    c = a + b\n    return c * 2"
    found = [applied(each, source) for each in mutants_of(source)]
    assert found == [
        "def f(a, b):\n    c = a - b\n    return c * 2",
        "def f(a, b):\n    c = a + b\n    return c / 2",
        "def f(a, b):\n    c = a + b\n    return c * 3",
        "def f(a, b):\n    c = a + b\n    return c * 1",
    ]


def test_every_mutant_of_the_mathematics_can_be_compiled() -> None:
    package = Path(__file__).parents[2] / "src" / "torch_locoprop" / "solvers"
    for path in package.glob("*.py"):
        source = path.read_text()
        for each in mutants_of(source)[::10]:
            compile(applied(each, source), str(path), "exec")


def test_some_mutants_of_every_file() -> None:
    mutants = [(file, Mutant(i, 1, 1, "", "")) for i, file in enumerate("abaabc")]
    found = [(file, mutant.place) for file, mutant in of_every_file(mutants, 2)]
    assert found == [("a", 0), ("b", 1), ("a", 2), ("b", 4), ("c", 5)]
