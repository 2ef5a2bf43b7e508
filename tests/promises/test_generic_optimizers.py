"""PyTorch's generic tests of optimizers, written anew for ours by an adapter on linear layers.

The optimizers are those of ``optimizer_cases.py``.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from promises.optimizer_cases import ALL, LOCAL, PLAIN, Case
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

STATELESS = {"sgd", "locoprop-m-sgd", "exact"}
each = pytest.mark.parametrize("case", ALL, ids=str)
each_plain = pytest.mark.parametrize("case", PLAIN, ids=str)
each_with_groups = pytest.mark.parametrize("case", [*LOCAL, *PLAIN], ids=str)


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    x = batch(8, 6, seed=seed)
    loss = cross_entropy(model(x), x[:, :3])
    loss.backward()
    return loss


def train(model: nn.Module, opt: Optimizer, steps: range) -> None:
    for seed in steps:
        opt.zero_grad()
        backward(model, seed)
        opt.step()


def assert_equal(one: Any, other: Any) -> None:
    """Assert that nested dicts and lists are equal, tensors bit for bit."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_equal(mine, yours)
    else:
        assert one == other


# ---- state dicts -----------------------------------------------------------------------------------


@each
def test_state_dict_is_deterministic(case: Case) -> None:
    """A run continued from a state dict has the same weights and the same state as the first run."""
    model = network()
    opt = case.make(model)
    train(model, opt, range(3))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, range(3, 7))
    other = network(seed=5)
    resumed = case.make(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert_equal(resumed.state_dict(), saved[1])
    train(other, resumed, range(3, 7))
    assert_close(weights(other), weights(model), 0.0)
    assert_equal(resumed.state_dict(), opt.state_dict())


@each
def test_loading_leaves_the_given_state_dict_alone(case: Case) -> None:
    model = network()
    opt = case.make(model)
    train(model, opt, range(2))
    saved = copy.deepcopy(opt.state_dict())
    given = copy.deepcopy(saved)
    opt.load_state_dict(given)
    assert_equal(given, saved)


@each
def test_state_dict_is_saved_and_loaded_with_weights_only(case: Case) -> None:
    model = network()
    opt = case.make(model)
    train(model, opt, range(3))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    assert_equal(torch.load(file, weights_only=True), opt.state_dict())


@each
def test_state_follows_the_dtype_of_the_parameters(case: Case) -> None:
    model = network()
    opt = case.make(model)
    train(model, opt, range(2))
    single = network().float()
    other = case.make(single)
    other.load_state_dict(opt.state_dict())
    for parameter, state in other.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                assert value.dtype == parameter.dtype == torch.float32


@each
def test_state_is_empty_before_and_not_after_the_first_step(case: Case) -> None:
    model = network()
    opt = case.make(model)
    assert not any(opt.state.values())
    train(model, opt, range(1))
    inside = getattr(opt, "_outer", None)
    assert case.name in STATELESS or any(opt.state.values()) or inside is not None


@each
def test_a_state_dict_of_another_model_is_refused(case: Case) -> None:
    model, smaller = network(), network(sizes=(6, 3))
    opt, other = case.make(model), case.make(smaller)
    train(model, opt, range(1))
    train(smaller, other, range(1))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="parameter"):
        other.load_state_dict(opt.state_dict())
    assert_equal(other.state_dict(), before)


@each
def test_hooks_on_state_dicts(case: Case) -> None:
    opt = case.make(network())
    calls: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("before"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: calls.append("second"))
    opt.register_load_state_dict_pre_hook(lambda o, state: calls.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append("after"))
    state = opt.state_dict()
    assert calls == ["before"]
    assert state["extra"] == 1
    opt.load_state_dict({name: value for name, value in state.items() if name != "extra"})
    assert calls == ["before", "first", "second", "after"]


@each
def test_a_load_hook_may_replace_the_state_dict(case: Case) -> None:
    model = network()
    opt = case.make(model)
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 0.123
    opt.register_load_state_dict_pre_hook(lambda o, given: state)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.123


