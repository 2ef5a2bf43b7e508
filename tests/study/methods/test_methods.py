"""The records of all methods: names, settings, and the optimizers they build."""

import copy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp, baselines
from torch_locoprop.paper.transfers import Sigmoid
from torch_locoprop.solvers import Exact
from torch_locoprop.study import methods
from torch_locoprop.study.methods.combined_optimizer import CombinedOptimizer
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss

OPTIONAL = ("soap", "psgd")
BUILT_IN = [name for name in methods.names() if name not in OPTIONAL]
IMAGES = torch.rand(20, 12, generator=torch.Generator().manual_seed(3))


def built(name: str, weight_decay: float = 0.0, **given: Any) -> tuple[nn.Module, Optimizer]:
    method, model = methods.get(name), architectures.build("12-8-3")
    return model, method.build(model, {**method.resolve(given), "weight_decay": weight_decay})


def trained(name: str, weight_decay: float = 0.0, **given: Any) -> nn.Module:
    model, optimizer = built(name, weight_decay, **given)
    for _ in range(3):
        reconstruction_loss(model(IMAGES), IMAGES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", [*BUILT_IN, "kfac@2", "shampoo@7"])
def test_every_method_moves_all_parameters(name: str) -> None:
    before = architectures.build("12-8-3").parameters()
    for old, new in zip(before, trained(name).parameters(), strict=True):
        assert torch.isfinite(new).all()
        assert not torch.equal(old, new)


@pytest.mark.parametrize("name", BUILT_IN)
def test_weight_decay_is_decoupled_and_spares_biases(name: str) -> None:
    """At the first step the decayed weights differ from the others by lr · decay · weight."""
    runs = []
    for decay in (0.0, 0.1):
        model, optimizer = built(name, decay, lr=1e-2, **_one_step(name))
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        reconstruction_loss(model(IMAGES), IMAGES).backward()
        optimizer.step()
        runs.append(dict(model.named_parameters()))
    for parameter, old in start.items():
        shrunk = 1e-2 * 0.1 * old if parameter.endswith("weight") else torch.zeros_like(old)
        difference = runs[0][parameter] - runs[1][parameter]
        torch.testing.assert_close(difference, shrunk, rtol=1e-3, atol=2e-6)


def _one_step(name: str) -> dict[str, Any]:
    """One plain iteration: more would solve the problem at the decayed weights."""
    plain = {"local_steps": 1, "solver": "sgd", "gamma": 1e-3}
    known = methods.get(name).settings if isinstance(built(name)[1], LocoProp) else {}
    return {setting: value for setting, value in plain.items() if setting in known}


def test_kinds() -> None:
    assert isinstance(built("kfac@3")[1], baselines.KFAC)
    assert built("kfac@3")[1].param_groups[0]["every"] == 3
    assert built("shampoo@20")[1].param_groups[0]["every"] == 20
    group = built("proxprop", solver="adam", local_steps=5)[1].param_groups[0]
    assert (group["variant"], group["solver"], group["local_steps"]) == ("proxprop", "adam", 5)


def test_the_closed_form_takes_its_settings_to_the_solver() -> None:
    _, optimizer = built("exact-s-muon@5", decay=0.9, damping=0.2)
    assert isinstance(optimizer, LocoProp)
    solver = optimizer._components.solver(optimizer.param_groups[0])
    assert solver == Exact(decay=0.9, every=5, damping=0.2)
    assert optimizer.param_groups[0]["variant"] == "locoprop-s"


@pytest.mark.parametrize("variant", ["s", "m"])
def test_the_closed_form_without_momentum_replaces_the_weights_by_its_solution(
    variant: str,
) -> None:
    settings = {"lr": 0.5, "gamma": 3.0}
    model, optimizer = built(f"exact-{variant}", momentum=0.0, **settings)
    plain = copy.deepcopy(model)
    own = LocoProp(
        plain,
        variant=f"locoprop-{variant}",
        solver="exact",
        output_transfer="sigmoid",
        **settings,
    )
    images = IMAGES.double()
    for network, each in ((model.double(), optimizer), (plain.double(), own)):
        reconstruction_loss(network(images), images).backward()
        each.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_every_method_says_where_its_settings_come_from() -> None:
    assert methods.get("locoprop-m").source == "reference"
    for name in methods.names():
        method = methods.get(name)
        assert method.source
        assert "lr" in method.settings
        assert "weight_decay" not in method.settings


def test_settings_are_completed_in_the_types_of_the_defaults() -> None:
    settings = methods.get("locoprop-m").resolve({"gamma": 100, "local_steps": 5.0, "eps": 1e-6})
    assert settings == {
        **methods.get("locoprop-m").settings,
        **{"gamma": 100.0, "local_steps": 5, "eps": 1e-6},
    }
    assert type(settings["gamma"]) is float
    assert type(settings["local_steps"]) is int
    assert methods.get("kfac").resolve({"clip": 1})["clip"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("locoprop", r"Unknown method 'locoprop'. Did you mean 'locoprop-\w'\? Known: .*kfac"),
        ("adam@3", "adam has no setting every"),
        ("kfac@", "integer >= 1"),
        ("kfac@0", "integer >= 1"),
        ("kfac@x", "integer >= 1"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get(name)


def test_unknown_and_contradicting_settings() -> None:
    with pytest.raises(ValueError, match=r"Unknown setting of adam 'momentun'.*mean 'momentum'"):
        methods.get("adam").resolve({"momentun": 0.9})
    with pytest.raises(ValueError, match=r"kfac@5 renews every 5 steps.*Use kfac@10"):
        methods.get("kfac@5").resolve({"every": 10})
    assert methods.get("kfac@5").resolve({"every": 5})["every"] == 5


@pytest.mark.usefixtures("own_methods")
def test_a_new_method_is_one_registration() -> None:
    def build(model: nn.Module, settings: methods.Settings) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), **settings)

    methods.register(methods.Method("mine", build, {"lr": 1e-3}, source="untuned"))
    assert "mine" in methods.names()
    assert isinstance(built("mine", lr=0.5)[1], torch.optim.AdamW)
    with pytest.raises(ValueError, match="a method 'mine' already"):
        methods.register(methods.Method("mine", build, {}, source=""))
    with pytest.raises(ValueError, match="setting every"):
        methods.register(methods.Method("a@b", build, {}, source=""))


# Peers ----------------------------------------------------------------------------------------


def test_muon_steps_in_the_scale_of_adamw() -> None:
    _, optimizer = built("muon", lr=0.02)
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_kfac_draws_its_labels_from_the_pixels_own_distribution() -> None:
    _, optimizer = built("kfac")
    assert isinstance(optimizer, baselines.KFAC)
    assert optimizer._output_transfer == Sigmoid()


def test_muon_has_matrices_adam_the_rest_and_a_scheduler_moves_both() -> None:
    model, optimizer = built("muon", weight_decay=0.1, lr=0.02)
    shapes = [{p.dim() for p in group["params"]} for group in optimizer.param_groups]
    assert shapes == [{2}, {1}]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    reconstruction_loss(model(IMAGES), IMAGES).backward()
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_bad_setting_of_a_peer_is_named() -> None:
    with pytest.raises(ValueError, match="Invalid momentum=2"):
        built("muon", momentum=2.0)


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("old_version", [False, True])
def test_a_missing_package_is_named(
    name: str, old_version: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: True)
    package = ModuleType("pytorch_optimizer") if old_version else None
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", package)
    with pytest.raises(ImportError, match=r"pytorch_optimizer.*torch-locoprop\[peers\]"):
        built(name)


def test_psgd_asks_for_opt_einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: False)
    with pytest.raises(ImportError, match="opt_einsum"):
        built("psgd")


