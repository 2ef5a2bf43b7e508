"""Steps by replay equal eager steps.

On a GPU the replay is a CUDA graph, elsewhere the list of operations in ``emulated_graphs.py``.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_graphs import Emulated, emulate
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.distributed import collectives
from torch_locoprop.fast import cuda_graph as graphs
from torch_locoprop.solvers import Exact
from torch_locoprop.solvers.first_order import Sgd
from torch_locoprop.stepping.graph_work import work_of

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def _replays(monkeypatch: pytest.MonkeyPatch) -> None:
    # No recording reads tensors in place, except where a test allows it.
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", 0)
    if not GPU:
        emulate(monkeypatch)


def network(convolutional: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if convolutional:
        layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten()]
        layers += [nn.Linear(4 * 9, 6), nn.ReLU(), nn.Linear(6, 5)]
    else:
        layers = [nn.Linear(49, 12), nn.Tanh(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 5)]
    return nn.Sequential(*layers).to(DEVICE, torch.float64)


def batch(step: int, rows: int = 20, convolutional: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(rows, 49, generator=generator, dtype=torch.float64)
    return (images.unflatten(1, (1, 7, 7)) if convolutional else images).to(DEVICE)


def trained(
    steps: int = 9,
    rows: Callable[[int], int] = lambda step: 20,
    meanwhile: Callable[[int, nn.Module, LocoProp], None] = lambda step, model, optimizer: None,
    **settings: Any,
) -> tuple[list[Tensor], LocoProp]:
    convolutional = settings.pop("convolutional", False)
    model = network(convolutional)
    if "groups" in settings:
        settings["param_groups"] = settings.pop("groups")(model)
    optimizer = LocoProp(
        model, preset="paper-m", **{"lr": 1e-3, "output_transfer": "linear", **settings}
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        meanwhile(step, model, optimizer)
        optimizer.zero_grad()
        model(batch(step, rows(step), convolutional)).square().mean().backward()
        optimizer.step()
        schedule.step()
    states = [entry for p in model.parameters() for entry in optimizer.state[p].values()]
    return [*(p.detach().clone() for p in model.parameters()), *states], optimizer


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def muon_like(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_work_outside_runs_between_two_cuda_graphs(recwarn: pytest.WarningsRecorder) -> None:
    x, calls = torch.ones(3, device=DEVICE), []

    def work() -> Tensor:
        doubled = x * 2

        def between() -> None:
            calls.append(doubled.add_(1))

        graphs.outside(between)
        graphs.outside(between)  # with nothing between the two
        return doubled * 3

    assert work().tolist() == [12.0] * 3
    assert len(calls) == 2
    recording = graphs.Recording(work)
    assert len(calls) == 2
    for value in (1.0, 5.0):
        x.fill_(value)
        recording.replay()
        assert recording.result.tolist() == [3 * (2 * value + 2)] * 3
    assert len(calls) == 6
    assert not recwarn.list


def test_recorded_collectives_get_buffers_that_do_not_grow_in_number() -> None:
    """Tensors of the passes, and most of the recording's own, would be held in memory otherwise."""
    x, seen = torch.rand(3, 2, device=DEVICE), []

    def doubled(result: Tensor, given: Tensor) -> None:
        seen.append((result.data_ptr(), given.data_ptr(), given.is_contiguous()))
        result.copy_(2 * given)

    def negated(result: Tensor) -> None:
        seen.append((result.data_ptr(), 0, result.is_contiguous()))
        result.neg_()

    def work() -> tuple[Tensor, ...]:
        first = collectives.called(doubled, torch.empty_like(x), x)
        second = collectives.called(doubled, torch.empty_like(x), first + 1)
        third = collectives.called(doubled, x.new_empty(2, 3), x.mT)
        return first, second, third, collectives.called(negated, x + 2)

    def check(results: tuple[Tensor, ...]) -> None:
        for found, expected in zip(results, (2 * x, 4 * x + 2, 2 * x.mT, -x - 2), strict=True):
            assert torch.equal(found, expected)

    check(work())
    assert len({place for place, *_ in seen}) == 4
    assert seen[0][1] == x.data_ptr()
    assert all(is_contiguous for *_, is_contiguous in seen)
    seen.clear()
    recording = graphs.Recording(work)
    assert not seen
    for _ in range(2):
        x.copy_(torch.rand(3, 2))
        recording.replay()
        check(recording.result)
    assert seen[:4] == seen[4:]
    assert seen[0][:2] == seen[1][:2] != seen[2][:2]
    assert seen[3][0] == seen[0][0]
    assert x.data_ptr() not in {place for each in seen for place in each[:2]}


