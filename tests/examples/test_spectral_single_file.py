"""The single-file version of the spectral step equals LocoProp's, and its control runs are controls."""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Spectral

FILE = Path(__file__).parents[2] / "examples/spectral_single_file.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("spectral_single_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for it
    spec.loader.exec_module(module)
    return module


EXAMPLE = _load()


def model(bias: bool = True) -> nn.Sequential:
    """Return a network with two layers of one shape, which are a stack."""
    torch.manual_seed(0)
    sizes = [(6, 8), (8, 8), (8, 8), (8, 3)]
    parts: list[nn.Module] = []
    for n, d in sizes:
        parts += [nn.Linear(n, d, bias=bias, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range, parts: int = 1) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(20, 3, generator=generator, dtype=torch.float64)
        for piece, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (nn.functional.mse_loss(net(piece), wanted) / parts).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_it_imports_torch_alone() -> None:
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [1, 4])
def test_steps_are_those_of_the_preset(bias: bool, parts: int) -> None:
    ours, theirs = model(bias), model(bias)
    options = {"lr": 0.02, "weight_decay": 0.1}
    expected = train(theirs, LocoProp(theirs, preset="spectral", **options), range(25))
    found = train(ours, EXAMPLE.Spectral(ours.modules(), **options), range(25), parts)
    assert_equal(found, expected)


def test_steps_are_those_of_the_defaults() -> None:
    ours, theirs = model(), model()
    expected = train(theirs, LocoProp(theirs), range(25))
    opt = EXAMPLE.Spectral(ours.modules(), lr=0.04, agreement=1.0, bias_rate=0.0)
    assert_equal(train(ours, opt, range(25)), expected)


def test_frozen_parameters_stay() -> None:
    ours, theirs = model(), model()
    for net in (ours, theirs):
        net[0].requires_grad_(False)
        net[2].bias.requires_grad_(False)
    expected = train(theirs, LocoProp(theirs, preset="spectral"), range(12))
    assert_equal(train(ours, EXAMPLE.Spectral(ours.modules()), range(12)), expected)


def test_the_control_of_gradients_has_no_use_of_inputs() -> None:
    """With a very large λ the inverse is a multiple of I, and the direction that of the gradient."""
    ours, theirs = model(), model()
    solver = Spectral(damping=1e9)
    expected = train(theirs, LocoProp(theirs, preset="spectral", solver=solver), range(15))
    opt = EXAMPLE.Spectral(ours.modules(), apply="gradient")
    assert_equal(train(ours, opt, range(15)), expected, 1e-6)
    assert opt.state[ours[0].weight]["inverse"].shape == (1, 7, 7)  # it was solved all the same


def test_the_control_of_nothing_leaves_the_weights() -> None:
    ours = model()
    before = [p.detach().clone() for p in ours.parameters()]
    opt = EXAMPLE.Spectral(ours.modules(), apply="nothing", weight_decay=0.1)
    assert_equal(train(ours, opt, range(3)), before, 0.0)
    assert len(opt.state[ours[2].weight]["inverse"]) == 2


def test_passes_without_gradients_do_not_count() -> None:
    ours, theirs = model(), model()
    opt = EXAMPLE.Spectral(ours.modules())
    with torch.no_grad():
        ours(torch.full((5, 6), 100.0, dtype=torch.float64))
    ours.eval()(torch.full((5, 6), 100.0, dtype=torch.float64))
    expected = train(theirs, LocoProp(theirs, preset="spectral"), range(3))
    assert_equal(train(ours.train(), opt, range(3)), expected)


@pytest.mark.parametrize("stop", [4, 15])
def test_resumed_steps_have_the_same_bits(stop: int) -> None:
    whole, first, second = model(), model(), model()

    def make(net: nn.Module) -> Any:
        return EXAMPLE.Spectral(net.modules(), agreement=1.0)

    expected = train(whole, make(whole), range(25))
    opt = make(first)
    train(first, opt, range(stop))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    resumed = make(second)
    resumed.load_state_dict(saved["opt"])
    assert_equal(train(second, resumed, range(stop, 25)), expected, 0.0)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_passes_record_the_same() -> None:
    ours, theirs = model(), model()
    opt = EXAMPLE.Spectral(ours.modules())
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = train(theirs, EXAMPLE.Spectral(theirs.modules()), range(13))
    train(compiled, opt, range(13))
    assert_equal([p.detach() for p in ours.parameters()], expected)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"apply='all'\. Must be one of solution, gradient"):
        EXAMPLE.Spectral(model().modules(), apply="all")
    with pytest.raises(TypeError, match=r"torch.bfloat16. Keep weights in float32"):
        EXAMPLE.Spectral(model().bfloat16().modules())
    opt = EXAMPLE.Spectral(model().modules())
    with pytest.raises(RuntimeError, match=r"call backward\(\) before step"):
        opt.step()


def test_the_script_trains(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question.\n" * 60)
    options = ["--steps", "20", "--layers", "1", "--width", "16", "--context", "16"]
    command = [sys.executable, str(FILE), "--text", str(text), "--device", "cpu", *options]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    losses = [float(line.split("train loss")[1].split()[0]) for line in lines]
    assert len(losses) == 10
    assert losses[0] > 5.4  # of 256 bytes: 5.55
    assert losses[-1] < 4.0
