"""Small layers of one shape take spectral steps together, as if each took its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import batch, weights
from emulated_graphs import emulate
from torch import Tensor, nn

from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import GradientDescent
from torch_locoprop.paper.variants import Variant
from torch_locoprop.solvers import Numbers, Spectral
from torch_locoprop.stepping import stacked_steps
from torch_locoprop.stepping.build_problem import Posed

STEPS = 12  # C is renewed in the first ten, and in the eleventh


class OwnTarget(GradientDescent):
    """A target with a first gradient of its own."""

    def first_gradient(self, gradient: Any, gamma: Any, fisher: Any) -> Any:
        return {name: gamma * value.sign() for name, value in gradient.items()}


def mlp() -> nn.Sequential:
    """Return four linear layers of one shape, two of them without a bias, and two others."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(7, 5), nn.Tanh()]
    for i in range(4):
        layers += [nn.Linear(5, 5, bias=i > 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 3)).double()


def cnn() -> nn.Sequential:
    """Return three convolutions of one shape, of seven numbers as images."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(1, 4, 1), *(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))]
    return nn.Sequential(nn.Unflatten(1, (1, 7)), *layers, nn.Flatten(), nn.Linear(28, 3)).double()


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    """Give the first of the four layers another rate, and the second one weight decay."""
    first, second = model[2].parameters(), model[4].parameters()
    rest = [p for i in (0, 6, 8, 10) for p in model[i].parameters()]
    return [
        {"params": [*first], "lr": 0.07},
        {"params": [*second], "weight_decay": 0.1},
        {"params": rest},
    ]


def two(model: nn.Sequential) -> dict[str, Any]:
    """Let an outer optimizer make the step of the displacements."""
    return {"preset": "spectral", "apply": "gradient", "outer": lambda p: torch.optim.SGD(p, 0.5)}


MLP: dict[str, Callable[[nn.Sequential], dict[str, Any]]] = {
    "default": lambda model: {},
    "spectral": lambda model: {"preset": "spectral", "lr": 0.1},
    "in blocks": lambda model: {"gram": "block", "block_size": 3},
    "diagonal": lambda model: {"gram": "diagonal"},
    "groups": lambda model: {"param_groups": groups(model)},
    "decay": lambda model: {"weight_decay": 0.2, "maximize": True},
    "outer": two,
    "capped": lambda model: {"cap": 0.01},
    "measured": lambda model: {"diagnose": True},
    "some rows": lambda model: {"max_rows": 5},
}


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the layers in each stack that was solved."""
    found: list[list[str]] = []

    def noted(layers: Sequence[Posed]) -> Any:
        found.append([posed.layer.name for posed in layers])
        return solved(layers)

    solved = stacked_steps.solved
    monkeypatch.setattr(stacked_steps, "solved", noted)
    return found


def step(model: nn.Sequential, opt: LocoProp, seed: int) -> None:
    weight = next(model.parameters())
    x, target = batch(9, 7, seed=seed).to(weight), batch(9, 3, seed=seed + 99).to(weight)
    loss = (model(x) - target).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    opt.step()
    opt.zero_grad()


