"""``TrainingStep``: on a CPU the written-out loop to the last bit, with CUDA graphs to rounding.

On a GPU the CUDA graphs are real. Elsewhere they are those of ``emulated_graphs.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from changed_settings import CHANGED
from emulated_graphs import Emulated, emulate
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.distributed import ddp
from torch_locoprop.fast import cuda_graph
from torch_locoprop.solvers.first_order import Sgd

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

Take = Callable[..., Tensor]
Make = Callable[[nn.Module, Callable[..., Tensor], Optimizer], Take]


def written_out(
    model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: Optimizer
) -> Callable[..., Tensor]:
    """The loop that every step is compared with."""

    def take(inputs: Any, *targets: Any) -> Tensor:
        loss = loss_fn(model(inputs), *targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return take


def mlp(device: torch.device = DEVICE) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)]
    return nn.Sequential(*layers).to(device, torch.float64)


def data(step: int, rows: int = 12, device: torch.device = DEVICE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x.to(device), y.to(device)


def locoprop(model: nn.Module, **settings: Any) -> LocoProp:
    # Only whole steps are recorded here: what opt.step() records itself is in fast/test_cuda_graph.
    if "preset" not in settings:
        settings = {"variant": "locoprop-m", **settings}
    return LocoProp(model, **{"lr": 1e-3, "loss_fn": F.mse_loss, "cuda_graph": False, **settings})


class Momentum(Optimizer):
    """An optimizer of a user, which says that it can be recorded."""

    capturable = True

    def __init__(self, params: Any, lr: float = 0.05, mu: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "mu": mu})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    v = state.setdefault("v", torch.zeros_like(p))
                    v.mul_(group["mu"]).add_(p.grad)
                    p.sub_(group["lr"] * v)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


# On a CPU ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "locoprop-m": locoprop,
    "locoprop-s": lambda model: locoprop(model, variant="locoprop-s"),
    "pocoprop-m": lambda model: locoprop(model, variant="pocoprop-m"),
    "natural-s": lambda model: locoprop(model, variant="natural-s"),
    "exact": lambda model: locoprop(model, variant="locoprop-s", solver="exact"),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_cpu_it_is_the_loop_to_the_last_bit(name: str) -> None:
    """With a schedule, and batches of several sizes."""
    runs = []
    for make in (written_out, TrainingStep):
        model = mlp(torch.device("cpu"))
        optimizer = OPTIMIZERS[name](model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        step, found = make(model, F.mse_loss, optimizer), []
        for i in range(8):
            found.append(step(*data(i, 5 if i % 3 == 2 else 12, torch.device("cpu"))))
            schedule.step()
        assert not any(loss.requires_grad for loss in found)
        assert all(p.grad is None for p in model.parameters())
        runs.append(found + [p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


class Weighted(nn.Module):
    """Takes a dictionary, and has a loss of several targets, one of which is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.layers(inputs["x"])


def weighted(out: Tensor, y: Tensor, z: Tensor, times: float = 1.0) -> Tensor:
    return F.mse_loss(out, y) + times * F.mse_loss(out, z)


# With CUDA graphs -------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All recordings, in the order in which they were made."""
    if not GPU:
        emulate(monkeypatch)
    found: list[object] = []
    recording: Any = cuda_graph.Recording

    def counted(*args: Any) -> object:
        found.append(recording(*args))
        return found[-1]

    monkeypatch.setattr(cuda_graph, "Recording", counted)
    return found


Meanwhile = Callable[[int, nn.Module, Any], object]


def run(
    make: Make,
    optimizer_of: Callable[[nn.Module], Optimizer] = locoprop,
    steps: int = 9,
    meanwhile: Meanwhile = lambda step, model, optimizer: None,
    model_of: Callable[[], nn.Module] = mlp,
    rows: Callable[[int], int] = lambda step: 12,
    loss_fn: Callable[..., Tensor] = F.mse_loss,
) -> list[Tensor]:
    """The losses, weights and states of a training; ``meanwhile`` runs before each step."""
    model = model_of()
    optimizer = optimizer_of(model)
    step, losses = make(model, loss_fn, optimizer), []
    for i in range(steps):
        meanwhile(i, model, optimizer)
        losses.append(step(*data(i, rows(i))))
    states = [entry for p in model.parameters() for entry in optimizer.state[p].values()]
    return [*losses, *(t.detach().clone() for t in model.state_dict().values()), *states]