# ---- steps -----------------------------------------------------------------------------------------


@each
def test_step_hooks_run_in_order_with_the_optimizer(case: Case) -> None:
    model = network()
    opt = case.make(model)
    calls: list[tuple[str, Optimizer]] = []
    handles = [
        register_optimizer_step_pre_hook(
            lambda o, args, kwargs: calls.append(("global before", o))
        ),
        register_optimizer_step_post_hook(
            lambda o, args, kwargs: calls.append(("global after", o))
        ),
    ]
    own = [
        opt.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", o))),
        opt.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", o))),
    ]
    train(model, opt, range(1))
    for handle in handles:
        handle.remove()
    mine = [name for name, o in calls if o is opt]
    assert mine == ["global before", "before", "after", "global after"]
    for handle in own:
        handle.remove()
    calls.clear()
    train(model, opt, range(1, 2))
    assert not calls


@each
def test_step_returns_what_the_closure_returned(case: Case) -> None:
    model, other = network(), network()
    opt, plain = case.make(model), case.make(other)

    def closure() -> Tensor:
        opt.zero_grad()
        return backward(model)

    loss = opt.step(closure)
    train(other, plain, range(1))
    assert_close(weights(model), weights(other), 0.0)
    assert_close([loss.detach()], [backward(network()).detach()], 0.0)


@each
def test_gradients_are_never_written_to(case: Case) -> None:
    model = network()
    opt = case.make(model, **({} if case.name == "outer" else {"weight_decay": 0.1}))
    for seed in range(3):
        backward(model, seed)
        before = [(p.grad, p.grad.clone()) for p in model.parameters()]
        opt.step()
        for p, (gradient, values) in zip(model.parameters(), before, strict=True):
            assert p.grad is gradient
            assert torch.equal(gradient, values)
        opt.zero_grad()


@each
def test_the_first_step_with_zero_gradients_moves_nothing(case: Case) -> None:
    model = network()
    opt = case.make(model)
    before = weights(model)
    (0.0 * model(batch(8, 6))).sum().backward()
    opt.step()
    assert_close(weights(model), before, 0.0)


@each_plain
def test_parameters_without_a_gradient_stay_and_get_no_state(case: Case) -> None:
    model = network()
    opt = case.make(model)
    before = weights(model)
    opt.step()
    assert_close(weights(model), before, 0.0)
    assert not any(opt.state.values())


@pytest.mark.parametrize("case", [*LOCAL, ALL[-1]], ids=str)
def test_a_step_without_a_backward_pass_raises(case: Case) -> None:
    """Unlike in ``torch.optim``: a loop whose layers record nothing would not train."""
    model = network()
    opt = case.make(model)
    with pytest.raises(RuntimeError, match=r"Call loss.backward\(\) before step\(\)"):
        opt.step()


@each
def test_zero_grad(case: Case) -> None:
    model = network()
    opt = case.make(model)
    backward(model)
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@each
def test_parameters_in_any_memory_format(case: Case) -> None:
    """Transposed memory of parameters gives the same steps."""
    results = []
    for transposed in (False, True):
        model = network()
        if transposed:
            for p in model.parameters():
                if p.dim() == 2:
                    p.data = p.data.mT.contiguous().mT
        opt = case.make(model)
        train(model, opt, range(4))
        results.append(weights(model))
    assert_close(*results, 1e-10)


@each
def test_parameters_of_several_dtypes(case: Case) -> None:
    """The first layer in float32 and the others in float64 take nearly the steps of float64."""

    class Mixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                parameters = list(module.parameters())
                x = module(x.to(parameters[0].dtype) if parameters else x)
            return x

    results = []
    for mixed in (False, True):
        model = Mixed(*network())
        if mixed:
            model[0].float()
        opt = case.make(model)
        before = weights(model)
        train(model, opt, range(3))
        results.append(
            [(w.double() - b.double()) for w, b in zip(weights(model), before, strict=True)]
        )
        assert model[0].weight.dtype == (torch.float32 if mixed else torch.float64)
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 2e-2 * one.norm()


