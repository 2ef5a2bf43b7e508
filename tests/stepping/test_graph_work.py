"""The key of a CUDA graph contains every setting, so that no change replays stale work."""

import warnings
from typing import Any

import pytest
import torch
from cases import batch, network
from changed_settings import CHANGED
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.config.settings import SETTINGS
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.regularizers import L1
from torch_locoprop.paper.transfers import Tanh
from torch_locoprop.solvers import Exact
from torch_locoprop.stepping.graph_work import work_of


def key_of(opt: LocoProp) -> list[object]:
    trained = {layer: layer.with_gradient for layer in opt._layers}
    groups, components = opt.param_groups, opt._components
    work = work_of(trained, opt._plan, groups, components, opt.state, 1.0)
    assert work is not None
    return work.key


def before_a_step() -> tuple[LocoProp, graphs.DeviceRates]:
    model = network()
    opt = LocoProp(model, preset="paper-m", output_transfer="sigmoid")
    for step in range(2):  # after the first, there are states
        model(batch(8, 6, seed=step)).sum().backward()
        if step == 0:
            opt.step()
            opt.zero_grad()
    return opt, graphs.DeviceRates()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_another_key_or_is_read_from_the_device(name: str) -> None:
    opt, rates = before_a_step()
    device = torch.device("cpu")
    with rates.of(opt.param_groups, device):
        before, rate = key_of(opt), opt.param_groups[0]["lr"]
        assert key_of(opt) == before
    opt.param_groups[0][name] = CHANGED[name]
    with rates.of(opt.param_groups, device):
        if name == "lr":
            assert key_of(opt) == before
            assert opt.param_groups[0]["lr"] is rate
            assert rate == CHANGED["lr"]
        else:
            assert key_of(opt) != before


def test_groups_whose_rates_part_are_another_key() -> None:
    """Groups with equal rates read them from one tensor, otherwise from two."""
    model = network()
    *most, last = model.parameters()
    opt = LocoProp(
        model,
        preset="paper-m",
        output_transfer="sigmoid",
        param_groups=[{"params": most}, {"params": [last]}],
    )
    model(batch(8, 6)).sum().backward()
    rates, keys = graphs.DeviceRates(), []
    for second in (1e-5, 2e-5, 1e-5):
        opt.param_groups[1]["lr"] = second
        with rates.of(opt.param_groups, torch.device("cpu")):
            keys.append(key_of(opt))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


class OwnRegularizer(L1):
    name = "own"


class OwnTransfer(Tanh):
    name = "own"


def after_steps(
    steps: int, rows: int = 8, calls: int = 1, activation: str = "tanh", **settings: Any
) -> tuple[nn.Sequential, LocoProp]:
    """Return a model after some steps and another backward pass."""
    model = network(activation)
    given = {"preset": "paper-m", "output_transfer": "sigmoid", **settings}
    opt = LocoProp(model, **given)
    for step in range(steps + 1):
        for call in range(calls):
            model(batch(rows, 6, seed=step + 7 * call)).sum().backward()
        if step < steps:
            opt.step()
            opt.zero_grad()
    for group in opt.param_groups:
        group["lr"] = torch.tensor(group["lr"])  # as recordings read it
    return model, opt


def work(opt: LocoProp) -> graphs.Work | None:
    trained = {layer: layer.with_gradient for layer in opt._layers if layer.with_gradient}
    groups, components = opt.param_groups, opt._components
    return work_of(trained, opt._plan, groups, components, opt.state, 1.0)


def described(opt: LocoProp) -> graphs.Work:
    found = work(opt)
    assert found is not None
    return found


FULL_RANK = {"variant": "locoprop-s", "solver": Exact(every=2, damping=0.1)}
OPEN = {"variant": "locoprop-s", "solver": Exact(every=2)}