def compare(**options: Any) -> None:
    expected = run(written_out, **options)
    same(run(TrainingStep, **options), expected)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 4)).to(DEVICE, torch.float64)


SETTINGS: dict[str, dict[str, Any]] = {
    "locoprop-m": {},
    "locoprop-s": {"variant": "locoprop-s"},
    "pocoprop-m": {"variant": "pocoprop-m"},
    "pocoprop-s": {"variant": "pocoprop-s"},
    "backprop": {"local_steps": 1},
    "adam": {"solver": "adam", "weight_decay": 0.1},
    "guards": {"gate": True, "cap": 0.1},
    "l2": {"regularizer": "l2"},
    "preconditioned": {"solver": "preconditioned", "lr": 0.5, "local_steps": 2},
    "averaged": {"solver": "preconditioned-averaged"},
    "mean": {"local_reduction": "mean", "lr": 1e-2},
    "general": {"preset": "general"},
    "spectral": {"preset": "spectral"},
}


@pytest.mark.parametrize("model_of", [mlp, convolutional])
@pytest.mark.parametrize("name", SETTINGS)
def test_replays_equal_the_loop(
    name: str, model_of: Callable[[], nn.Module], made: list[object]
) -> None:
    compare(optimizer_of=lambda model: locoprop(model, **SETTINGS[name]), model_of=model_of)
    assert len(made) == 1
    if not GPU:
        assert Emulated.replayed == 9 - cuda_graph.EAGER_STEPS - 1


@pytest.mark.parametrize("name", ["general", "spectral", "averaged"])
def test_each_phase_has_a_recording(name: str, made: list[object]) -> None:
    """Steps that renew XᵀX are one recording, all others another one."""
    compare(steps=45, optimizer_of=lambda model: locoprop(model, **SETTINGS[name]))
    assert len(made) == 2
    if not GPU:  # each phase has its eager steps and the step that is recorded
        assert Emulated.replayed == 45 - 2 * (cuda_graph.EAGER_STEPS + 1)


def torch_optimizer(model: nn.Module) -> Optimizer:
    if not GPU:  # capturable=True is for GPUs
        return Momentum(model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)