def assert_equal(found: LocoProp, expected: LocoProp) -> None:
    """Assert that weights and states are equal to rounding."""
    for group, other in zip(found.param_groups, expected.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
            assert found.state[p].keys() == expected.state[q].keys()
            for key, entry in found.state[p].items():
                torch.testing.assert_close(entry, expected.state[q][key], rtol=1e-7, atol=1e-9)


def compare(
    model: nn.Sequential,
    settings: Callable[[nn.Sequential], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    steps: int = STEPS,
) -> None:
    """Compare steps in stacks with steps of each layer alone."""
    other = copy.deepcopy(model)
    opt, alone = LocoProp(model, **settings(model)), LocoProp(other, **settings(other))
    for seed in range(steps):
        step(model, opt, seed)
        with monkeypatch.context() as context:
            context.setattr(stacked_steps, "LARGEST", 0)
            context.setattr(stacked_steps, "LARGEST_ON_GPU", 0)
            step(other, alone, seed)
    assert_equal(opt, alone)


@pytest.mark.parametrize("name", MLP)
def test_a_stack_takes_the_steps_of_its_layers(
    name: str, monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    compare(mlp(), MLP[name], monkeypatch)
    with_bias, without = ["8", "6"], ["4", "2"]
    assert stacks == STEPS * ([with_bias] if name == "groups" else [with_bias, without])


@pytest.mark.parametrize("name", ["default", "spectral", "in blocks", "groups", "outer", "capped"])
def test_on_a_gpu_steps_that_renew_nothing_are_stacked(
    name: str, monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """The CUDA graphs of a step have the stacks in them; without a GPU, those of emulated graphs."""
    if not torch.cuda.is_available():
        emulate(monkeypatch)
    model = mlp().to("cuda" if torch.cuda.is_available() else "cpu")
    compare(model, lambda each: {**MLP[name](each), "local_products": "full"}, monkeypatch, 24)
    with_bias, without = ["8", "6"], ["4", "2"]
    kinds = [with_bias] if name == "groups" else [with_bias, without]
    assert stacks, "no step was stacked"
    assert stacks == len(stacks) // len(kinds) * kinds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says that it is a GPU."""
    emulate(monkeypatch)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "is_cpu", False)


FULL: dict[str, Any] = {"local_products": "full"}


def test_a_stack_on_a_gpu_has_a_limit(
    gpu: None, monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """Of three layers of 5 x 5 that are taken at a time, two have the same tensors."""
    monkeypatch.setattr(stacked_steps, "STACK_ON_GPU", 99)
    compare(mlp(), lambda model: FULL, monkeypatch, 16)
    assert set(map(tuple, stacks)) == {("8", "6")}
    layers: Any = [SimpleNamespace(kind=LinearLayer(), like=torch.zeros(4, 5))] * 5
    monkeypatch.setattr(stacked_steps, "STACK_ON_GPU", 50)
    assert [len(part) for part in stacked_steps.parts(layers)] == [2, 2, 1]
    monkeypatch.setattr(stacked_steps, "STACK_ON_GPU", 10)
    assert [len(part) for part in stacked_steps.parts(layers)] == [1] * 5


def test_small_matrices_on_a_gpu_have_a_small_c(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_steps, "LARGEST_ON_GPU", 30)
    shapes = [(5, 5), (6, 5), (7, 5), (5, 6), (1, 5, 5)]
    found = [stacked_steps.is_small(torch.zeros(shape)) for shape in shapes]
    assert found == [True, True, False, False, False]


def test_on_a_gpu_a_renewal_in_any_step_is_not_stacked(
    gpu: None, monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """Two layers without their biases have another C in the thirteenth step."""
    model, other = mlp(), mlp()
    opt, alone = LocoProp(model, **FULL), LocoProp(other, **FULL)
    for seed in range(16):
        for each in (model, other):
            each[8].bias.requires_grad_(seed < 12)
            each[6].bias.requires_grad_(seed < 12)
        stacks.clear()
        step(model, opt, seed)
        if seed > 11:
            assert stacks == ([["4", "2"]] if seed == 12 else [["8", "6", "4", "2"]])
        with monkeypatch.context() as context:
            context.setattr(stacked_steps, "LARGEST_ON_GPU", 0)
            step(other, alone, seed)
    assert_equal(opt, alone)


def test_learning_rates_on_a_device_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """Since Python 3.13 dataclasses compare the values of their fields, which the host would read."""

    def compared(one: Numbers, other: Numbers) -> bool:
        raise AssertionError("learning rates were compared")

    emulate(monkeypatch)
    monkeypatch.setattr(Numbers, "__eq__", compared)
    model = mlp()
    opt = LocoProp(model)
    for seed in range(STEPS):
        step(model, opt, seed)
    assert stacks == [["8", "6"], ["4", "2"]]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_steps_that_start_during_the_backward_pass_are_not_stacked(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """A training step on a CPU takes all steps after the backward pass."""
    if on_gpu:
        emulate(monkeypatch)
    model = mlp()
    training_step = TrainingStep(model, nn.MSELoss(), LocoProp(model))
    for seed in range(STEPS):
        training_step(batch(9, 7, seed=seed), batch(9, 3, seed=seed + 99))
    assert stacks == ([] if on_gpu else STEPS * [["8", "6"], ["4", "2"]])


def test_processes_solve_layers_that_they_share_in_one_order() -> None:
    """A layer that one of them has not called must not be solved at another place there."""
    model = mlp()
    opt = LocoProp(model, diagnose=True)
    model(batch(9, 7)).sum().backward()
    layers = opt._layers_with_gradient()
    steps = opt._pose_problems(layers)
    assert len(steps._alike(layers)) == 3
    facts: Any = SimpleNamespace(all_have_rows=True)
    for layer in layers:
        layer.shared_facts = facts
    assert steps._alike(layers) == [[layer] for layer in reversed(layers)]


def test_convolutions_of_one_shape(
    monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    compare(cnn(), lambda model: {}, monkeypatch)
    assert stacks == STEPS * [["4", "3", "2"]]


def test_layers_join_and_leave_a_stack(
    monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    """A layer that is frozen for some steps has another state, and a frozen bias another matrix."""
    model, other = mlp(), mlp()
    opt, alone = LocoProp(model), LocoProp(other)
    for seed in range(STEPS):
        for each in (model, other):
            each[8].requires_grad_(not 2 <= seed < 4)
            each[6].bias.requires_grad_(not 6 <= seed < 9)
        step(model, opt, seed)
        with monkeypatch.context() as context:
            context.setattr(stacked_steps, "LARGEST", 0)
            step(other, alone, seed)
    assert_equal(opt, alone)
    assert stacks[0] == ["8", "6"]
    assert ["6", "4", "2"] in stacks, "while its bias is frozen"


def test_a_bias_with_a_step_of_its_own(stacks: list[list[str]]) -> None:
    """Its state is another one, which stays after the bias is frozen, and has no effect then."""
    model, other = mlp(), mlp()
    solver = Spectral(agreement=1.0, bias_rate=0.5)
    opt, alone = LocoProp(model, solver=solver), LocoProp(other, solver=solver)
    for seed in range(STEPS):
        for each in (model, other):
            each[6].bias.requires_grad_(not 4 <= seed < 8)
        step(model, opt, seed)
        with pytest.MonkeyPatch.context() as context:
            context.setattr(stacked_steps, "LARGEST", 0)
            step(other, alone, seed)
    assert_equal(opt, alone)
    # Not while the bias is frozen, nor in the step after, for which the state has another shape.
    assert stacks.count(["8", "6"]) == STEPS - 5


class Skipping(nn.Sequential):
    """Layers of which one may be left out."""

    skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self):
            x = x if i == self.skipped else layer(x)
        return x


def test_a_layer_that_missed_a_renewal_renews_alone(
    monkeypatch: pytest.MonkeyPatch, stacks: list[list[str]]
) -> None:
    model, other = Skipping(*mlp()), Skipping(*mlp())
    opt, alone = LocoProp(model), LocoProp(other)
    for seed in range(13):
        model.skipped = other.skipped = 6 if seed == 10 else None
        stacks.clear()
        step(model, opt, seed)
        if seed >= 10:
            assert stacks == ([["4", "2"]] if seed < 12 else [["8", "6"], ["4", "2"]])
        with monkeypatch.context() as context:
            context.setattr(stacked_steps, "LARGEST", 0)
            step(other, alone, seed)
    assert_equal(opt, alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": "general", "variant": Variant("own", OwnTarget(), Squared())},
        {"preset": "paper-m"},
        {"variant": "locoprop-s", "solver": "exact"},
    ],
    ids=["own target", "LocoProp-M", "closed form"],
)
def test_other_steps_are_taken_alone(settings: dict[str, Any], stacks: list[list[str]]) -> None:
    model = mlp()
    step(model, LocoProp(model, output_transfer="linear", **settings), 0)
    assert stacks == []


def test_layers_on_other_devices_are_taken_alone() -> None:
    matrix = torch.zeros(2, 2)
    assert stacked_steps.is_small(matrix)
    assert not stacked_steps.is_small(matrix.to("meta"))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.01},
        {"momentum": 0.5},
        {"decay": 0.5},
        {"local_products": "full"},
        {"gram": "diagonal"},
        {"solver": Spectral(every=5)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_layer_with_settings_of_its_own_is_taken_alone(
    settings: dict[str, Any], stacks: list[list[str]]
) -> None:
    model = mlp()
    rest = [p for i in (0, 2, 4, 6, 10) for p in model[i].parameters()]
    groups = [{"params": [*model[8].parameters()], **settings}, {"params": rest}]
    step(model, LocoProp(model, param_groups=groups), 0)
    assert stacks == [["4", "2"]]


def test_layers_that_were_not_called_are_taken_alone(stacks: list[list[str]]) -> None:
    """They have a gradient, here of a penalty, and no rows; the user is told."""
    model = mlp()
    for name in ("one", "two"):
        model.add_module(name, nn.Linear(5, 5).double())
    opt = LocoProp(model)
    penalty = sum(layer.weight.square().sum() for layer in (model.one, model.two))
    (model[:11](batch(9, 7)).square().mean() + penalty).backward()
    with pytest.warns(UserWarning, match="'two'"), pytest.warns(UserWarning, match="'one'"):
        opt.step()
    assert stacks == [["8", "6"], ["4", "2"]]


@pytest.mark.parametrize(("n", "expected"), [(128, [["1", "0"]]), (129, [])])
def test_large_layers_are_solved_alone(
    n: int, expected: list[list[str]], stacks: list[list[str]]
) -> None:
    model = nn.Sequential(nn.Linear(n, n), nn.Linear(n, n))
    opt = LocoProp(model)
    model(torch.randn(2, n)).square().mean().backward()
    opt.step()
    assert stacks == expected


def test_a_layer_that_is_not_finite_stays_and_the_others_move(stacks: list[list[str]]) -> None:
    model = mlp()
    opt = LocoProp(model)
    step(model, opt, 0)
    before = copy.deepcopy([*model.parameters()])
    state = copy.deepcopy(opt.state[model[6].weight])
    model(batch(9, 7, seed=1)).square().mean().backward()
    model[6].weight.grad[1, 2] = torch.nan
    with pytest.warns(UserWarning, match="The local solution of '6' was not finite"):
        opt.step()
    assert stacks[2] == ["8", "6"]
    stays = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    own = [any(p is q for q in model[6].parameters()) for p in model.parameters()]
    assert stays == own
    assert all(torch.equal(opt.state[model[6].weight][key], state[key]) for key in state)
    opt.zero_grad()
    step(model, opt, 2)
    assert not torch.equal(model[6].weight, before[own.index(True)])


@pytest.mark.parametrize("converted", [False, True])
def test_states_share_no_memory_and_training_goes_on_from_them(converted: bool) -> None:
    model = mlp()
    opt = LocoProp(model)
    for seed in range(3):
        step(model, opt, seed)
    if converted:  # the states follow in the next step
        model.float()
        step(model, opt, 3)
        model.double()
        step(model, opt, 3)
    entries = [entry for state in opt.state.values() for entry in state.values()]
    assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in entries)
    places = {entry.untyped_storage().data_ptr() for entry in entries}
    assert len(places) == len(entries)
    other = mlp()
    other.load_state_dict(model.state_dict())
    loaded = LocoProp(other)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for seed in range(3, 6):
        step(model, opt, seed)
        step(other, loaded, seed)
    assert all(map(torch.equal, weights(model), weights(other)))


def test_every_layer_of_a_stack_has_its_share_of_the_time(stacks: list[list[str]]) -> None:
    model = mlp()
    opt = LocoProp(model, diagnose=True)
    step(model, opt, 0)
    assert stacks[0] == ["8", "6"]
    found: dict[str, Tensor | float] = {row.layer: row.milliseconds for row in opt.diagnostics()}
    assert found.keys() == {"0", "2", "4", "6", "8", "10"}
    assert all(value > 0 for value in found.values())