@each
def test_parameters_on_several_devices(case: Case) -> None:
    """Layers on another device, here one of tensors without values, change nothing for the others."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = network(), network().to("meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.here(x) if x.is_cpu else self.there(x)  # type: ignore[no-any-return]

    alone, apart = network(), Apart()
    opt, of_both = case.make(alone), case.make(apart)
    train(alone, opt, range(3))
    for seed in range(3):
        of_both.zero_grad()
        backward(apart, seed)
        x = batch(8, 6, seed=seed).to("meta")
        cross_entropy(apart(x), x[:, :3]).backward()
        of_both.step()
    assert_close(weights(apart.here), weights(alone), 0.0)
    assert len(of_both.state) == 2 * len(opt.state)


@each
def test_a_tensor_as_learning_rate(case: Case) -> None:
    lr = case.options.get("lr", 0.01)
    results = []
    for given in (lr, torch.tensor(lr, dtype=torch.float64)):
        model = network()
        train(model, case.make(model, lr=given), range(3))
        results.append(weights(model))
    assert_close(*results, 1e-12)


# ---- groups and schedulers -------------------------------------------------------------------------


def grouped(case: Case, model: nn.Sequential, first: dict[str, Any]) -> Any:
    """Return an optimizer with two groups; the first has the first layer and settings of its own."""
    groups = [
        {"params": list(model[0].parameters()), **first},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    own = {"lr": 0.01, **case.options}
    if case.takes_model:
        return case.kind(model, param_groups=groups, **own)
    return case.kind(groups, **own)


@each_with_groups
def test_a_group_with_learning_rate_zero_stays(case: Case) -> None:
    if case.name == "outer":
        pytest.skip("the rates of an outer optimizer follow those of its own groups")
    model = network()
    opt = grouped(case, model, {"lr": 0.0})
    before = weights(model)
    train(model, opt, range(3))
    after = weights(model)
    assert_close(after[:2], before[:2], 0.0)
    assert all(not torch.equal(a, b) for a, b in zip(after[2:], before[2:], strict=True))


@each_with_groups
def test_weight_decay_of_a_group(case: Case) -> None:
    """In the first step the decayed group is smaller by ``lr · weight_decay · w``, no other is."""
    if case.name == "outer":
        pytest.skip("an outer optimizer has a weight decay of its own")
    lr = case.options.get("lr", 0.01)
    model, plain = network(), network()
    # After the decay, further local iterations would start from other pre-activations.
    if case.takes_model:
        case = replace(case, options={**case.options, "local_steps": 1})
    train(model, grouped(case, model, {"weight_decay": 0.5}), range(1))
    train(plain, grouped(case, plain, {}), range(1))
    start, found, without = weights(network()), weights(model), weights(plain)
    assert_close(found[1:], without[1:], 0.0)
    assert_close([without[0] - found[0]], [lr * 0.5 * start[0]], 1e-12)


@each_with_groups
def test_a_parameter_belongs_to_one_group(case: Case) -> None:
    model = network()
    opt = case.make(model)
    with pytest.raises(ValueError, match="parameter"):
        opt.add_param_group({"params": [model[0].weight]})


@each_plain
def test_a_group_is_added(case: Case) -> None:
    model = network()
    opt = case.kind(model[0].parameters(), lr=0.01, **case.options)
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    before = weights(model)
    train(model, opt, range(1))
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [True] * 4 + [False] * 2
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.02]


@each_plain
def test_named_parameters(case: Case) -> None:
    """Names are kept in groups and state dicts, and do not change the steps."""
    model, other = network(), network()
    named = case.kind(model.named_parameters(), lr=0.01, **case.options)
    plain = case.make(other)
    train(model, named, range(3))
    train(other, plain, range(3))
    assert_close(weights(model), weights(other), 0.0)
    names = [name for name, _ in model.named_parameters()]
    assert named.state_dict()["param_groups"][0]["param_names"] == names
    plain.load_state_dict(named.state_dict())
    named.load_state_dict(plain.state_dict())


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    partial(lr_scheduler.ExponentialLR, gamma=0.9),
    partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=4),
    partial(lr_scheduler.PolynomialLR, total_iters=5),
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=8),
    partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.02, step_size_up=2),
    lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
    lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
@each
def test_schedulers_move_rates_as_those_of_torch_optim(
    case: Case, schedule: Callable[[Optimizer], Any]
) -> None:
    lr = case.options.get("lr", 0.01)
    model, other = network(), network()
    opt = case.make(model)
    reference = torch.optim.SGD(other.parameters(), lr=lr, momentum=0.9)
    cyclic = isinstance(schedule, partial) and schedule.func in (
        lr_scheduler.OneCycleLR,
        lr_scheduler.CyclicLR,
    )
    if cyclic and "momentum" not in opt.param_groups[0]:
        with pytest.raises(ValueError, match="momentum"):
            schedule(opt)
        return
    ours, theirs = schedule(opt), schedule(reference)
    for seed in range(6):
        train(model, opt, range(seed, seed + 1))
        reference.step()
        ours.step()
        theirs.step()
        for group in opt.param_groups:
            assert group["lr"] == pytest.approx(reference.param_groups[0]["lr"], rel=1e-12)
            if cyclic:
                momentum = reference.param_groups[0]["momentum"]
                assert group["momentum"] == pytest.approx(momentum, rel=1e-12)


@each
def test_plateaus_lower_the_rate(case: Case) -> None:
    model = network()
    opt = case.make(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    before = opt.param_groups[0]["lr"]
    for _ in range(3):
        train(model, opt, range(1))
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] == 0.25 * before


# ---- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@each
def test_copies_have_all_public_attributes_and_train_alike(
    case: Case, copier: Callable[[Any], Any]
) -> None:
    model = network()
    opt = case.make(model)
    train(model, opt, range(2))
    twin, other = copier((model, opt))
    public = {name for name in vars(opt) if not name.startswith("_")}
    assert {name for name in vars(other) if not name.startswith("_")} == public
    for name in public - {"state", "param_groups", "defaults"}:
        assert_equal(getattr(other, name), getattr(opt, name))
    train(model, opt, range(2, 4))
    train(twin, other, range(2, 4))
    assert_close(weights(twin), weights(model), 0.0)


@each
def test_repr_names_the_class_and_the_settings(case: Case) -> None:
    text = repr(case.make(network()))
    assert text.startswith(type(case.make(network())).__name__)
    assert "lr: " in text


# ---- errors ----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_invalid_learning_rates(case: Case, lr: Any) -> None:
    if lr is None and case in LOCAL:
        return  # the learning rate of the preset
    with pytest.raises((ValueError, TypeError), match="lr"):
        case.make(network(), lr=lr)


@each_plain
def test_invalid_parameters(case: Case) -> None:
    leaf = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        case.kind([])
    with pytest.raises(TypeError, match="iterable"):
        case.kind(leaf)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        case.kind([leaf * 2])
    with pytest.raises(ValueError, match="complex"):
        case.kind([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


@each_plain
def test_sparse_gradients_are_served_or_refused(case: Case) -> None:
    moved = []
    for sparse in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, sparse=sparse)
        opt = case.kind(embedding.parameters(), lr=0.01, **case.options)
        for _ in range(3):
            opt.zero_grad()
            embedding(torch.tensor([1, 2, 1])).square().sum().backward()
            if sparse and case.name not in ("sgd", "momentum"):
                with pytest.raises(RuntimeError, match="sparse gradient"):
                    opt.step()
                return
            opt.step()
        moved += weights(embedding)
    torch.testing.assert_close(*moved)


@each_plain
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 1, 3)])
def test_parameters_of_any_shape(case: Case, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    opt = case.kind([p], lr=0.01, **case.options)
    for _ in range(3):
        opt.zero_grad()
        p.square().sum().backward()
        opt.step()
    assert p.shape == shape
    assert (p < 1).all()
    assert p.isfinite().all()
