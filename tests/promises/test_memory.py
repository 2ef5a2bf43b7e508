"""The memory of a step, in numbers: at most what the paper's Table 1 allows.

For a layer with n inputs, d outputs and b rows the table allows ``O(d n) + O(b (n + d))``. What is kept
for all layers at once is counted with the constant one. Only the layer whose problem is being solved
needs more: the constants below say how many times its weights and its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.fast import cpu_onednn
from torch_locoprop.solvers import Exact
from torch_locoprop.study.figures.memory import LiveBytes

WIDTHS = (64, 96, 32, 80, 48)
LAYERS = list(pairwise(WIDTHS))
WEIGHTS = max(d * (n + 1) for n, d in LAYERS)
OUTPUTS = max(d for _, d in LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore:In the first step")  # odd scales on purpose
SCALARS = 64  # counters, norms, the loss

# At a time, of the layer being solved: the iterate and its displacement, the gradient that came, the
# first and the present local one, and two of the solver.
WORK_ON_WEIGHTS = 7
# The pre-activations at the start and now, the target, f(a) and the residual; PocoProp also has the
# residual at the start and, for the derivative, two factors instead of one.
WORK_ON_OUTPUTS = {"locoprop-s": 0, "locoprop-m": 5, "pocoprop-m": 8}

each_variant = pytest.mark.parametrize("variant", list(WORK_ON_OUTPUTS))
each_batch = pytest.mark.parametrize("b", [8, 64, 512])

Make = Callable[[nn.Module], Optimizer]


@pytest.fixture(autouse=True, params=["plain", "joined"])
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the plain version, and with the fast path for large layers on a CPU."""
    monkeypatch.setattr(cpu_onednn, "LARGE", 0 if request.param == "joined" else torch.inf)


def plain(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)


def loco(variant: str) -> Make:
    return lambda model: LocoProp(model, lr=1e-5, variant=variant, output_transfer="linear")


def kept_by_table(variant: str, b: int) -> int:
    """Return the size of all layers' rows: inputs and, except for LocoProp-M, gradients."""
    if variant == "locoprop-s":
        return sum(min(b * n, n * n + n) for n, _ in LAYERS)
    return sum(b * n if variant == "locoprop-m" else b * (n + d) for n, d in LAYERS)


class Training:
    """A model in training; the loss of the last step stays alive, as in most loops."""

    def __init__(self, make: Make, b: int) -> None:
        torch.manual_seed(0)
        layers = [part for n, d in LAYERS for part in (nn.Linear(n, d), nn.Tanh())][:-1]
        self.model = nn.Sequential(*layers)
        self.opt = make(self.model)
        self.x, self.y = torch.randn(b, WIDTHS[0]), torch.randn(b, WIDTHS[-1])
        self.losses: list[Tensor] = []
        self.steps(2)  # transfers are known, states are there

    def backward(self) -> None:
        self.losses[:] = [nn.functional.mse_loss(self.model(self.x), self.y)]
        self.losses[0].backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.opt.step()
            self.opt.zero_grad()


def kept(make: Make, b: int) -> int:
    """Return how many numbers are kept between the backward pass and the step."""
    training = Training(make, b)
    with LiveBytes() as count:
        training.backward()
        return count.now // 4


def peak(make: Make, b: int, steps: int = 1) -> int:
    """Return the peak of numbers in a step, without weights and optimizer state."""
    training = Training(make, b)
    with LiveBytes() as count:
        training.steps(steps)
    return count.peak // 4


@each_variant
@each_batch
def test_what_is_kept_of_all_layers(variant: str, b: int) -> None:
    assert kept(loco(variant), b) - kept(plain, b) <= kept_by_table(variant, b) + SCALARS


@each_variant
@each_batch
def test_the_peak_adds_the_work_on_one_layer(variant: str, b: int) -> None:
    """The backward pass needs what a plain one needs; the step starts with only gradients left."""
    work = WORK_ON_WEIGHTS * WEIGHTS + WORK_ON_OUTPUTS[variant] * b * OUTPUTS
    if variant == "locoprop-s":
        work += max(n * n + n for n, _ in LAYERS)  # XᵀX, of a layer whose rows were kept
    rows = kept(loco(variant), b) - kept(plain, b)
    most = max(peak(plain, b), kept(plain, b) + work) + rows
    assert peak(loco(variant), b) <= most + SCALARS


