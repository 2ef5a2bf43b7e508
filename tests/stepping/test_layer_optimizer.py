"""The parts of the optimizer that are not a step: plans, warnings, counts, groups and copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import threads
import torch
from cases import batch, cross_entropy, network
from sharded_cases import Case, S, make_optimizer, sharded
from sharded_cases import network as sharded_network
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop import LocoProp
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.regularizers import L1
from torch_locoprop.paper.transfers import TRANSFERS, Tanh
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.loss_graph import LossFacts

M: dict[str, Any] = {"variant": "locoprop-m", "lr": 1e-2, "gamma": 2.0, "local_steps": 4}


class Own(L1):
    """A regularizer of the user's, which may make decisions on the host."""

    name = "own"


class OwnTransfer(Tanh):
    name = "own"


def made(model: nn.Module, **settings: Any) -> LocoProp:
    return LocoProp(model, **{**M, "output_transfer": "sigmoid", **settings})


def backward(model: nn.Module, seed: int = 1) -> None:
    cross_entropy(model(batch(8, 6, seed=seed)), batch(8, 3, seed=9)).backward()


def step(model: nn.Module, opt: LocoProp, seed: int = 1) -> None:
    backward(model, seed)
    opt.step()
    opt.zero_grad()


def in_groups(model: nn.Sequential, *settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group for each layer."""
    layers = [module for module in model if isinstance(module, nn.Linear)]
    return [{"params": list(m.parameters()), **s} for m, s in zip(layers, settings, strict=True)]


def not_finite(model: nn.Sequential) -> None:
    """Let the next step skip the first layer."""
    backward(model)
    model[0].weight.grad[0, 0] = torch.inf


# ---- counts and warnings ---------------------------------------------------------------------------


def skipping(**settings: Any) -> tuple[nn.Sequential, LocoProp]:
    """Return a model and its optimizer after a step that skipped the first layer alone."""
    model = network()
    opt = made(model, **{**settings, "param_groups": in_groups(model, {}, {}, {})[:2]})
    not_finite(model)
    with pytest.warns(UserWarning, match="solution of '0' was not finite"):
        opt.step()
    opt.zero_grad()
    return model, opt


def test_counts_stay_where_hooks_are_made_anew() -> None:
    model, opt = skipping(variant="locoprop-s")
    assert opt.skipped_updates == {"0": 1, "2": 0}
    _, other = copy.deepcopy((model, opt))
    assert other.skipped_updates == {"0": 1, "2": 0}
    opt.add_param_group({"params": list(model[4].parameters())})
    assert opt.skipped_updates == {"0": 1, "2": 0, "4": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, opt)  # what was counted before is no news
    fresh = made(network(), variant="locoprop-s", param_groups=None)
    assert fresh.skipped_updates == {"0": 0, "2": 0, "4": 0}


class OnDevice(Tensor):
    """A number that the host can read only by waiting."""

    is_cpu = False


@pytest.mark.parametrize(
    ("steps", "counters", "told"),
    [
        (50, (1, 0, 0), True),
        (51, (0, 0, 0), False),
        (50, (torch.tensor(0), torch.tensor(2), 0), True),
        (50, ("device", "device", "device"), False),
        (50, (0, torch.tensor(0), "device"), False),
        (99, ("device", "device", "device"), False),
        (101, ("device", "device", "device"), False),
        (250, ("device", "device", "device"), False),
        (100, ("device", 0, 0), True),
        (200, (0, "device", 0), True),
    ],
    ids=str,
)
def test_counters_on_a_device_are_read_every_hundred_steps(
    steps: int, counters: tuple[Any, ...], told: bool
) -> None:
    model = network()
    opt = made(model, param_groups=in_groups(model, {}, {}, {}))
    for group in opt.param_groups[1:]:
        group["steps"] = 7
    opt.param_groups[0]["steps"] = steps
    for layer, count in zip(opt._layers, counters, strict=True):
        on_device = torch.tensor(1).as_subclass(OnDevice)
        layer.counts["skipped"] = on_device if isinstance(count, str) else count
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt._warn_of_skipped()
    assert bool(found) is told


@pytest.mark.parametrize(
    ("types", "is_recording", "told"),
    [(("cpu",), True, False), (("cpu",), False, True), ((), True, True)],
)
def test_no_counter_is_read_while_a_cuda_graph_is_recorded(
    types: tuple[str, ...], is_recording: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt = made(network())
    monkeypatch.setattr(graphs, "DEVICE_TYPES", types)
    monkeypatch.setattr(graphs, "is_recording", lambda: is_recording)
    opt._layers[0].counts["skipped"] = 1
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt._warn_of_skipped()
    assert bool(found) is told


@pytest.mark.parametrize(("steps", "looks"), [((1, 7, 7), True), ((7, 1, 1), False)])
def test_modules_that_were_added_are_looked_for_after_the_first_step(
    steps: tuple[int, ...], looks: bool
) -> None:
    """One parameter with a gradient is enough."""
    model = network()
    opt = made(model, param_groups=in_groups(model, {}, {}, {}))
    model.add_module("idle", nn.Linear(3, 2).double())
    model.add_module("added", nn.Linear(3, 2).double())
    model.added.bias.grad = torch.zeros(2, dtype=torch.float64)
    for group, number in zip(opt.param_groups, steps, strict=True):
        group["steps"] = number
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt._warn_of_skipped()
    assert [str(each.message).split(" got")[0] for each in found] == (["'added'"] if looks else [])


def test_a_message_names_a_group_only_if_there_are_several() -> None:
    model = network()
    with pytest.warns(UserWarning, match="^The first step changes the weights"):
        step(model, made(model, variant="locoprop-s", solver="sgd", lr=1e4))
    two = network()
    groups = [{"params": two[0].parameters()}, {"params": two[2:].parameters(), "lr": 1e4}]
    opt = made(two, variant="locoprop-s", solver="sgd", lr=1e-3, param_groups=groups)
    with pytest.warns(UserWarning, match="^Parameter group 1: The first step changes"):
        step(two, opt)


def test_the_advice_of_a_group_is_about_its_own_layers() -> None:
    """The median of one group is within the range; that of all layers is not."""
    model = network()
    rates = ({"lr": 1e-3}, {"lr": 1e4}, {"lr": 1e4})
    settings = {"variant": "locoprop-s", "solver": "sgd", "gamma": 1.0, "local_steps": 1}
    opt = made(model, **settings, param_groups=in_groups(model, *rates))
    with pytest.warns(UserWarning, match="too much") as found:
        step(model, opt)
    named = [str(each.message).split(":")[0] for each in found]
    assert named == ["Parameter group 1", "Parameter group 2"]


# ---- plans ------------------------------------------------------------------------------------------


def test_the_steps_of_the_first_group_are_those_of_the_optimizer() -> None:
    model = network()
    opt = made(model, max_rows=3, param_groups=in_groups(model, {}, {}, {})[:2])
    step(model, opt)
    opt.add_param_group({"params": list(model[4].parameters())})
    assert {layer.row_seed for layer in opt._layers} == {1000}
    assert not any("g_norm" in layer.needs for layer in opt._layers)


def test_labels_are_drawn_once_after_a_step_that_lacked_a_fisher_matrix() -> None:
    opt = made(network(), variant="natural-s")
    opt.param_groups[0]["steps"] = 1
    for missing, drawn in ((False, True), (True, True), (False, True)):
        opt._fisher_missing = missing
        opt._require()
        assert not opt._fisher_missing
        assert (opt._hooks.labels.seed is not None) is drawn
    plain = made(network())
    for missing in (False, True, False):
        plain._fisher_missing = missing
        plain._require()
        assert (plain._hooks.labels.seed is not None) is missing
        assert not plain._fisher_missing


def test_settings_that_change_between_two_passes_are_planned_after_both() -> None:
    """What one layer has recorded for the old plan stays as it is."""
    model = network()
    opt = made(model)
    step(model, opt)
    plan = opt._plan
    model[2:](batch(8, 5)).sum().backward()
    opt.param_groups[0]["gamma"] = 3.0
    opt.param_groups[0]["local_steps"] = 7
    opt._require_anew()
    assert opt._plan is plan
    opt.zero_grad()
    opt._require_anew()
    assert opt._plan is not plan


def test_settings_that_a_step_changes_are_planned_with_the_next_one() -> None:
    """As by a hook of the fallback. The next passes may be of parts of the model, without its hooks."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    opt = made(model, variant="locoprop-s", local_steps=1, fallback=_adam)
    assert opt._fallback is not None
    opt._fallback.register_step_post_hook(
        lambda *given: opt.param_groups[0].update(local_steps=opt.param_groups[0]["steps"] + 1)
    )
    for number in range(1, 4):
        cross_entropy(model[1:](model[:1](batch(8, 6))), batch(8, 3, seed=9)).backward()
        opt.step()
        opt.zero_grad()
        assert [opt._plan.method(layer).local_steps for layer in opt._layers] == [number + 1] * 2


def test_the_search_ends_when_a_layer_that_was_never_called_is_frozen() -> None:
    model = network()
    model.add_module("unused", nn.Linear(3, 3).double())
    opt = made(model)
    for is_trained in (True, True, False):
        model.unused.requires_grad_(is_trained)  # type: ignore[operator]
        step(model[:5], opt)
        assert opt._hooks.search.is_on is is_trained


def test_the_report_on_a_first_step_ends_with_it_after_a_state_from_before_it() -> None:
    model = network()
    opt = made(model, param_groups=in_groups(model, {}, {}, {}))
    start = copy.deepcopy(opt.state_dict())
    step(model, opt)
    for group in start["param_groups"][1:]:
        group["steps"] = 7  # of a group from another run
    opt.load_state_dict(start)
    assert all("g_norm" in layer.needs for layer in opt._layers)
    step(model, opt)
    assert not any("g_norm" in layer.needs for layer in opt._layers)


def test_a_loaded_state_from_before_the_first_step_begins_a_new_report() -> None:
    """A layer that is frozen then is not in it."""
    model = network()
    opt = made(model)
    start = copy.deepcopy(opt.state_dict())
    step(model, opt)
    opt.load_state_dict(start)
    model[0].requires_grad_(False)
    step(model, opt)
    assert [layer.first_step is None for layer in opt._layers] == [True, False, False]


def test_a_change_after_the_backward_pass_that_needs_no_rows() -> None:
    model = network()
    opt = made(model, variant="locoprop-s", solver="sgd", local_steps=1)
    step(model, opt)
    before = model[0].weight.detach().clone()
    backward(model)
    opt.param_groups[0]["maximize"] = True
    opt.step()
    assert model[0].weight.grad is not None
    torch.testing.assert_close(model[0].weight.detach(), before + 0.02 * model[0].weight.grad)


def test_gradients_of_rows_that_a_change_needs_are_kept_from_the_next_pass_on() -> None:
    model, other = network(), network()
    opt = made(model, solver="sgd")
    step(model, opt)
    backward(model)
    opt.param_groups[0]["variant"] = "pocoprop-m"
    with pytest.raises(RuntimeError, match="gradients of its outputs, which were not kept"):
        opt.step()
    opt.zero_grad()
    other.load_state_dict(model.state_dict())
    step(model, opt)
    step(other, made(other, solver="sgd", variant="pocoprop-m"))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"every": 2}, False),
        ({"max_rows": 3}, False),
        ({"diagnose": True}, False),
        ({"solver": "exact"}, False),
        ({"variant": "natural-s"}, False),
        ({"regularizer": Own(0.1)}, False),
        ({"apply": "gradient", "outer": lambda ps: torch.optim.SGD(ps, lr=0.1)}, False),
    ],
    ids=range(8),
)
def test_steps_that_wait_for_nothing_can_be_captured(
    settings: dict[str, Any], expected: bool
) -> None:
    assert made(network(), **settings).capturable is expected
    assert LocoProp(network(), preset="spectral").capturable


