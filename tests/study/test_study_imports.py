"""The packages of the study import only earlier ones, so a reader can start at the first."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_locoprop import study

PACKAGE = "torch_locoprop.study"
SHARED = "the modules beside the packages"
ORDER = (
    SHARED,
    *("data", "models", "methods", "training", "tuning", "figures", "equal_budgets"),
    *("report", "demo", "cli"),
)
ROOT = Path(study.__file__).parent


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield what a file of a package imports, in functions too, but not for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imported_modules(ast.Module(node.orelse, []), package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_modules(node, package)


def room_of(module: str) -> str | None:
    """Return the package of the study that a module is in; None if it is in none."""
    if not module.startswith(f"{PACKAGE}."):
        return None
    first = module.removeprefix(f"{PACKAGE}.").split(".")[0]
    return first if (ROOT / first).is_dir() else SHARED


def later_imports(source: str, module: str) -> list[str]:
    """Return the modules of later packages that the source of a module imports."""
    here = room_of(module)
    assert here is not None
    found = imported_modules(ast.parse(source), module.rpartition(".")[0])
    places = [(name, room_of(name)) for name in found]
    return [name for name, room in places if room and ORDER.index(room) > ORDER.index(here)]


def module_of(path: Path) -> str:
    return ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts])


FILES = sorted(
    path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"
)


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ORDER) - {SHARED}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_imports_a_later_package(path: Path) -> None:
    assert later_imports(path.read_text(), module_of(path)) == []


def test_there_is_no_cycle_between_packages() -> None:
    """Kahn's algorithm on the import graph, independent of the order above."""
    graph: dict[str, set[str]] = {room: set() for room in ORDER}
    for path in FILES:
        here = room_of(module_of(path))
        assert here is not None
        names = imported_modules(ast.parse(path.read_text()), module_of(path).rpartition(".")[0])
        graph[here] |= {room for name in names if (room := room_of(name)) and room != here}
    while graph:
        free = [room for room, needed in graph.items() if not needed & set(graph)]
        assert free, f"a cycle between {sorted(graph)}"
        for room in free:
            del graph[room]


@pytest.mark.parametrize(
    "source",
    [
        "import torch_locoprop.study.cli.main",
        "from torch_locoprop.study import cli",
        "from torch_locoprop.study.cli import main",
        "from ..cli import main",
        "def f():\n    from torch_locoprop.study.cli.main import main",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torch_locoprop.study.cli",
    ],
)
def test_the_check_detects_a_later_import(source: str) -> None:
    assert later_imports(source, f"{PACKAGE}.figures.catalog") != []
    assert later_imports(source, f"{PACKAGE}.cli.app") == []


def test_imports_for_type_checkers_do_not_count() -> None:
    source = "if TYPE_CHECKING:\n    from torch_locoprop.study.cli import main"
    assert later_imports(source, f"{PACKAGE}.data.idx") == []
