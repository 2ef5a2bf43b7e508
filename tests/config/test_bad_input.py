"""Bad input is refused with a sentence that says what to do, before anything is touched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.losses import LocalLoss, Squared
from torch_locoprop.paper.regularizers import L1, FisherMahalanobis
from torch_locoprop.paper.targets import GradientDescent, NaturalGradient, Target
from torch_locoprop.solvers import Sgd

NAN, INF = float("nan"), float("inf")

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"Invalid lr=-1.0. Must be finite and >= 0"),
    ({"lr": NAN}, "Invalid lr=nan"),
    ({"lr": INF}, "Invalid lr=inf"),
    ({"lr": "fast"}, "Invalid lr='fast'. Must be a number"),
    ({"lr": True}, "Invalid lr=True"),
    ({"gamma": 0.0}, "Invalid gamma=0.0. Must be finite and > 0"),
    ({"gamma": -2.0}, "Invalid gamma=-2.0"),
    ({"gamma": NAN}, "Invalid gamma=nan"),
    ({"eps": -1e-8}, "Invalid eps=-1e-08"),
    ({"eps": NAN}, "Invalid eps=nan"),
    ({"eps": 0.0, "solver": "adagrad"}, "start of the accumulator"),
    ({"momentum": 1.0}, "Invalid momentum=1.0. Must be finite and >= 0 and < 1"),
    ({"decay": 1.5}, "Invalid decay=1.5"),
    ({"weight_decay": -0.1}, "Invalid weight_decay=-0.1"),
    ({"local_steps": 0}, "Invalid local_steps=0. Must be an integer >= 1"),
    ({"local_products": "fp16"}, "Unknown local_products 'fp16'"),
    ({"local_steps": 2.5}, "Invalid local_steps=2.5"),
    ({"local_steps": True}, "Invalid local_steps=True"),
    ({"variant": "locoprop"}, "Unknown variant 'locoprop'. Did you mean 'locoprop-"),
    ({"solver": "rmsprob"}, "Unknown solver 'rmsprob'. Did you mean 'rmsprop'"),
    ({"regularizer": "l3"}, "Unknown regularizer 'l3'"),
    ({"local_decay": "cosine"}, "Unknown local_decay 'cosine'"),
    ({"local_reduction": "none"}, "Unknown local_reduction 'none'"),
    ({"maximize": 1}, "Invalid maximize=1"),
    ({"output_transfer": "sigmoyd"}, "sigmoyd"),
    ({"output_transfer": "gelu"}, "gelu"),
    ({"transfers": {"9": "tanh"}}, "Unknown module in transfers= '9'. Known: 0, 2, 4"),
    ({"transfers": {"0": "tanhh"}}, "tanhh"),
    (
        {"loss_fn": nn.CrossEntropyLoss(), "output_transfer": "sigmoid"},
        "output_transfer='sigmoid' contradicts loss_fn=CrossEntropyLoss, .* 'softmax' inside",
    ),
    ({"solver": "exact", "variant": "pocoprop-s"}, "has no closed form"),
    ({"solver": "exact", "variant": "pocoprop-m"}, "has no closed form"),
    ({"preset": "general", "variant": "pocoprop-m"}, "no closed form for solver='general'"),
    ({"preset": "general", "every": 2}, "Invalid every=2 with solver='general'"),
    ({"preset": "general", "gate": True}, "solver='general' does not"),
    ({"solver": "exact", "regularizer": "l1"}, "needs a first-order solver"),
    ({"variant": "natural-s"}, "draws labels from the model's predictive distribution"),
    ({"variant": "natural-s", "output_transfer": "tanh"}, "draws labels from"),
    ({"regularizer": "fisher"}, "draws labels from the model's predictive distribution"),
    ({"param_groups": [{"params": [], "lrr": 1.0}]}, "Unknown setting in a parameter group 'lrr'"),
    (
        {"param_groups": [{"params": [], "outer": torch.optim.SGD}]},
        "outer= is an argument of LocoProp",
    ),
    ({"param_groups": [{"params": [], "fallback": True}]}, "it is a group of a fallback optimizer"),
    ({"param_groups": [{"params": nn.Linear(2, 2).parameters()}]}, "not the model's"),
    ({"param_groups": [{"lr": 1.0}]}, "A parameter group has no 'params'"),
    ({"variant": "LocoProp-M"}, "Did you mean 'locoprop-m'"),
    ({"layers": []}, "layers= is empty"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:40])
def test_bad_options(options: dict[str, Any], message: str) -> None:
    model = network()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        LocoProp(model, **options)
    assert_close(weights(model), before, 0.0)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": 3}, "Invalid variant=3. Expected one of locoprop-s"),
        ({"solver": torch.optim.SGD}, "Invalid solver="),
        ({"variant": Variant("mine", "target", Squared())}, "Invalid target='target' in a variant"),
        ({"variant": Variant("mine", GradientDescent(), 1)}, "Invalid loss=1 in a variant"),
        ({"outer": lambda params: None, "apply": "gradient"}, "outer= must be, or return"),
        ({"outer": 3, "apply": "nothing"}, "outer= must be, or return"),
        ({"layers": [1]}, "layers= takes names of layers"),
        ({"layers": lambda name: True}, "layers= takes names of layers"),
        ({"transfers": ["tanh"]}, "transfers= takes a dictionary"),
        ({"param_groups": network().parameters()}, "param_groups= takes dictionaries"),
        ({"diagnose": "yes"}, "diagnose= is True or False"),
    ],
)
def test_components_of_the_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LocoProp(network(), **options)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"solver": "rmsprob"}, "Unknown solver 'rmsprob'. Did you mean 'rmsprop'"),
        ({"solver": Sgd()}, "in a parameter group, which holds names: sgd, momentum"),
        ({"variant": 3}, "Invalid variant=3"),
        ({"variant": "locoprop-m"}, "'locoprop-m' has no closed form for solver='general'"),
        ({"every": 0}, "Invalid every=0"),
        ({"gate": True}, "gate=True and cap_by='backprop' depend on gamma"),
        ({"max_rows": -1}, "Invalid max_rows=-1"),
    ],
)
@pytest.mark.parametrize("before_the_pass", [True, False])
def test_groups_changed_to_what_is_not_allowed(
    setting: dict[str, Any], message: str, before_the_pass: bool
) -> None:
    model = network()
    opt = LocoProp(model)
    before = weights(model)
    if before_the_pass:
        opt.param_groups[0].update(setting)
        with pytest.raises((TypeError, ValueError), match=message):
            model(batch(5, 6))
    else:
        model(batch(5, 6)).sum().backward()
        opt.param_groups[0].update(setting)
        with pytest.raises((TypeError, ValueError), match=message):
            opt.step()
    assert_close(weights(model), before, 0.0)


def test_parameters_instead_of_a_model() -> None:
    with pytest.raises(TypeError, match="takes the model itself"):
        LocoProp(network().parameters())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.GRUCell(2, 3), "GRUCell"),
        (nn.Sequential(nn.LayerNorm(3), nn.Embedding(3, 3)), "LayerNorm"),
        (nn.ReLU(), "It has no parameters"),
    ],
)
def test_a_model_with_nothing_to_serve(model: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=f"no layer with a local problem.*{reason}"):
        LocoProp(model)


def test_an_uninitialized_model() -> None:
    with pytest.raises(ValueError, match="Run one forward pass"):
        LocoProp(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("case", ["no backward", "no forward", "no grad", "twice", "other model"])
def test_a_step_that_recorded_nothing(case: str) -> None:
    model, x = network(), batch(5, 6)
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
    if case == "no backward":
        model(x)
    elif case == "no grad":
        with torch.no_grad():
            model(x)
    elif case == "twice":
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
    elif case == "other model":
        other = network()
        cross_entropy(other(x), x[:, :3]).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"Call loss.backward\(\) before step\(\)"):
        opt.step()
    assert_close(weights(model), before, 0.0)


def test_gradients_that_were_put_into_grad_are_among_the_reasons() -> None:
    model, x = network(), batch(5, 6)
    opt = LocoProp(model)
    loss = cross_entropy(model(x), x[:, :3])
    own = list(model.parameters())
    for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
        p.grad = gradient
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad and put into \.grad"):
        opt.step()


def test_natural_targets_need_the_model_itself_to_be_called() -> None:
    model, x = network(), batch(5, 6)
    opt = LocoProp(model, variant="natural-s", output_transfer="sigmoid")
    before = weights(model)
    out = x
    for module in model:
        out = module(out)
    cross_entropy(out, x[:, :3]).backward()
    with pytest.raises(RuntimeError, match=r"Call the model itself, model\(x\)"):
        opt.step()
    assert_close(weights(model), before, 0.0)


def test_no_distribution_for_a_head() -> None:
    model = network()
    options = {"variant": "natural-s", "output_transfer": "sigmoid"}
    opt = LocoProp(model, **options, transfers={"4": "tanh"})
    with pytest.raises(ValueError, match="No predictive distribution is known"):
        model(batch(5, 6))
    assert not opt.state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NaturalGradient(damping=-1), "Invalid damping=-1"),
        (lambda: NaturalGradient(decay=1.0), "Invalid decay=1.0"),
        (lambda: NaturalGradient(every=0), "Invalid every=0"),
        (lambda: FisherMahalanobis(damping=NAN), "Invalid damping=nan"),
        (lambda: FisherMahalanobis(damping=-0.5), "Invalid damping=-0.5"),
        (lambda: NaturalGradient(decay=-0.5), "Invalid decay=-0.5"),
        (lambda: FisherMahalanobis(decay=-0.1), "Invalid decay=-0.1"),
        (lambda: FisherMahalanobis(decay=1.0), "Invalid decay=1.0"),
        (lambda: L1(strength=-1.0), "Invalid strength=-1.0"),
    ],
)
def test_bad_component_parameters(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("component", [NaturalGradient, FisherMahalanobis])
def test_no_damping_and_no_average_are_allowed(component: Any) -> None:
    own = component(damping=0.0, decay=0.0)
    assert (own.damping, own.decay) == (0, 0)


def test_fallback_must_be_an_optimizer_of_what_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.raises(TypeError, match=r"must return a torch.optim.Optimizer, not list"):
        LocoProp(model, fallback=lambda p: p)
    with pytest.raises(TypeError, match=r"must be a function of the parameters.*not AdamW"):
        LocoProp(model, fallback=torch.optim.AdamW(model[1].parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly the parameters it is given"):
        LocoProp(model, fallback=lambda p: torch.optim.SGD(model.parameters(), lr=0.1))


def test_base_components_ask_to_be_subclassed() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(NotImplementedError):
        Target()(one, None, None, None, 1.0)
    for method in ("residual", "value"):
        with pytest.raises(NotImplementedError):
            getattr(LocalLoss(), method)(one, one, None)
    with pytest.raises(NotImplementedError):
        LocalLoss().curvature(one, None)


def test_fallback_cannot_be_one_that_needs_a_closure() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.raises(TypeError, match="LBFGS needs a closure"):
        LocoProp(model, fallback=lambda p: torch.optim.LBFGS(p))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"local_steps": 1}, 0),
        ({"local_steps": 2}, 1),
        ({"local_steps": 1, "solver": "exact", "variant": "locoprop-s"}, 1),
        ({"local_steps": 1, "variant": "natural-s", "output_transfer": "linear"}, 1),
    ],
    ids=["one", "two", "exact", "natural"],
)
def test_several_processes_are_warned_that_they_drift_apart(
    settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = LocoProp(model, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert sum("drift apart" in str(each.message) for each in caught) == expected