def test_a_recording_that_fails_has_run_nothing() -> None:
    x, calls = torch.ones(3, device=DEVICE), []

    def work() -> None:
        x.mul_(2)
        graphs.outside(lambda: calls.append(x.add_(1)))
        x.mul_(3)
        raise RuntimeError("too little memory")

    with pytest.raises(RuntimeError, match="too little memory"):
        graphs.Recording(work)
    assert x.tolist() == [1.0] * 3
    assert not calls
    graphs.outside(lambda: calls.append(x))
    assert len(calls) == 1
    recording = graphs.Recording(lambda: x + 1)
    recording.replay()
    assert recording.result.tolist() == [2.0] * 3


SETTINGS: dict[str, dict[str, Any]] = {
    "m": {"variant": "locoprop-m"},
    "s": {"variant": "locoprop-s", "local_steps": 3},
    "conv": {"convolutional": True},
    "adam": {"solver": "adam", "weight_decay": 0.1},
    "guards": {"gate": True, "cap": 0.1},
    "l2": {"regularizer": "l2"},
    "mean": {"local_reduction": "mean", "lr": 1e-2},
    "rows": {"max_rows": 7},
    "rows, s": {"max_rows": 16, "variant": "locoprop-s"},
    "gradient": {"apply": "gradient", "outer": muon_like, "local_steps": 4},
    "capped gradient": {"apply": "gradient", "outer": muon_like, "cap": 0.01},
    "nothing": {"apply": "nothing", "outer": None},
    "exact": {
        "solver": Exact(decay=0.9, every=7, damping=0.1),
        "variant": "locoprop-s",
        "apply": "gradient",
        "outer": muon_like,
        "local_reduction": "mean",
    },
    "exact, renewed": {
        "solver": Exact(every=2, damping=0.1),
        "variant": "locoprop-s",
        "steps": 24,
    },
    "preconditioned": {"solver": "preconditioned", "lr": 0.5, "gamma": 0.05},
    "averaged": {"solver": "preconditioned-averaged", "lr": 0.03, "gamma": 10.0},
    "exact-m": {"solver": Exact(every=8), "variant": "locoprop-m", "lr": 1e-2},
}