def normalized() -> nn.Module:
    """Buffers that the forward pass updates, and random numbers."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)]
    return nn.Sequential(*layers).to(DEVICE, torch.float64)


def test_dropout_draws_the_numbers_of_the_loop(made: list[object]) -> None:
    compare(optimizer_of=torch_optimizer, model_of=normalized)
    assert len(made) == 1


def test_dropout_draws_new_numbers_in_every_replay(made: list[object]) -> None:
    model = normalized()
    step = TrainingStep(model, F.mse_loss, Momentum(model.parameters(), lr=0.0))
    losses = [step(*data(0)).item() for _ in range(9)]
    assert len(made) == 1
    assert len(set(losses)) == len(losses)


def test_losses_of_earlier_steps_stay(made: list[object]) -> None:
    model = mlp()
    step = TrainingStep(model, F.mse_loss, locoprop(model))
    losses, values = [], []
    for i in range(9):
        losses.append(step(*data(i)))
        values.append(losses[-1].item())
    assert [loss.item() for loss in losses] == values
    assert len(set(values)) == len(values)
    assert len(made) == 1


# What changes between steps


@pytest.mark.parametrize("name", [name for name in CHANGED if name != "lr"])
def test_a_changed_setting_is_never_replayed_as_it_was(name: str, made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        if step == 6:
            optimizer.param_groups[0][name] = CHANGED[name]

    own = {"variant": "locoprop-s"} if name == "gram" else {}  # the only variant that it serves
    compare(steps=14, meanwhile=meddle, optimizer_of=lambda model: locoprop(model, **own))
    recordable = name not in ("every", "max_rows")
    assert len(made) == 1 + recordable


def exchange_weight(model: Any, optimizer: Any) -> None:
    model[2].weight.data = model[2].weight.data.clone()


def exchange_strides(model: Any, optimizer: Any) -> None:
    weight = model[2].weight  # other numbers, at the same address
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def exchange_state(model: Any, optimizer: Any) -> None:
    state = optimizer.state[model[2].weight]
    state.update({name: entry.clone() for name, entry in state.items()})


def load_state(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def freeze(model: Any, optimizer: Any) -> None:
    model[2].requires_grad_(False)


def another_rate(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(2e-3, dtype=torch.float64, device=DEVICE)


def more_exact_products(model: Any, optimizer: Any) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "weight": exchange_weight,
    "strides": exchange_strides,
    "state": exchange_state,
    "loaded state": load_state,
    "frozen": freeze,
    "a rate that is a tensor": another_rate,
    "precision": more_exact_products,
}


@pytest.fixture
def _precision_stays() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("_precision_stays")
def test_every_other_change_is_seen_too(name: str, made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        if step == 0:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        if step == 6:
            CHANGES[name](model, optimizer)

    compare(steps=14, meanwhile=meddle)
    assert len(made) == 2


def test_a_layer_that_is_thawed_trains_again(made: list[object]) -> None:
    def meddle(step: int, model: Any, optimizer: LocoProp) -> None:
        model[2].requires_grad_(step not in range(6, 12))

    compare(steps=18, meanwhile=meddle)
    assert len(made) == 3


@pytest.mark.parametrize("part", ["", "3"], ids=["the model", "one module"])
def test_modes_of_modules_are_seen(part: str, made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step in (6, 12):
            model.get_submodule(part).train(step == 12)

    compare(steps=18, meanwhile=meddle, optimizer_of=torch_optimizer, model_of=normalized)
    assert len(made) == 3


def test_a_buffer_that_is_exchanged_is_seen(made: list[object]) -> None:
    def meddle(step: int, model: Any, optimizer: Optimizer) -> None:
        if step == 6:
            model[1].running_mean = torch.ones(8, dtype=torch.float64, device=DEVICE)

    compare(steps=12, meanwhile=meddle, optimizer_of=torch_optimizer, model_of=normalized)
    assert len(made) == 2


@pytest.mark.parametrize("device", ["cpu", "device"])
def test_settings_that_are_tensors(device: str, made: list[object]) -> None:
    """On the device a replay reads them. On the host a new value is a new recording."""
    where = DEVICE if device == "device" else torch.device("cpu")

    def optimizer_of(model: nn.Module) -> Optimizer:
        return Momentum(model.parameters(), mu=torch.tensor(0.9, device=where))  # type: ignore[arg-type]

    def meddle(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 6:
            optimizer.param_groups[0]["mu"].fill_(0.5)

    if GPU and device == "cpu":
        pytest.skip("a graph does not read tensors of the host")
    compare(steps=12, meanwhile=meddle, optimizer_of=optimizer_of)
    assert len(made) == (1 if GPU else 2)


def test_a_setting_that_changes_in_every_step_is_not_recorded(made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["mu"] = 0.9 - 0.01 * step

    compare(meanwhile=meddle, optimizer_of=lambda model: Momentum(model.parameters()))
    assert made == []


# Learning rates and counters


def test_schedules_act_on_replays(made: list[object]) -> None:
    schedules: list[Any] = []

    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        if step == 0:
            schedules[:] = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]
        else:
            schedules[0].step()

    compare(meanwhile=meddle)
    assert len(made) == 1


def test_a_schedule_that_begins_among_replays_warns_of_nothing(made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        if step == 6:
            meddle.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)  # type: ignore[attr-defined]
        if step > 6:
            meddle.schedule.step()  # type: ignore[attr-defined]

    compare(meanwhile=meddle)
    assert len(made) == 1


def test_rates_of_groups_that_part_and_meet(made: list[object]) -> None:
    """Groups at one rate read it from one place."""

    def optimizer_of(model: nn.Module) -> LocoProp:
        *most, last = model.parameters()
        return locoprop(model, param_groups=[{"params": most}, {"params": [last]}])

    def meddle(step: int, model: nn.Module, optimizer: LocoProp) -> None:
        optimizer.param_groups[1]["lr"] = 1e-3 if step < 6 or step > 12 else 5e-3

    compare(steps=18, meanwhile=meddle, optimizer_of=optimizer_of)
    assert len(made) == 3


def test_the_learning_rate_is_the_users_again_after_a_step(made: list[object]) -> None:
    model = mlp()
    optimizer = locoprop(model)
    step = TrainingStep(model, F.mse_loss, optimizer)
    for i in range(6):
        step(*data(i))
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert len(made) == 1


def test_steps_are_counted_in_replays(made: list[object]) -> None:
    model = mlp()
    optimizer = locoprop(model)
    step = TrainingStep(model, F.mse_loss, optimizer)
    for i in range(9):
        step(*data(i))
        assert optimizer.param_groups[0]["steps"] == i + 1
    assert len(made) == 1


def test_updates_that_a_replay_skips_are_counted_and_warned_of(made: list[object]) -> None:
    model = mlp()
    optimizer = locoprop(model)
    step = TrainingStep(model, F.mse_loss, optimizer)
    for i in range(6):
        step(*data(i))
    before = [p.detach().clone() for p in model.parameters()]
    x, y = data(6)
    if GPU:  # where the counters are read in every hundredth step
        optimizer.param_groups[0]["steps"] = 99
    with pytest.warns(UserWarning, match="was not finite and was not written"):
        step(x * torch.nan, y)
    assert len(made) == 1
    assert optimizer.skipped_updates == {"0": 1, "2": 1, "4": 1}
    assert all(map(torch.equal, model.parameters(), before))


def test_a_step_at_which_the_counters_are_read_can_be_recorded(made: list[object]) -> None:
    model = mlp()
    optimizer = locoprop(model)
    optimizer.param_groups[0]["steps"] = 100 - cuda_graph.EAGER_STEPS - 1
    step = TrainingStep(model, F.mse_loss, optimizer)
    for i in range(6):
        step(*data(i))
    assert len(made) == 1


# Batches


def test_now_and_then_a_smaller_batch(made: list[object]) -> None:
    compare(steps=15, rows=lambda step: 5 if step % 4 == 3 else 12)
    assert len(made) == 1


def test_batches_of_another_size_from_now_on(made: list[object]) -> None:
    compare(steps=20, rows=lambda step: 12 if step < 6 else 9)
    assert len(made) == 2


def test_one_tensor_given_twice(made: list[object]) -> None:
    """As for an autoencoder; and then two tensors, which must not share a place."""

    def loss_fn(out: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(out, x[:, :4])

    runs = []
    for make in (written_out, TrainingStep):
        model = mlp()
        step, losses = make(model, loss_fn, locoprop(model)), []
        for i in range(12):
            x, other = data(i)[0], data(100 + i)[0]
            losses.append(step(x, x if i < 6 or i > 8 else other))
        runs.append([*losses, *(p.detach() for p in model.parameters())])
    same(runs[1], runs[0])
    assert len(made) == 1


def test_two_tensors_at_first_and_then_one(made: list[object]) -> None:
    def loss_fn(out: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(out, x[:, :4])

    runs = []
    for make in (written_out, TrainingStep):
        model = mlp()
        step, losses = make(model, loss_fn, locoprop(model)), []
        for i in range(12):
            x, other = data(i)[0], data(100 + i)[0]
            losses.append(step(x, other if i < 6 else x))
        runs.append([*losses, *(p.detach() for p in model.parameters())])
    same(runs[1], runs[0])


@pytest.mark.parametrize("entries", ["tensors", "dictionary", "number"])
def test_entries_of_batches(entries: str, made: list[object]) -> None:
    """Several targets are recorded, and what is not a tensor is taken as it is."""
    runs = []
    for make in (written_out, TrainingStep):
        model = Weighted() if entries == "dictionary" else mlp()
        step, losses = make(model, weighted, locoprop(model)), []
        for i in range(8):
            (x, y), (_, z) = data(i), data(100 + i)
            inputs = {"x": x} if entries == "dictionary" else x
            more = (0.1 * i,) if entries == "number" else ()
            losses.append(step(inputs, y, z, *more))
        runs.append([*losses, *(p.detach() for p in model.parameters())])
    same(runs[1], runs[0])
    assert len(made) == (entries == "tensors")


def test_inputs_that_require_gradients_get_them(made: list[object]) -> None:
    model = mlp()
    step = TrainingStep(model, F.mse_loss, locoprop(model))
    for i in range(6):
        step(*data(i))
    x, y = data(6)
    step(x.requires_grad_(), y)
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert len(made) == 1


@pytest.mark.skipif(not GPU, reason="on a CPU all tensors are on its device")
def test_batches_on_the_host_are_the_users_mistake_in_every_step(made: list[object]) -> None:
    model = mlp()
    step = TrainingStep(model, F.mse_loss, locoprop(model))
    for i in range(6):
        step(*data(i))
    with pytest.raises(RuntimeError, match="same device"):
        step(*(t.cpu() for t in data(6)))


def test_a_model_that_is_moved_after_the_step_was_made(made: list[object]) -> None:
    model = mlp(torch.device("cpu"))
    optimizer = Momentum(model.parameters())
    step = TrainingStep(model, F.mse_loss, optimizer)
    model.to(DEVICE)
    for i in range(6):
        step(*data(i))
    assert len(made) == 1


# Gradients and parameters of others


def test_gradients_that_are_there_already_are_added_to(made: list[object]) -> None:
    def meddle(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step in (3, 6):  # when the step would be recorded, and when it would be replayed
            x, y = data(1000 + step)
            F.mse_loss(model(x), y).backward()

    compare(meanwhile=meddle, optimizer_of=lambda model: Momentum(model.parameters()))
    assert len(made) == 1


def test_parameters_of_another_optimizer_get_their_gradients(made: list[object]) -> None:
    runs = []
    for make in (written_out, TrainingStep):
        model = mlp()
        optimizer, other = Momentum(model[4].parameters()), Momentum(model[:4].parameters())
        step = make(model, F.mse_loss, optimizer)
        for i in range(8):
            step(*data(i))
            other.step()
            other.zero_grad()
        runs.append([p.detach() for p in model.parameters()])
    same(runs[1], runs[0])
    assert made == []


def test_a_loss_with_parameters_of_its_own(made: list[object]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64, device=DEVICE))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.scale * out, y)

    scales = []
    for shared in (True, False):
        model, loss_fn = mlp(), Scaled()
        more = [loss_fn.scale] if shared else []
        step = TrainingStep(model, loss_fn, Momentum([*model.parameters(), *more]))
        for i in range(8):
            step(*data(i))
        scales.append(loss_fn.scale)
    assert len(made) == 1  # not the step whose optimizer lacks a parameter
    assert scales[0] != 1
    assert scales[1].grad is not None


def test_a_graph_made_before_a_replay_is_out_of_date(made: list[object]) -> None:
    """As after a step that is not replayed: autograd refuses the old pass."""
    model = mlp()
    step = TrainingStep(model, F.mse_loss, Momentum(model.parameters()))
    for i in range(6):
        step(*data(i))
    x, y = data(6)
    loss = F.mse_loss(model(x), y)
    step(x, y)
    assert len(made) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_processes_are_not_recorded(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "are_several", lambda: True)
    compare(optimizer_of=lambda model: Momentum(model.parameters()))
    assert made == []


class OneOfAUser(Sgd):
    """Counts on the host."""

    name = "mine"
    calls = 0

    def step(self, gradient: Tensor, state: Any, numbers: Any) -> Any:
        OneOfAUser.calls += 1
        return numbers.lr * gradient * (1 + OneOfAUser.calls % 3), state


def test_components_of_a_user_are_not_recorded(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneOfAUser, "calls", 0)
    expected = run(written_out, lambda model: locoprop(model, solver=OneOfAUser()))
    monkeypatch.setattr(OneOfAUser, "calls", 0)
    same(run(TrainingStep, lambda model: locoprop(model, solver=OneOfAUser())), expected)
    assert made == []


# Failures


class Looking(nn.Module):
    """Looks at a number on the host, which no stream permits while it records."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers, self.dropout = mlp(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.dropout(x))
        return out if out.sum().item() > 0 else 2 * out


