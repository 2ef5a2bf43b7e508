"""Mutants: which changes of a source are made, and whether tests that notice them are run."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import Mutant, applied, mutants_of
from benchmarks.mutants_live import live_functions, put_in, swaps
from benchmarks.mutation import of_every_file, reason_keys, reasons


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


SOURCE = """
LIMIT = 2

def plain(a):
    return a + 1

def outer(a):
    def inner(b):
        return a * b
    return inner

class Kept:
    size = 3

    def method(self):
        return self.size - 1
"""


def outcomes_of_all(mutants: list[Mutant]) -> dict[str, tuple[object, ...] | None]:
    """Return what the functions give with each mutant put into them; None outside of functions."""
    found: dict[str, tuple[object, ...] | None] = {}
    for mutant in mutants:
        space: dict[str, Any] = {}
        exec(compile(SOURCE, "/folder/module.py", "exec"), space)
        kept = space["plain"], space["outer"](5), space["Kept"]().method
        changes = swaps(mutant, SOURCE, "/folder/module.py")
        if changes is not None:
            functions = [space["plain"], space["outer"], kept[1], space["Kept"].method]
            by_place = {
                place: [f for f in functions if place_of(f) == place] for place, _ in changes
            }
            put_in(changes, by_place)
        values = kept[0](1), kept[1](2), kept[2]()
        found[f"{mutant.was} -> {mutant.becomes}"] = None if changes is None else values
    return found


def place_of(function: Any) -> tuple[str, str, int]:
    code = function.__code__
    return code.co_filename, code.co_qualname, code.co_firstlineno


def test_a_mutant_reaches_functions_that_others_hold_already() -> None:
    assert outcomes_of_all(mutants_of(SOURCE)) == {
        "2 -> 3": None,
        "2 -> 1": None,
        "a + 1 -> a - 1": (0, 10, 2),
        "1 -> 2": (2, 10, 1),  # of the last place with this change, the method
        "1 -> 0": (2, 10, 3),
        "a * b -> a / b": (2, 2.5, 2),
        "3 -> 4": None,
        "3 -> 2": None,
        "self.size - 1 -> self.size + 1": (2, 10, 4),
    }


def test_functions_of_a_folder_are_found_in_the_running_program() -> None:
    folder = str(Path(__file__).parent)
    assert outcomes_of_all in live_functions(folder)[place_of(outcomes_of_all)]


def test_every_reason_belongs_to_a_mutant_of_the_source() -> None:
    """A reason whose line has changed says nothing any more."""
    known = reasons()
    there = {key for file in {key[0] for key in known} for key in reason_keys(file).values()}
    assert known.keys() <= there
    assert all(known.values())