@pytest.mark.parametrize("in_place", [0, 4], ids=["copies", "in place"])
@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_equal_those_that_are_not(
    name: str, in_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", in_place)
    expected, _ = trained(cuda_graph=False, **SETTINGS[name])
    found, _ = trained(**SETTINGS[name])
    same(found, expected)
    if not GPU:
        kinds = 2 if name == "exact, renewed" else 1
        assert kinds <= Emulated.made <= kinds * (1 + in_place)
        assert Emulated.replayed >= kinds


@pytest.mark.parametrize("in_place", [0, 4], ids=["copies", "in place"])
def test_what_changes_between_steps_is_seen(in_place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed rates, settings, batch sizes, frozen layers and states are used in the next step."""
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", in_place)

    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        first = model.get_submodule("0")
        group = optimizer.param_groups[0]
        if step == 6:
            group["gamma"] = 3.0
        if step in (12, 18):
            first.requires_grad_(step == 18)
        if step == 24:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 30:
            with torch.no_grad():
                model.get_submodule("2").weight.mul_(0.5)
        if step == 36:
            group["local_steps"] = 4

    def rows(step: int) -> int:
        return 13 if step % 5 == 4 else 20

    expected, _ = trained(42, rows, meddle, cuda_graph=False)
    found, _ = trained(42, rows, meddle)
    same(found, expected)
    if not GPU:
        assert Emulated.made >= 4


def middle(model: nn.Module) -> nn.Linear:
    layer = model.get_submodule("2")
    assert isinstance(layer, nn.Linear)
    return layer


def strided(tensor: Tensor) -> Tensor:
    """Return the same matrix, stored by columns."""
    return tensor.mT.contiguous().mT


def exchange_data(model: nn.Module, optimizer: LocoProp) -> None:
    middle(model).weight.data = middle(model).weight.data.clone()


def exchange_strides(model: nn.Module, optimizer: LocoProp) -> None:
    weight = middle(model).weight  # at the same address
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def exchange_state(model: nn.Module, optimizer: LocoProp) -> None:
    state = optimizer.state[middle(model).weight]  # others at the same addresses
    state.update({name: entry.detach() for name, entry in state.items()})


def exchange_data_of_state(model: nn.Module, optimizer: LocoProp) -> None:
    for entry in optimizer.state[middle(model).weight].values():
        entry.data = entry.data.clone()


def exchange_gradients(model: nn.Module, optimizer: LocoProp) -> None:
    def lay_out(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = strided(p.grad)

    middle(model).weight.register_post_accumulate_grad_hook(lay_out)


def exchange_inputs(model: nn.Module, optimizer: LocoProp) -> None:
    middle(model).register_forward_pre_hook(lambda module, inputs: (strided(inputs[0]),))


def freeze(model: nn.Module, optimizer: LocoProp) -> None:
    middle(model).bias.requires_grad_(False)


def load(model: nn.Module, optimizer: LocoProp) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def move_to_another_group(model: nn.Module, optimizer: LocoProp) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def more_exact_products(model: nn.Module, optimizer: LocoProp) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def another(**settings: Any) -> Callable[[nn.Module, LocoProp], None]:
    def change(model: nn.Module, optimizer: LocoProp) -> None:
        optimizer.param_groups[0].update(settings)

    return change


CHANGES: dict[str, Callable[[nn.Module, LocoProp], None]] = {
    "data": exchange_data,
    "strides": exchange_strides,
    "state": exchange_state,
    "data of state": exchange_data_of_state,
    "gradients": exchange_gradients,
    "inputs": exchange_inputs,
    "frozen": freeze,
    "loaded": load,
    "group": move_to_another_group,
    "precision": more_exact_products,
    "gamma": another(gamma=3.0),
    "momentum": another(momentum=0.5),
    "decay": another(decay=0.5),
    "eps": another(eps=1e-2),
    "weight_decay": another(weight_decay=0.1),
    "local_steps": another(local_steps=4),
    "local_decay": another(local_decay="constant"),
    "local_reduction": another(local_reduction="mean"),
    "local_products": another(local_products="bf16"),
    "variant": another(variant="locoprop-s"),
    "regularizer": another(regularizer="l2"),
    "maximize": another(maximize=True),
    "max_rows": another(max_rows=7),
    "cap": another(cap=1e-3),
    "cap_by": another(cap=1e-3, cap_by="backprop"),
    "gate": another(gate=True),
}


@pytest.fixture
def _precision_stays() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    *most, last = model.parameters()
    return [{"params": most}, {"params": [last], "momentum": 0.5}]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("_precision_stays")
def test_every_change_makes_another_kind_of_step(name: str) -> None:
    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        if step == 6:
            CHANGES[name](model, optimizer)

    found, _ = trained(14, meanwhile=meddle, groups=two_groups)
    expected, _ = trained(14, meanwhile=meddle, groups=two_groups, cuda_graph=False)
    same(found, expected)
    if not GPU:
        assert Emulated.made == 2


def test_another_shape_at_the_same_address_is_another_kind_of_step() -> None:
    model = network()
    optimizer = LocoProp(model, preset="paper-m", output_transfer="linear")
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device=DEVICE)
    model(batch(0)).square().mean().backward()
    trained = {layer: layer.with_gradient for layer in optimizer._layers}

    def key() -> list[object]:
        groups, components = optimizer.param_groups, optimizer._components
        work = work_of(trained, optimizer._plan, groups, components, optimizer.state, 1.0)
        assert work is not None
        return work.key

    before = key()
    assert key() == before
    middle(model).weight.data = middle(model).weight.data.view(12, 6)
    assert key() != before


def test_rates_that_part_and_meet_again() -> None:
    """Groups with equal rates share a tensor, which is written only if the rate has changed."""
    rates = [(1e-3, 1e-3)] * 6 + [(1e-3, 2e-3)] * 5 + [(2e-3, 2e-3), (3e-3, 1e-3)] * 3
    rates += [(1e-3, 1e-3)] * 3

    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        for group, rate in zip(optimizer.param_groups, rates[step], strict=True):
            group["lr"] = rate

    expected, _ = trained(len(rates), meanwhile=meddle, groups=two_groups, cuda_graph=False)
    same(trained(len(rates), meanwhile=meddle, groups=two_groups)[0], expected)


def test_accumulated_gradients_and_layers_called_twice() -> None:
    runs = []
    for cuda_graph in (False, True):
        model = network()
        optimizer = LocoProp(
            model, preset="paper-m", lr=1e-3, output_transfer="linear", cuda_graph=cuda_graph
        )
        for step in range(8):
            for part in batch(step).split(8):
                model(part).square().sum().backward()
            model(batch(100 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([p.detach() for p in model.parameters()])
    same(runs[1], runs[0])


class Remembering(torch.optim.Optimizer):
    """Steps along the gradient of the step before, of which it keeps no copy."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.state[p].get("last", torch.zeros_like(p)))
                self.state[p]["last"] = p.grad


def test_what_an_outer_optimizer_keeps_is_not_written_over() -> None:
    settings = {"apply": "gradient", "outer": Remembering}
    same(trained(cuda_graph=False, **settings)[0], trained(**settings)[0])


@pytest.mark.filterwarnings("ignore:The local solution")
def test_first_steps_that_are_not_finite_do_not_stop_the_recording() -> None:
    model = network()
    optimizer = LocoProp(model, preset="paper-m", lr=1e-3, output_transfer="linear")
    for step in range(12):
        images = batch(step) * (torch.nan if step < 6 else 1.0)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    assert optimizer._graphs.failure is None
    assert GPU or Emulated.made == 1
    assert all(p.isfinite().all() for p in model.parameters())


class Growing(Exact):
    """A solver whose step depends on the number of problems before."""

    def solve(self, problem: Any, *others: Any) -> Any:
        new, states = super().solve(problem, *others)
        return {name: t * (1 + 1e-3 * problem.number) for name, t in new.items()}, states


class OneOfAUser(Sgd):
    """A solver that reads numbers on the host, as a user's solver may."""

    name = "mine"

    def step(self, gradient: Tensor, state: Any, numbers: Any) -> Any:
        return numbers.lr * gradient * (2.0 if gradient.sum().item() > 0 else 1.0), state


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": OneOfAUser()},
        {"diagnose": True},
        {"variant": "pocoprop-m"},
        {"solver": Exact(), "variant": "locoprop-s"},
        {"solver": Growing(every=7), "variant": "locoprop-s"},
        {"cuda_graph": False},
    ],
    ids=["solver", "diagnose", "rows' gradients", "closed form", "another one", "switched off"],
)
def test_what_may_look_at_numbers_is_not_recorded(settings: dict[str, Any]) -> None:
    trained(**settings)
    assert Emulated.made == 0


