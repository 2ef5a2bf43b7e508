"""The layout of the package: who imports whom, and what follows from the table of settings."""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_locoprop
from torch_locoprop import Guards, LocoProp
from torch_locoprop.config import settings
from torch_locoprop.config.arguments import ARGUMENTS
from torch_locoprop.config.settings import (
    DEFAULTS,
    GRAPH_KEY_SETTINGS,
    LAYER_SETTINGS,
    PLAN_SETTINGS,
    SETTINGS,
    Setting,
    Settings,
)

ROOT = Path(torch_locoprop.__file__).parent

# Each package, or module at the top, imports only those before it.
ORDER = (
    *("paper", "solvers", "layers", "config", "fast", "distributed", "recording", "stepping"),
    *("reporting", "optimizer", "training_step"),
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


def imports(path: Path, *, inside_functions: bool) -> Iterator[str]:
    """The modules of the package that a file imports, type checking aside."""
    tree = ast.parse(path.read_text())
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack += node.orelse
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not inside_functions:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.partition(".")[0] == "torch_locoprop":
                base = node.module.removeprefix("torch_locoprop").lstrip(".")
                for alias in node.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    yield full if full in MODULES else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch_locoprop."):
                    yield alias.name.removeprefix("torch_locoprop.")
        stack += ast.iter_child_nodes(node)


def package(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package(module) for module in MODULES} == {*ORDER, ""}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_a_package_imports_only_those_before_it(module: str) -> None:
    own = package(module)
    for other in imports(MODULES[module], inside_functions=True):
        if other and package(other) != own:
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
        for other in imports(path, inside_functions=True):
            assert package(other) == "paper", f"{module} imports {other}"


def test_fast_paths_are_reached_through_dispatch_alone() -> None:
    for module, path in MODULES.items():
        if package(module) == "fast":
            continue
        for other in imports(path, inside_functions=True):
            assert package(other) != "fast" or other == "fast.dispatch", f"{module}: {other}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    edges = {
        module: set(imports(path, inside_functions=False)) - {module}
        for module, path in MODULES.items()
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


# ---- settings ------------------------------------------------------------------------------------


def test_the_signature_and_the_documentation_have_every_setting() -> None:
    parameters = inspect.signature(LocoProp).parameters
    for name, setting in SETTINGS.items():
        assert parameters[name].default == setting.default
        assert f"{name}: {setting.meaning[:20]}" in " ".join(str(LocoProp.__doc__).split())
    assert "{settings}" not in str(LocoProp.__doc__)


def test_what_is_derived_from_the_table() -> None:
    """A setting that says nothing about itself is part of the plan and of the key of a CUDA graph."""
    plain = Setting(default=1, meaning="anything")
    assert plain.in_plan
    assert plain.in_graph_key
    assert not plain.per_tensor
    assert set(GRAPH_KEY_SETTINGS) == set(SETTINGS) - {"lr"}
    assert set(PLAN_SETTINGS) == {n for n, s in SETTINGS.items() if s.in_plan}
    assert set(SETTINGS) - set(LAYER_SETTINGS) == {"lr", "momentum", "decay", "eps", "weight_decay"}
    assert set(DEFAULTS) == set(SETTINGS) == {"lr", *Settings.__annotations__}


def test_every_group_holds_every_setting() -> None:
    opt = LocoProp(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    assert set(SETTINGS) <= set(opt.param_groups[0])


def test_an_unknown_argument_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"'gama'.*Did you mean 'gamma'"):
        LocoProp(nn.Linear(3, 2), gama=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"), [("fallbak", "fallback"), ("layer", "layers"), ("guard", "guards")]
)
def test_every_argument_is_suggested(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        LocoProp(nn.Linear(3, 2), **{given: None})


def test_the_constructor_has_the_listed_arguments_and_the_settings() -> None:
    assert set(inspect.signature(LocoProp).parameters) == {*ARGUMENTS, *SETTINGS}


def test_a_subclass_has_a_signature_of_its_own() -> None:
    class Own(LocoProp):
        def __init__(self, model: nn.Module, alpha: float = 3.0) -> None:
            super().__init__(model, lr=alpha)

    assert list(inspect.signature(Own).parameters) == ["model", "alpha"]


def test_guards_are_the_settings_of_their_names() -> None:
    together = LocoProp(nn.Linear(3, 2), guards=Guards(cap=0.1, cap_by="backprop", gate=True))
    apart = LocoProp(nn.Linear(3, 2), cap=0.1, cap_by="backprop", gate=True)
    for name in settings.SETTINGS:
        assert together.param_groups[0][name] == apart.param_groups[0][name]


def test_guards_may_stand_in_a_group() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    groups = [
        {"params": list(model[0].parameters()), "guards": Guards(gate=True)},
        {"params": list(model[2].parameters())},
    ]
    opt = LocoProp(model, param_groups=groups)
    assert [group["gate"] for group in opt.param_groups] == [True, False]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"guards": Guards(), "cap": 0.1}, ValueError, "Given both in guards= and by itself: cap"),
        ({"guards": 0.1}, TypeError, "Must be a torch_locoprop.Guards"),
        ({"guards": Guards(cap=-1.0)}, ValueError, "Invalid cap=-1.0"),
    ],
)
def test_wrong_guards_are_refused(
    given: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LocoProp(nn.Linear(3, 2), **given)  # type: ignore[arg-type]


def test_capped_by_guards_is_capped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = LocoProp(model, lr=1.0, solver="sgd", local_steps=1, guards=Guards(cap=1e-3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(5, 3)).square().sum().backward()
    opt.step()
    moved = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()])
    torch.testing.assert_close(moved.norm(), 1e-3 * before["weight"].norm())
