"""Examples in module docstrings of the study import what exists and call what exists."""

import ast
import builtins
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from torch_locoprop import study

MODULES = [
    module.name
    for module in pkgutil.walk_packages(study.__path__, f"{study.__name__}.")
    if not module.name.endswith("__main__")
]


def examples(docstring: str) -> Iterator[str]:
    """Yield the indented blocks that import something."""
    for block in re.findall(r"(?:^    .*\n|^\n)+", docstring + "\n", re.MULTILINE):
        if re.search(r"^    (from|import) ", block, re.MULTILINE):
            yield textwrap.dedent(block)


FOUND = [
    (name, example)
    for name in MODULES
    for example in examples(importlib.import_module(name).__doc__ or "")
]


def attributes(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the attributes of every `name.attribute`."""
    for node in ast.walk(tree):
        chain: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if chain and isinstance(inner, ast.Name):
            yield inner.id, chain


def test_there_are_examples() -> None:
    names = {name for name, _ in FOUND}
    assert f"{study.__name__}.methods" in names
    assert f"{study.__name__}.tuning.campaign" in names


@pytest.mark.parametrize(("name", "example"), FOUND, ids=[name for name, _ in FOUND])
def test_names_in_an_example_exist(name: str, example: str) -> None:
    tree = ast.parse(example)
    known: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), name, "exec"), known)
    for first, chain in attributes(tree):
        value = known.get(first)
        for attribute in chain if first in known else ():
            assert hasattr(value, attribute), f"{first}.{'.'.join(chain)} in {name}"
            value = getattr(value, attribute)
    assert used(tree) <= set(known) | set(dir(builtins)) | bound(tree)


def used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def bound(tree: ast.AST) -> set[str]:
    """Return the names that the example itself defines."""
    nodes = list(ast.walk(tree))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return stored | arguments | {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
