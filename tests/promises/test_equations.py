"""``docs/equations.md`` lists everything numbered in the paper, with code and tests that exist."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from torch_locoprop.study.figures import catalog

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "equations.md"
NUMBERED = {"Eq.": 19, "Algorithm": 4, "Proposition": 4, "Table": 5, "Figure": 8}
EXPECTED = [f"{kind} {n}" for kind, last in NUMBERED.items() for n in range(1, last + 1)]
COLUMNS = ["Code", "Statement", "Test"]  # the code first: it is in view on narrow screens too


@dataclass(frozen=True)
class Row:
    """A row of the page: code spans of its columns."""

    label: str
    statement: str
    code: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def objects(self) -> list[str]:
        return [span for span in self.code if span.startswith("torch_locoprop.")]

    @property
    def figures(self) -> list[str]:
        return [
            span.removeprefix("locoprop figure ") for span in self.code if span not in self.objects
        ]


def rows_of(text: str) -> list[Row]:
    """Return the rows of all tables with the columns for code and tests."""
    rows, inside = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[1:] == COLUMNS:
            inside = True
        elif inside and set(line) - set("|- "):
            assert len(cells) == 4, f"{len(cells)} cells: {line}"
            code, tests = (tuple(re.findall(r"`([^`]+)`", cells[i])) for i in (1, 3))
            rows.append(Row(cells[0], cells[2], code, tests))
    return rows


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))
NUMBERED_ROWS = [row for row in ROWS if row.label in EXPECTED]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.label} {row.code[0]}")
each_numbered = pytest.mark.parametrize("row", NUMBERED_ROWS, ids=lambda row: row.label)


def cited(text: str, kind: str) -> set[int]:
    """Return the numbers that a text cites, such as 3, 4 and 7 for ``Eqs. 3 to 4 and 7``."""
    word = r"Eqs?\." if kind == "Eq." else f"{kind}s?"
    text = re.sub(r"(?: to| and)? \([a-f]\)", "", text)  # panels of a figure
    numbers: set[int] = set()
    for found in re.finditer(rf"\b{word}\s+(\d+(?:(?:,\s*|\s+and\s+|\s+to\s+|–)\d+)*)", text):
        for part in re.split(r",\s*|\s+and\s+", found[1]):
            first, *last = re.split(r"\s+to\s+|–", part)
            numbers |= set(range(int(first), int(last[0] if last else first) + 1))
    return numbers


def named(dotted: str) -> Any:
    """Return the module, or the object in a module, of that name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(dotted)


@cache
def names_of_tests(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_everything_numbered_has_one_row() -> None:
    assert [row.label for row in NUMBERED_ROWS] == EXPECTED
    others = {row.label for row in ROWS} - set(EXPECTED)
    assert others
    assert not any(label.startswith(tuple(NUMBERED)) for label in others)


@each_row
def test_objects_and_figures_exist(row: Row) -> None:
    assert row.code
    for name in row.objects:
        assert (named(name).__doc__ or "").strip(), f"{name} has no docstring."
    for name in row.figures:
        catalog.entry_of(name)


@each_row
def test_tests_exist(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name.startswith("test_"), test
        assert name in names_of_tests(path), f"{path} has no {name}."


@each_numbered
def test_docstrings_cite_the_number(row: Row) -> None:
    kind, number = row.label.split(" ")
    for name in row.objects:
        assert int(number) in cited(named(name).__doc__, kind), f"{name} does not cite {row.label}."
    for name in row.figures:
        assert int(number) in cited(catalog.entry_of(name).paper, kind)


def test_the_source_cites_no_equation_that_is_not_there() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        numbers = cited(path.read_text(encoding="utf-8"), "Eq.")
        assert numbers <= set(range(1, 20)), path


def test_citations_are_read_as_lists_and_ranges() -> None:
    assert cited("the fixed points of Eqs. 4, 8 and 17 to\n19, not Eq. 12–13.", "Eq.") == {
        *(4, 8, 17, 18, 19, 12, 13)
    }
    assert cited("Figures 6 (d) to (f) and 8", "Figure") == {6, 8}
    assert cited("Equation 3, Table 4, seq. 5", "Eq.") == set()