@pytest.mark.parametrize(
    ("settings", "steps", "fixed"),
    [
        ({}, 0, False),  # the host puts the first states in place
        ({}, 1, True),
        ({"solver": "sgd"}, 0, True),  # which has no state
        ({"regularizer": OwnRegularizer(0.1)}, 1, False),
        ({"transfers": {"0": OwnTransfer(), "2": "tanh", "4": "sigmoid"}}, 1, False),
        ({"transfers": {"0": "tanh", "2": "tanh", "4": "sigmoid"}}, 1, True),
        (FULL_RANK, 0, False),
        (FULL_RANK, 1, True),
        (FULL_RANK, 2, True),
        (OPEN, 1, True),  # the factors of the step before
        (OPEN, 2, False),  # a factorization whose success the host looks at
    ],
    ids=range(11),
)
def test_a_step_is_fixed_if_the_host_decides_nothing(
    settings: dict[str, Any], steps: int, fixed: bool
) -> None:
    if "transfers" in settings:
        settings = {**settings, "output_transfer": None}
    _, opt = after_steps(steps, **settings)
    found = described(opt)
    assert found.is_fixed() is fixed


def test_every_tensor_of_a_first_order_solver_needs_its_state() -> None:
    model, opt = after_steps(1)
    opt.state[model[2].bias].clear()
    found = described(opt)
    assert not found.is_fixed()


@pytest.mark.parametrize("settings", [FULL_RANK, {"preset": "spectral"}], ids=["exact", "spectral"])
def test_a_closed_form_has_one_state_for_weight_and_bias(settings: dict[str, Any]) -> None:
    model, opt = after_steps(1, **settings)
    assert not opt.state[model[2].bias]
    found = described(opt)
    assert found.is_fixed()
    opt.state[model[2].weight].clear()
    found = described(opt)
    assert not found.is_fixed()


def test_a_layer_whose_problem_has_a_transfer_of_its_own_is_described_without_one() -> None:
    """A layer without a known transfer is served as a linear one."""
    _, opt = after_steps(1, variant="locoprop-s")
    opt._layers[0].transfer = None
    found = described(opt)
    assert found.is_fixed()


@pytest.mark.parametrize("what", ["calls", "needs", "gradient", "input"])
def test_steps_that_must_not_be_recorded_have_no_description(what: str) -> None:
    _, opt = after_steps(1)
    layer = opt._layers[1]
    assert work(opt) is not None
    if what == "calls":
        layer.calls.clear()
    elif what == "needs":
        layer.needs = frozenset({"g"})
    elif what == "gradient":  # sparse, but a plain tensor otherwise
        assert layer.tensors["weight"].grad is not None
        layer.tensors["weight"].grad = layer.tensors["weight"].grad.to_sparse()
    else:
        layer.calls[0] = layer.calls[0]._replace(x=layer.calls[0].x.as_subclass(Own))
    assert work(opt) is None


class Own(Tensor):
    """A tensor that may do more than compute."""


def test_the_norm_of_gradients_is_no_reason_not_to_record() -> None:
    _, opt = after_steps(0)
    assert all(layer.needs == {"g_norm"} for layer in opt._layers)
    assert work(opt) is not None


def test_a_description_holds_what_a_step_reads_and_writes() -> None:
    _, opt = after_steps(1, calls=2)
    found = described(opt)
    moving = [p for layer in opt._layers for p in layer.tensors.values()]
    assert [id(p) for p in found.moving] == [id(p) for p in moving]
    inputs = [call.x for layer in opt._layers for call in layer.calls]
    assert len(inputs) == 6
    reads = [*inputs, *(p.grad for p in moving)]
    assert [id(t) for t in found.inputs] == [id(t) for t in reads]
    states = [entry for p in moving for entry in opt.state[p].values()]
    counts = [count for layer in opt._layers for count in layer.counts.values()]
    assert {id(t) for t in found.held} == {id(t) for t in [*moving, *states, *counts]}


