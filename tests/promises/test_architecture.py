"""The layout of the package: who imports whom."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_locoprop
from torch_locoprop.fast import dispatch

ROOT = Path(torch_locoprop.__file__).parent

# Each package, or module at the top, imports only those before it.
ORDER = (
    *("paper", "solvers", "layers", "config", "fast", "distributed", "recording", "stepping"),
    *("reporting", "optimizer", "training_step", "functional"),
    *("transfers", "losses", "targets", "regularizers", "variants"),  # public names of paper/
    *("baselines", "study"),
)


def modules() -> dict[str, Path]:
    """All modules of the package by dotted name, without the package's own name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def public_names() -> dict[str, str]:
    """The modules that the names of the package itself, such as ``LocoProp``, come from."""
    found = {}
    for node in ast.parse((ROOT / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = str(node.module).removeprefix("torch_locoprop").lstrip(".")
            found |= {alias.name: base or alias.name for alias in node.names}
    return found


PUBLIC = public_names()


def imports(path: Path, *, for_running: bool) -> Iterator[str]:
    """The modules of the package that a file imports.

    Args:
        path: the file.
        for_running: leave out imports inside functions and those for the type checker, which no
            import of the file runs.
    """
    tree = ast.parse(path.read_text())
    inside = ["torch_locoprop", *path.relative_to(ROOT).parent.parts]
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if for_running and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack += node.orelse
            continue
        if for_running and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative
                base = ".".join([*inside[: len(inside) - node.level + 1], base]).rstrip(".")
            if base.partition(".")[0] == "torch_locoprop":
                base = base.removeprefix("torch_locoprop").lstrip(".")
                for alias in node.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    yield full if full in MODULES else base or PUBLIC.get(alias.name, "")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch_locoprop":
                    yield alias.name.removeprefix("torch_locoprop").lstrip(".")
        stack += ast.iter_child_nodes(node)


def package(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("from torch_locoprop.paper import gram", "paper.gram"),
        ("from torch_locoprop.paper.gram import Gram", "paper.gram"),
        ("import torch_locoprop.paper.gram", "paper.gram"),
        ("from .gram import Gram", "paper.gram"),
        ("from . import gram", "paper.gram"),
        ("from ..solvers import exact", "solvers.exact"),
        ("from ..solvers.exact import Exact", "solvers.exact"),
        ("from .. import optimizer", "optimizer"),
        ("from torch_locoprop import LocoProp", "optimizer"),
        ("from .. import LocoProp", "optimizer"),
        ("from torch_locoprop import Guards", "config.settings"),
        ("import torch_locoprop", ""),
        ("from torch_locoprop import __version__", ""),
    ],
)
@pytest.mark.parametrize("where", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "])
def test_every_way_to_import_is_seen(
    line: str, imported: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: where + line)
    path = ROOT / "paper" / "any.py"
    assert list(imports(path, for_running=False)) == [imported]
    assert list(imports(path, for_running=True)) == ([] if where else [imported])


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package(module) for module in MODULES} == {*ORDER, ""}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_a_package_imports_only_those_before_it(module: str) -> None:
    own = package(module)
    for other in imports(MODULES[module], for_running=False):
        if other == "":  # the package itself, which imports all others
            assert own == "study", f"{module} imports the whole package"
        elif package(other) != own:
            assert ORDER.index(package(other)) < ORDER.index(own), f"{module} imports {other}"


def test_the_paper_imports_torch_and_nothing_else() -> None:
    allowed = {"torch", "torch_locoprop", *sys.stdlib_module_names}
    for module, path in MODULES.items():
        if package(module) != "paper":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in allowed, f"{module} imports {name}"
        for other in imports(path, for_running=False):
            assert package(other) == "paper", f"{module} imports {other}"


def test_no_package_but_the_study_and_the_list_of_layers_imports_by_a_string() -> None:
    for module, path in MODULES.items():
        if package(module) != "study" and module != "layers":
            assert not {"importlib", "__import__"} & set(re.findall(r"\w+", path.read_text())), (
                module
            )


def test_fast_paths_are_reached_through_dispatch_alone() -> None:
    for module, path in MODULES.items():
        if package(module) == "fast":
            continue
        for other in imports(path, for_running=False):
            assert package(other) != "fast" or other == "fast.dispatch", f"{module}: {other}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch_locoprop.fast.dispatch":
                names = {alias.name for alias in node.names}
                assert names <= set(dispatch.__all__), (
                    f"{module} reaches {names} by way of dispatch"
                )


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    edges = {
        module: set(imports(path, for_running=True)) - {module} for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " imports ".join((*above, module))
        if module in done:
            return
        for other in edges.get(module, ()):
            if other:  # the package itself is imported by everybody
                visit(other, (*above, module))
        done.add(module)

    for module in edges:
        if module:
            visit(module, ())


def test_the_optimizer_fits_into_a_short_file() -> None:
    assert len((ROOT / "optimizer.py").read_text().splitlines()) <= 300