@pytest.mark.parametrize("where", ["cpu", DEVICE])
def test_a_learning_rate_that_is_a_tensor_is_read_in_every_step(where: Any) -> None:
    rate = torch.tensor(1e-3, dtype=torch.float64, device=where)
    runs = []
    for cuda_graph in (False, True):
        model = network()
        optimizer = LocoProp(
            model, preset="paper-m", lr=1e-3, output_transfer="linear", cuda_graph=cuda_graph
        )
        optimizer.param_groups[0]["lr"] = rate.clone()
        for step in range(8):
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (1 + step))
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        runs.append([p.detach() for p in model.parameters()])
    same(runs[1], runs[0])


def test_learning_rates_are_the_users_again_after_a_step() -> None:
    _, optimizer = trained(6)
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def test_a_step_that_cannot_be_recorded_is_taken_all_the_same_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(solve: graphs.Solve) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected, _ = trained(cuda_graph=False)
    monkeypatch.setattr(graphs, "Recording", refuse)
    with pytest.warns(UserWarning, match=r"could not be recorded.*cuda_graph=False") as warned:
        found, optimizer = trained()
    assert len(warned) == 1
    assert not optimizer._graphs._kinds  # what is not used holds no memory
    same(found, expected)


def test_a_loaded_state_leaves_no_recording_of_the_one_before() -> None:
    _, optimizer = trained()
    assert optimizer._graphs._kinds
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._graphs._kinds


def test_no_more_than_a_few_kinds_of_steps_are_kept() -> None:
    _, optimizer = trained(60, lambda step: 10 + step % 12)
    assert len(optimizer._graphs._kinds) <= graphs.MAX_KINDS


def test_a_copy_of_the_optimizer_records_anew() -> None:
    _, optimizer = trained()
    assert not copy.deepcopy(optimizer)._graphs._kinds


def in_place(
    moves: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[Tensor]:
    """Return the weights after a loop in which the batch has a new address before some steps."""
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(49, 5), nn.Tanh()).to(DEVICE, torch.float64)
    optimizer = LocoProp(model, preset="paper-m", lr=1e-3, **settings)
    images, kept = batch(0), []
    for step in range(12):
        if moves(step):
            kept.append(images)  # so that the next one is elsewhere
            images = images.clone()
        images.copy_(batch(step))
        optimizer.zero_grad(set_to_none=False)
        model(images).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("moves", "made", "copied"),
    [
        (lambda step: False, 1, []),
        (lambda step: step == 6, 2, []),
        (lambda step: step in (6, 8), 3, [3] * 3),
        (lambda step: step > 0, 1, [1] * 7),
    ],
    ids=["stays", "moves once", "moves twice", "moves always"],
)
def test_only_what_moves_is_copied(
    moves: Callable[[int], bool], made: int, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a batch that moves is copied, or everything after too many recordings."""
    expected = in_place(moves, monkeypatch, cuda_graph=False)
    counts: list[int] = []
    foreach_copy = torch._foreach_copy_

    def counting(to: list[Tensor], of: list[Tensor]) -> None:
        counts.append(len(to))
        foreach_copy(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    same(in_place(moves, monkeypatch), expected)
    if not GPU:
        assert Emulated.made == made
        assert counts == copied