class Kron(torch.optim.SGD):
    """A fake of the optional package's Kron: its state has strings that torch cannot copy."""

    def __init__(self, params: Any, weight_decouple: bool, **settings: Any) -> None:
        self.weight_decouple = weight_decouple
        super().__init__(params, **settings)

    def step(self, closure: None = None) -> None:
        super().step()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["expressions"] = (f"ab,{index}", ["c"], "d")


class Soap(torch.optim.AdamW):
    def __init__(self, params: Any, precondition_frequency: int, **settings: Any) -> None:
        self.every = precondition_frequency
        super().__init__(params, **settings)


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package: Any = ModuleType("pytorch_optimizer")
    package.SOAP, package.Kron = Soap, Kron
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", package)
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: True)
    return iter(())


@pytest.mark.usefixtures("_stand_ins")
def test_soap_gets_its_settings_and_spares_biases() -> None:
    _, optimizer = built("soap@20", weight_decay=0.5, lr=0.1, momentum=0.8)
    assert isinstance(optimizer, Soap)
    assert optimizer.every == 20
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}


@pytest.mark.usefixtures("_stand_ins")
def test_psgd_loads_a_state_with_strings() -> None:
    model, optimizer = built("psgd", weight_decay=0.5)
    assert isinstance(optimizer, Kron)
    assert optimizer.weight_decouple
    reconstruction_loss(model(IMAGES), IMAGES).backward()
    optimizer.step()
    _, other = built("psgd", weight_decay=0.5)
    other.load_state_dict(optimizer.state_dict())
    saved, loaded = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert [state["expressions"] for state in loaded.values()] == [
        state["expressions"] for state in saved.values()
    ]
    assert torch.equal(loaded[0]["momentum_buffer"], saved[0]["momentum_buffer"])


@pytest.mark.parametrize("name", OPTIONAL)
def test_the_real_packages_work(name: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    pytest.importorskip("opt_einsum")
    model = trained(name)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_together_loads_its_own_state() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    parts = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in parameters]
    optimizer = CombinedOptimizer(*parts)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step()  # momentum 0.9 + 1, in the first alone
    assert torch.allclose(parameters[0], torch.tensor(1 - 0.1 - 0.19))
    assert torch.allclose(parameters[1], torch.tensor(1 - 0.1))