@pytest.mark.parametrize("setting", [{"every": 2}, {"max_rows": 3}, {"solver": "exact"}], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_one_group_that_waits_is_enough(setting: dict[str, Any], place: int) -> None:
    model = network()
    settings: list[dict[str, Any]] = [{}, {}, {}]
    settings[place] = setting
    assert not made(model, param_groups=in_groups(model, *settings)).capturable


def test_one_layer_or_parameter_that_waits_is_enough() -> None:
    model = network()
    transfers = {"0": "tanh", "2": OwnTransfer(), "4": "sigmoid"}
    assert not made(model, transfers=transfers, output_transfer=None).capturable
    opt = made(model)
    opt._layers[1].needs = frozenset({"fisher"})
    assert not opt.capturable
    normed = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    assert not made(normed, fallback=lambda ps: torch.optim.SGD(ps, lr=0.1)).capturable


# ---- what the first step finds out -----------------------------------------------------------------


def detected(transfer: str, drop: bool) -> LayerRecord:
    """Return the first layer after its transfer was detected in many recorded rows."""
    model = network(transfer)
    opt = made(model)
    x = batch(400, 6)
    cross_entropy(model(x), batch(400, 3, seed=9)).backward()
    layer = opt._layers[0]
    (call,) = layer.calls
    assert call.gram is None
    a = model[0](x).detach()  # as overlapped backward passes on a GPU keep it
    layer.calls[:] = [call._replace(a=a, a_version=a._version)]
    with torch.no_grad():
        opt._pose_problems(opt._layers_with_gradient())
    assert layer.transfer == TRANSFERS[transfer]
    return layer


def test_rows_are_reduced_once_a_transfer_is_known_to_be_linear() -> None:
    """As in later steps, and as after a resumption, where it is known from the start."""
    linear, bent = detected("linear", True), detected("tanh", False)
    assert linear.has_gram
    assert linear.calls[0].a is None
    assert not bent.has_gram
    assert bent.calls[0].a is not None


def test_outputs_are_dropped_if_the_step_does_not_use_them() -> None:
    model = network("linear")
    opt = made(model)
    x = batch(3, 6)  # too few rows to reduce
    cross_entropy(model(x), batch(3, 3, seed=9)).backward()
    layer = opt._layers[0]
    a = model[0](x).detach()
    layer.calls[:] = [layer.calls[0]._replace(a=a, a_version=a._version)]
    with torch.no_grad():
        opt._pose_problems(opt._layers_with_gradient())
    assert layer.calls[0].a is None


@pytest.mark.parametrize("reductions", [("mean", "sum", "sum"), ("sum", "sum", "mean")])
def test_one_group_that_averages_asks_for_the_terms_of_the_loss(
    reductions: tuple[str, ...],
) -> None:
    model, criterion = network(), nn.BCEWithLogitsLoss(reduction="sum")
    settings = [{"local_reduction": each} for each in reductions]
    opt = made(model, loss_fn=criterion, param_groups=in_groups(model, *settings))
    assert opt._terms.wanted
    for rows in (8, 5):  # of each step alone
        criterion(model(batch(rows, 6)), batch(rows, 3)).backward()
        assert opt._loss_terms() == 3 * rows
        assert not opt._terms._of_pass  # which would grow with every step
        opt.zero_grad()


def test_the_terms_of_the_last_pass_are_those_of_the_step_if_all_layers_had_one_pass() -> None:
    """Otherwise they are counted from the rows of the output: 8 rows of 3."""
    model = network()
    opt = made(model, loss_fn=partial(mse_loss, reduction="sum"), local_reduction="mean")
    mse_loss(model(batch(8, 6)), batch(8, 3), reduction="sum").backward()
    opt._layers[2].is_output = True
    opt._hooks.search.loss_facts = LossFacts(sums=True, by_row=False, terms=7)
    assert opt._loss_terms() == 7
    opt._layers[0].passes.add(-1)
    assert opt._loss_terms() == 8 * 3


def test_a_loss_that_is_not_a_sum_has_one_term() -> None:
    for reduction, settings in (("mean", {"local_reduction": "mean"}), ("sum", {})):
        model, criterion = network(), nn.BCEWithLogitsLoss(reduction=reduction)
        opt = made(model, loss_fn=criterion, **settings)
        assert opt._terms.wanted is bool(settings)
        criterion(model(batch(8, 6)), batch(8, 3)).backward()
        assert opt._loss_terms() == 1.0


# ---- steps without problems -------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [(0, 0), (4, 5)])
def test_one_entry_of_a_gradient_is_a_gradient(entry: tuple[int, int]) -> None:
    model = network()
    opt = made(model, lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[0].weight.grad[entry] = 1.0  # type: ignore[index]
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()


def test_a_step_of_zeros_with_rows_is_a_step() -> None:
    model = network()
    opt = made(model, lr=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    (0 * model(batch(8, 6)).sum()).backward()
    opt.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert opt.param_groups[0]["steps"] == 1
    assert opt.param_groups[0]["state_of"] == opt.param_groups[0]["solver"]


def test_a_gradient_without_values_is_a_gradient() -> None:
    model = network().to("meta")
    opt = made(model, lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()


@pytest.mark.parametrize("frozen", [False, True])
def test_an_outer_optimizer_keeps_the_state_of_the_others_from_steps_of_zeros(
    frozen: bool,
) -> None:
    """The layers are frozen, or have gradients of zero at rates of zero."""
    model, alone = (
        nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double() for _ in range(2)
    )
    alone[1].load_state_dict(model[1].state_dict())
    layers = [p for i in (0, 2) for p in model[i].parameters()]
    outer = torch.optim.Adam([{"params": layers}, {"params": model[1].parameters()}], lr=0.1)
    plain = torch.optim.Adam(alone[1].parameters(), lr=0.1)
    opt = made(model, apply="gradient", outer=outer)
    rates = {True: 1.0, False: 1.0} if frozen else {True: 1.0, False: 0.0}
    for p in layers:
        p.requires_grad_(not frozen)
        p.grad = None if frozen else torch.zeros_like(p)
    for scale in (0.0, 1.0, 1.0) if frozen else (1.0, 1.0, 1.0):
        for group in opt.param_groups:
            group["lr"] = scale * rates[group["fallback"]] * group["local_lr"]
        plain.param_groups[0]["lr"] = 0.1 * scale
        for p, q in zip(model[1].parameters(), alone[1].parameters(), strict=True):
            p.grad = batch(5)
            q.grad = batch(5)
        opt.step()
        plain.step()
    for p, q in zip(model[1].parameters(), alone[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_states_that_there_are_stay_in_a_step_of_zeros() -> None:
    """Of all layers, also if one of them has none."""
    model = network()
    opt = made(model)
    model[4].requires_grad_(False)
    step(model, opt)
    model[4].requires_grad_(True)
    kept = {p: dict(opt.state[p]) for p in model[0].parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    for p, state in kept.items():
        assert state
        for name, entry in state.items():
            assert torch.equal(opt.state[p][name], entry)
    assert opt.param_groups[0]["state_of"] == opt.param_groups[0]["solver"]


def test_rates_of_zero_without_gradients_leave_an_outer_optimizer_without_state() -> None:
    for rates, has_state in (((0.0, 0.0, 0.0), True), ((0.0, 0.0, 1.0), False)):
        model = network()
        outer: list[Any] = []

        def factory(params: list[nn.Parameter], made_: list[Any] = outer) -> torch.optim.Optimizer:
            made_.append(torch.optim.Adam(params, lr=0.1))
            return made_[0]

        opt = made(
            model, apply="gradient", outer=factory, param_groups=in_groups(model, {}, {}, {})
        )
        for group, lr in zip(opt.param_groups, rates, strict=True):
            group["lr"] = lr
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        if has_state:
            opt.step()
        else:
            with pytest.raises(RuntimeError, match="No layer recorded"):
                opt.step()
        assert bool(outer[0].state) is has_state


# ---- groups and copies ------------------------------------------------------------------------------


def test_groups_are_not_added_while_one_layer_has_recorded() -> None:
    model = network()
    opt = made(model, param_groups=in_groups(model, {}, {}, {})[:2])
    model[2:](batch(8, 5)).sum().backward()
    assert [bool(layer.calls) for layer in opt._layers] == [False, True]
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        opt.add_param_group({"params": list(model[4].parameters())})


def test_settings_without_effect_are_named_when_a_group_is_added() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    given = {"params": list(model[0].parameters())}
    opt = made(model, param_groups=[given], fallback=lambda ps: torch.optim.SGD(ps, lr=0.1))
    with pytest.warns(UserWarning, match="gamma"):
        opt.add_param_group({"params": list(model[1].parameters()), "gamma": 3.0})


def test_no_group_maximizes_where_an_outer_optimizer_trains_all() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    groups = [{"params": model[:2].parameters(), "maximize": True}]
    groups.append({"params": model[2].parameters()})
    with pytest.raises(ValueError, match="maximize= out"):
        made(
            model,
            apply="gradient",
            outer=torch.optim.SGD(model.parameters(), lr=0.1),
            param_groups=groups,
        )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_shares_groups_and_state_with_its_fallback(copied: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    opt = LocoProp(model, output_transfer="sigmoid", **M, fallback=_adam)
    step(model, opt)
    other, again = copied((model, opt))
    assert again._fallback.state is again.state
    assert [id(g) for g in again._fallback.param_groups] == [id(again.param_groups[1])]
    again.param_groups[1]["lr"] = 0.0
    before = other[1].weight.clone()
    step(other, again)
    assert torch.equal(other[1].weight, before)


def _adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


# ---- several processes ------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_processes_that_nothing_averages_drift_apart(world: int) -> None:
    models = [[sharded_network("smooth") for _ in range(5)] for _ in range(world)]

    def drifts(rank: int) -> list[bool]:
        plain, one_iteration, averaged, whole, partly = models[rank]
        optimizers = [make_optimizer(Case(S), plain)]
        optimizers.append(make_optimizer(Case({**S, "local_steps": 1}), one_iteration))
        wrapped = DistributedDataParallel(averaged)
        optimizers.append(make_optimizer(Case(S), averaged))
        optimizers[-1]._hooks.averaging.processes = wrapped.process_group
        optimizers.append(make_optimizer(Case(S), sharded(Case(), whole)))
        fully_shard(partly[0])
        optimizers.append(make_optimizer(Case(S), partly))
        assert [opt._is_sharded for opt in optimizers] == [False, False, False, True, True]
        assert not any(opt.capturable for opt in optimizers[3:])
        return [opt._drifts() for opt in optimizers]

    several = world > 1
    assert threads.run(drifts, world) == [[several, False, False, False, several]] * world


@pytest.mark.distributed
@pytest.mark.parametrize("in_pipeline", [False, True])
def test_gradients_that_fully_shard_has_not_added_up_are_refused(in_pipeline: bool) -> None:
    """A pipeline adds them up after its last backward pass: they are looked at again."""
    models = [sharded_network("smooth") for _ in range(2)]

    def refused(rank: int) -> None:
        model = sharded(Case(), models[rank])
        opt = make_optimizer(Case(S), model)
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        model(torch.ones(5, 6).double()).sum().backward()
        if not in_pipeline:
            with pytest.raises(RuntimeError, match=r"Call set_requires_gradient_sync\(True\)"):
                opt.step()
        for layer in opt._layers:
            layer.sharded.unreduced = True
            layer.note_reduction = partial(setattr, layer.sharded, "unreduced", False)  # type: ignore[method-assign]
        if in_pipeline:
            opt._hooks.averaging.__dict__["pipeline"] = SimpleNamespace(is_used=True)
            assert opt._layers_with_gradient() is not None
            return
        with pytest.raises(RuntimeError, match="are not added up over the processes"):
            opt._layers_with_gradient()

    threads.run(refused, 2)
