"""How the solution of a layer's problem is applied: which entries, where to, and which layers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import batch, cross_entropy, network
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import dispatch
from torch_locoprop.fast.dispatch import graphs, streams
from torch_locoprop.paper.transfers import TRANSFERS, Linear
from torch_locoprop.recording.transfer_assignment import NOT_CALLED, NOT_REACHED
from torch_locoprop.stepping import local_steps
from torch_locoprop.stepping.local_steps import (
    LocalSteps,
    _new_entries,
    _state_like,
    _state_pairs,
    may_have_kernels,
)

M: dict[str, Any] = {"variant": "locoprop-m", "lr": 1e-2, "gamma": 2.0, "local_steps": 4}
YES, NO = torch.tensor(True), torch.tensor(False)


def made(model: nn.Module, **settings: Any) -> LocoProp:
    return LocoProp(model, **{**M, "output_transfer": "sigmoid", **settings})


def test_new_entries_of_a_state_are_written_in_place() -> None:
    old = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}
    new = {"a": torch.ones(2), "b": old["b"], "c": torch.ones(1)}
    pairs = _state_pairs(old, new, YES, None)
    assert [(id(value), id(place)) for value, place in pairs] == [
        (id(new["a"]), id(old["a"])),
        (id(new["c"]), id(old["c"])),
    ]
    found = _new_entries({"weight": new, "bias": {}}, {"weight": old, "bias": {}})
    assert [id(entry) for entry in found] == [id(new["a"]), id(new["c"])]
    assert [id(t) for t in _new_entries({"weight": new}, {"weight": {}})] == [
        id(entry) for entry in new.values()
    ]


@pytest.mark.parametrize(
    "entry",
    [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta")],
    ids=["shape", "dtype", "device"],
)
@pytest.mark.parametrize("there", [False, True])
def test_other_entries_take_the_place_of_old_ones_if_they_may_be_used(
    entry: Tensor, there: bool
) -> None:
    """A condition without a value, as in programs that estimate memory, counts as fulfilled."""
    unknown = torch.ones((), dtype=torch.bool, device="meta")
    for ok, used in ((YES, True), (NO, False), (unknown, True)):
        state = {"same": torch.zeros(1)} | ({"a": torch.zeros(2)} if there else {})
        before = dict(state)
        new = {"same": torch.ones(1), "a": entry}
        assert _state_pairs(state, new, ok, None) == []
        expected = new if used else before
        assert state.keys() == expected.keys()
        assert all(state[key] is expected[key] for key in expected)


def test_new_entries_keep_no_other_tensor_in_memory() -> None:
    columns, stack = torch.arange(6.0).view(2, 3).mT, torch.ones(4, 2)
    state: dict[str, Tensor] = {}
    assert _state_pairs(state, {"columns": columns, "of a stack": stack[1]}, YES, None) == []
    for entry in state.values():
        assert entry.is_contiguous()
        assert entry.untyped_storage().nbytes() == entry.nbytes
    assert torch.equal(state["columns"], columns)


def test_a_state_follows_its_parameter() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    found = _state_like(p, {"square": torch.ones(2), "step": torch.ones(())})
    assert (found["square"].dtype, found["step"].dtype) == (torch.bfloat16, torch.float32)


def test_kernels_of_ours_solve_problems_with_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for can in (True, False):

        def answer(linear_map: Any, *parts: Any, can: bool = can) -> bool:
            asked.append(parts)
            return can

        monkeypatch.setattr(dispatch, "may_have_kernels", answer)
        for rows, transfer in ((None, "tanh"), (None, None), (3, "tanh")):
            opt = made(network(), max_rows=rows)
            layer = opt._layers[0]
            layer.transfer = None if transfer is None else TRANSFERS[transfer]
            assert may_have_kernels(opt._plan, layer) is (can and rows is None)
            if rows is None:
                used = asked[-1][3]
                assert used == TRANSFERS[transfer] if transfer else isinstance(used, Linear)


@pytest.mark.parametrize("entry", [0, 2])
@pytest.mark.parametrize("called", [False, True])
def test_a_layer_without_rows_takes_a_backprop_step_and_says_why(called: bool, entry: int) -> None:
    """One entry of its gradient is enough; in the next step, with rows, the note is gone."""
    model = network()
    model.add_module("unused", nn.Linear(3, 3).double())
    unused: Any = model.unused
    opt = made(model, solver="sgd", lr=0.1, layers=["0", "unused"], fallback=_sgd)
    if called:
        with torch.no_grad():
            unused(batch(2, 3))
    before = unused.bias.detach().clone()
    (model[:5](batch(8, 6)).square().mean() + 5 * unused.bias[entry]).backward()
    with pytest.warns(UserWarning, match="'unused'"):
        opt.step()
    expected = torch.zeros(3, dtype=torch.float64)
    expected[entry] = -0.1 * 2.0 * 5
    torch.testing.assert_close(unused.bias.detach() - before, expected)
    layer = opt._layers[-1]
    assert layer.note == (NOT_REACHED if called else NOT_CALLED)
    opt.zero_grad()
    cross_entropy(model(batch(8, 6)), batch(8, 3)).backward()
    opt.step()
    assert layer.note != NOT_REACHED
    assert layer.note != NOT_CALLED


def test_a_layer_whose_gradient_is_zero_everywhere_stays_as_it_is() -> None:
    model = network()
    model.add_module("unused", nn.Linear(3, 3).double())
    unused: Any = model.unused
    outer: list[Any] = []

    def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        outer.append(torch.optim.SGD(params, lr=0.1))
        return outer[0]

    for given in ({}, {"apply": "gradient", "outer": factory}):
        opt = made(model, layers=["0", "unused"], fallback=_sgd, **given)
        seen: list[bool] = []
        if given:
            outer[0].register_step_pre_hook(
                lambda *args: seen.append(unused.bias.grad is not None)  # noqa: B023
            )
        before = unused.bias.detach().clone()
        (model[:5](batch(8, 6)).square().mean() + 0 * unused.bias.sum()).backward()
        opt.step()
        assert torch.equal(unused.bias, before)
        assert seen == ([True] if given else [])
        opt.zero_grad()


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("given", [False, True])
def test_the_first_step_is_measured_if_it_is_the_solution_that_is_written(given: bool) -> None:
    outer = {"apply": "gradient", "outer": _sgd} if given else {}
    model = network()
    opt = made(model, **outer)
    cross_entropy(model(batch(8, 6)), batch(8, 3)).backward()
    opt.step()
    assert [layer.first_step is None for layer in opt._layers] == [given] * 3


@pytest.mark.filterwarnings("ignore:In the first step")
@pytest.mark.parametrize("gate", [False, True])
def test_states_are_those_after_the_step_with_a_gate_and_without(gate: bool) -> None:
    """RMSProp's mean of squares begins at one and decays in each of four iterations."""
    model = network()
    opt = made(model, gate=gate, lr=1e-6, gamma=1e-6)
    for step in range(2):
        cross_entropy(model(batch(8, 6)), batch(8, 3)).backward()
        opt.step()
        opt.zero_grad()
        expected = 0.9 ** (4 * step + 4)
        for p in model.parameters():
            square = opt.state[p]["square"]
            torch.testing.assert_close(square, torch.full_like(p, expected), rtol=1e-6, atol=1e-9)
    assert opt.skipped_updates == {"0": 0, "2": 0, "4": 0}