@pytest.mark.parametrize("kind", ["rows", "gram", "no rows", "outputs"])
def test_a_recording_reads_other_inputs_and_gradients(kind: str) -> None:
    """They are in place inside the context, also if it ends by an error, and there alone."""
    settings: dict[str, Any] = {"variant": "locoprop-s"} if kind == "gram" else {}
    if kind == "no rows":
        settings = {"variant": "locoprop-s", "local_steps": 1, "solver": "sgd"}
    _, opt = after_steps(1, rows=200 if kind == "gram" else 8, **settings)
    layers = opt._layers
    if kind == "outputs":  # as overlapped backward passes on a GPU keep them
        for layer in layers:
            a = torch.randn(8, layer.width, dtype=torch.float64)
            layer.calls[:] = [call._replace(a=a, a_version=a._version) for call in layer.calls]
    found = described(opt)
    calls = {layer.name: list(layer.calls) for layer in layers}
    of_call = {"rows": 1, "gram": 2, "no rows": 0, "outputs": 2}[kind]
    assert len(found.inputs) == 3 * of_call + 6
    others = [torch.full_like(t, i + 1.0) for i, t in enumerate(found.inputs)]
    gradients = [p.grad for p in found.moving]
    seen: list[Tensor] = []

    def look() -> None:
        for call in (call for layer in layers for call in layer.calls):
            if call.gram is None:
                seen.extend([call.x] if call.output is None else [call.x, call.output])
            elif call.gram.is_known:
                seen.extend(call.gram.tensors)
        seen.extend(p.grad for p in found.moving if p.grad is not None)
        raise KeyError

    with pytest.raises(KeyError), found.reading(others):
        look()
    assert [id(t) for t in seen] == [id(t) for t in others]
    for layer in layers:
        assert all(a is b for a, b in zip(layer.calls, calls[layer.name], strict=True))
    assert all(p.grad is g for p, g in zip(found.moving, gradients, strict=True))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_steps_between_problems_are_another_kind(every: int) -> None:
    """Solvers with ``every`` problems have the same key in every step with a problem."""
    keys = []
    _, opt = after_steps(1, every=every)
    for step in range(7):
        opt.param_groups[0]["steps"] = step
        keys.append(described(opt).key)
    same = [key == keys[0] for key in keys]
    assert same == [step % every == 0 for step in range(7)]


def test_a_number_on_the_device_is_known_by_its_place_and_one_on_the_host_by_its_value() -> None:
    _, opt = after_steps(1)
    group = opt.param_groups[0]
    group["gamma"] = torch.tensor(3.0)
    first = described(opt).key
    group["gamma"] = torch.tensor(3.0)  # elsewhere
    second = described(opt).key
    group["gamma"] = 3.0
    third = described(opt).key
    group["gamma"] = torch.tensor(4.0)
    fourth = described(opt).key
    assert first == second == third != fourth


class OnDevice(Tensor):
    """A number that a recording reads where it is."""

    is_cpu = False


def test_a_number_elsewhere_on_the_device_is_another_key() -> None:
    _, opt = after_steps(1)
    group = opt.param_groups[0]
    keys = []
    first, second = (torch.tensor(3.0).as_subclass(OnDevice) for _ in range(2))
    for number in (first, second, first):
        group["gamma"] = number
        keys.append(described(opt).key)
    assert keys[0] == keys[2] != keys[1]


def test_more_entries_of_a_state_are_another_key() -> None:
    model, opt = after_steps(1)
    before = described(opt).key
    state = opt.state[model[0].weight]
    entries = list(state.items())
    state.clear()
    state.update(("renamed" if i == 0 else name, entry) for i, (name, entry) in enumerate(entries))
    after = described(opt).key
    assert before != after


@pytest.mark.parametrize("settings", [{}, {"preset": "spectral"}])
def test_a_step_of_which_rows_are_not_known_is_another_key(settings: dict[str, Any]) -> None:
    """It is a BackProp step, which a recording of ordinary steps must not replace, nor the reverse."""
    model, opt = after_steps(1, **settings)
    ordinary = described(opt).key
    merged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(batch(8, 6, seed=1)).sum().backward()
    for p, gradient in zip(model.parameters(), merged, strict=True):
        p.grad = gradient
    assert described(opt).key == ordinary
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt._drop_overwritten({layer: layer.with_gradient for layer in opt._layers})
    assert described(opt).key != ordinary