@pytest.mark.parametrize(
    "dropout",
    [
        0.0,
        pytest.param(
            0.5,
            marks=pytest.mark.skipif(
                GPU, reason="a failed recording leaves torch's generator of random numbers unusable"
            ),
        ),
    ],
)
def test_a_step_that_cannot_be_recorded_runs_eagerly_and_says_so(
    dropout: float, made: list[object]
) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return Looking(dropout)

    expected = run(written_out, model_of=model_of)
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph") as warned:
        found = run(TrainingStep, model_of=model_of)
    assert len(warned) == 1
    same(found, expected)
    assert made == []


class Peeking(Momentum):
    """Looks at a number when the gradients are there."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradient = self.param_groups[0]["params"][0].grad
        if gradient.sum().isfinite().item():
            super().step()


def test_what_a_failed_recording_leaves_is_not_added_to(made: list[object]) -> None:
    def optimizer_of(model: nn.Module) -> Optimizer:
        return Peeking(model.parameters())

    expected = run(written_out, optimizer_of)
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph"):
        found = run(TrainingStep, optimizer_of)
    same(found, expected)
    assert made == []


class Failing(nn.Module):
    """Raises in one call."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.layers, self.when, self.calls = mlp(), when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(x)
        if self.calls == self.when:
            raise ValueError("no more")
        return out