# ---- the way that all layers are solved -------------------------------------------------------------


def layers_on(*types: str) -> dict[Any, Any]:
    """Return layers without a bias, each on a device of a type."""
    made = [
        SimpleNamespace(
            given=[SimpleNamespace(device=torch.device(t))],
            shared_facts=None,
            ready=t,
            like=torch.empty(2, 3, device="meta"),
        )
        for t in types
    ]
    return {Layer(layer): {} for layer in made}


class Layer:
    """A layer of which only its device is known."""

    def __init__(self, known: SimpleNamespace) -> None:
        self.__dict__ = known.__dict__


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> LocalSteps:
    """A step on a machine whose GPUs are of the type "meta"."""
    model = network()
    opt = made(model)
    cross_entropy(model(batch(8, 6)), batch(8, 3)).backward()
    monkeypatch.setattr(graphs, "DEVICE_TYPES", ("meta",))
    monkeypatch.setattr(streams, "on_device", lambda device: nullcontext())
    return opt._pose_problems(opt._layers_with_gradient())


@pytest.mark.parametrize(
    ("types", "on_streams"),
    [
        (("cpu", "cpu"), False),
        (("meta", "meta"), True),
        (("cpu", "meta"), True),
        (("meta", "cpu"), True),
    ],
)
@pytest.mark.parametrize("kernels", [(True, True), (True, False), (False, True)])
def test_layers_on_a_gpu_are_solved_on_streams(
    types: tuple[str, ...],
    on_streams: bool,
    kernels: tuple[bool, ...],
    steps: LocalSteps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On many of them only if all layers have kernels of ours: cuBLAS takes memory for each."""
    layers = layers_on(*types)
    of_layer = dict(zip(layers, kernels, strict=True))
    solved: list[object] = []
    found: list[object] = []

    def side_streams(most: int) -> Any:
        found.append(most)
        return nullcontext(lambda ready: nullcontext())

    monkeypatch.setattr(streams, "side_streams", side_streams)
    monkeypatch.setattr(LocalSteps, "_may_be_stacked", lambda _, layer: False)
    monkeypatch.setattr(
        LocalSteps, "_solve_timed", lambda _, layer, own: solved.append(layer) or {}
    )
    monkeypatch.setattr(local_steps, "may_have_kernels", lambda plan, layer: of_layer[layer])
    assert steps.solve_all(layers) == {}
    most = streams.MANY_STREAMS if all(kernels) else streams.FEW_STREAMS
    assert found == ([most] if on_streams else [])
    assert solved == [*reversed(layers)]


def test_layers_of_one_shape_on_one_device_may_be_stacked(
    steps: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSteps, "_may_be_stacked", lambda _, layer: True)
    layers = layers_on("cuda:0", "cuda:1", "cuda:0", "cuda:0")
    first, second, third, other = layers
    other.like = torch.empty(3, 2)
    assert steps._alike(layers) == [[other], [third, first], [second]]


@pytest.mark.parametrize(
    ("types", "can_record", "recorded"),
    [
        (("meta", "meta"), True, True),
        (("meta", "meta"), False, False),
        (("cuda:0", "cuda:1"), True, False),
        (("cpu", "cpu"), True, False),
    ],
)
def test_steps_on_one_gpu_are_recorded(
    types: tuple[str, ...],
    can_record: bool,
    recorded: bool,
    steps: LocalSteps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "DEVICE_TYPES", ("meta", "cuda"))
    monkeypatch.setattr(graphs, "can_record", lambda device: can_record)
    monkeypatch.setattr(LocalSteps, "solve_all", lambda *given: {})
    monkeypatch.setattr(local_steps, "work_of", lambda *given: None)
    step_graphs, taken = graphs.StepGraphs(), []
    monkeypatch.setattr(step_graphs, "take", lambda *given: taken.append(given) or {})
    assert steps.solve_or_replay(layers_on(*types), step_graphs, []) == {}
    assert bool(taken) is recorded


@pytest.mark.parametrize(
    ("apply", "is_recorded", "noted"),
    [("replace", True, 1), ("replace", False, 0), ("gradient", True, 0), ("nothing", True, 0)],
)
def test_autograd_is_told_of_weights_that_a_replay_writes(
    apply: str, is_recorded: bool, noted: int, steps: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a backward pass through the weights of before would be wrong without an error."""
    weight = nn.Parameter(torch.zeros(2))
    work = SimpleNamespace(moving=[weight]) if is_recorded else None
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    monkeypatch.setattr(local_steps, "work_of", lambda *given: work)
    steps.apply = apply
    step_graphs, before = graphs.StepGraphs(), weight._version
    monkeypatch.setattr(step_graphs, "take", lambda *given: {})
    assert steps.solve_or_replay(layers_on("meta"), step_graphs, []) == {}
    assert weight._version == before + noted


def test_layers_without_a_bias_are_timed() -> None:
    model = network(bias=False)
    opt = made(model, diagnose=True)
    cross_entropy(model(batch(8, 6)), batch(8, 3)).backward()
    opt.step()
    assert all(row.milliseconds > 0 for row in opt.diagnostics())


def test_a_gradient_without_values_counts_as_one() -> None:
    """Of a layer that was not called, in a program that estimates memory."""
    model = network()
    model.add_module("unused", nn.Linear(3, 3))
    unused: Any = model.to("meta").unused
    opt = made(model, solver="sgd", lr=0.1, layers=["0", "unused"], fallback=_sgd)
    loss = model[:5](torch.zeros(8, 6, device="meta", dtype=torch.float64)).square().mean()
    (loss + unused.bias.sum()).backward()
    with pytest.warns(UserWarning, match="'unused'"):
        opt.step()