@each_variant
def test_state_is_two_numbers_a_weight(variant: str) -> None:
    """RMSProp has two numbers for each weight, as Adam has in the same row of the table."""
    training = Training(loco(variant), 8)
    held = sum(t.numel() for state in training.opt.state.values() for t in state.values())
    assert held == 2 * sum(d * (n + 1) for n, d in LAYERS)


def test_locoprop_s_is_independent_of_the_batch_beyond_the_plain_step() -> None:
    first, second = (peak(loco("locoprop-s"), b) - peak(plain, b) for b in (2048, 4096))
    assert kept(loco("locoprop-s"), 2048) - kept(plain, 2048) <= kept_by_table("locoprop-s", 2048)
    assert second <= first + SCALARS


ROWS = 4096
SQUARE = 64 * 65  # XᵀX and Xᵀ1
CLOSED_FORM = Exact(decay=0.9, every=2, damping=1e-3)


def held_of_rows(layer: nn.Module, x: Tensor, steps: int = 3, **options: Any) -> list[int]:
    """Return how many numbers of a layer's rows are kept after each backward pass."""
    model = nn.Sequential(layer, nn.GroupNorm(2, 16))
    fallback = lambda params: torch.optim.SGD(params, lr=1e-3)  # noqa: E731
    held = []
    opt = LocoProp(model, lr=1e-5, fallback=fallback, **options)
    for _ in range(steps):
        out = model(x)
        with LiveBytes() as count:
            out.square().mean().backward()
            before = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
            held.append(count.now // 4 - before)
        own = opt._layers[0].calls[0].x.numel()  # as large as the input, which is the loop's too
        held[-1] += own
        del out
        opt.step()
        opt.zero_grad()
    return held


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"variant": "locoprop-s"}, [SQUARE] * 3),
        ({"variant": "locoprop-s", "solver": CLOSED_FORM}, [SQUARE] * 3),
        ({"variant": "locoprop-m"}, [ROWS * 64, SQUARE, SQUARE]),  # once it is known to take S
        ({"variant": "locoprop-m", "solver": CLOSED_FORM}, [ROWS * 64, SQUARE, SQUARE]),
        ({"variant": "locoprop-s", "solver": "exact"}, [2 * SQUARE] * 3),  # in float64
        ({"variant": "locoprop-s", "solver": Exact(every=2, damping=1e-3)}, [SQUARE, 0, SQUARE]),
        ({"variant": "locoprop-s", "local_steps": 1}, [0] * 3),
        ({"variant": "locoprop-m", "local_steps": 1}, [0] * 3),
        ({"variant": "locoprop-s", "every": 2}, [SQUARE, 0, SQUARE]),
    ],
)
def test_what_a_squared_loss_keeps(options: dict[str, Any], expected: list[int]) -> None:
    found = held_of_rows(nn.Linear(64, 16), torch.randn(ROWS, 64), **options)
    for own, most in zip(found, expected, strict=True):
        assert own <= most + SCALARS, (found, expected)


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("solver", ["sgd", CLOSED_FORM])
def test_what_convolutions_keep(channels: int, solver: Any) -> None:
    n, x = 9 * channels, torch.randn(16, channels, 40, 40)
    own = {"variant": "locoprop-s", "solver": solver}
    assert x.numel() > n * n + n
    for held in held_of_rows(nn.Conv2d(channels, 16, 3), x, **own):
        assert held <= n * n + n + SCALARS


@each_variant
def test_nothing_grows_over_steps(variant: str) -> None:
    assert peak(loco(variant), 64, steps=8) <= peak(loco(variant), 64, steps=2)
    training = Training(loco(variant), 64)
    with LiveBytes() as count:
        held = []
        for _ in range(6):
            training.steps(1)
            held.append(count.now)
    assert len(set(held)) == 1