@pytest.mark.parametrize("when", [2, 4], ids=["eagerly", "while recording"])
def test_after_an_error_in_the_model_training_goes_on(when: int, made: list[object]) -> None:
    runs = []
    for make in (written_out, TrainingStep):
        model = Failing(when)
        optimizer = locoprop(model)
        step = make(model, F.mse_loss, optimizer)
        for i in range(10):
            if i == when - 1:
                with pytest.raises(ValueError, match="no more"):
                    step(*data(i))
            else:
                step(*data(i))
        runs.append([p.detach() for p in model.parameters()])
    same(runs[1], runs[0])
    assert len(made) == 1


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_adamw_is_recorded(fused: bool, made: list[object]) -> None:
    def optimizer_of(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, fused=fused)

    compare(optimizer_of=optimizer_of, meanwhile=_decaying)
    assert len(made) == (0 if fused else 1)  # in float64: fused kernels take rates in float32


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_around_the_step_are_called_in_every_step(when: str) -> None:
    called: list[int] = []

    def optimizer_of(model: nn.Module) -> Optimizer:
        optimizer = LocoProp(model, lr=1e-3, output_transfer="linear")
        register = {
            "before": optimizer.register_step_pre_hook,
            "after": optimizer.register_step_post_hook,
        }[when]
        register(lambda *_: called.append(1))
        return optimizer

    counts = []
    for make in (written_out, TrainingStep):
        called.clear()
        run(make, optimizer_of=optimizer_of)
        counts.append(len(called))
    assert counts[0] == counts[1]
    assert counts[0] > cuda_graph.EAGER_STEPS + 1  # steps that would have been replays


def _decaying(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s", "pocoprop-m"])
def test_on_a_gpu_a_large_model_in_float32(variant: str, made: list[object]) -> None:
    """Large enough for our kernels, and for layers that are solved side by side."""

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        widths = (6, 512, 256, 512, 4)
        layers: list[nn.Module] = []
        for n, d in pairwise(widths):
            layers += [nn.Linear(n, d), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).to(DEVICE)

    losses = []
    for make in (written_out, TrainingStep):
        model = model_of()
        step = make(model, F.mse_loss, locoprop(model, variant=variant, lr=1e-5))
        batches = (tuple(t.float() for t in data(i, 256)) for i in range(30))
        losses.append(torch.stack([step(*each) for each in batches]))
    assert len(made) == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0.0)
