"""Every architecture of the zoo: all parameters are trained, steps are right, the loss decreases."""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BACKPROP_VARIANTS
from promises.zoo.catalogue import ZOO, Batch, Case, images, tell_apart
from promises.zoo.models import Discriminator, Generator
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.recording import row_gradients

pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer 'functional' has a gradient, but its forward was not called"
)

LR, GAMMA, FALLBACK_LR = 0.01, 3.0, 0.1


def make(case: Case) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = case.model().double()
    return model, tuple(t.double() if t.is_floating_point() else t for t in case.batch())


def loco(model: nn.Module, case: Case, **options: Any) -> LocoProp:
    """Return an optimizer with one plain local iteration, and other settings as given."""
    given: dict[str, Any] = {"lr": LR, "gamma": GAMMA, "solver": "sgd", "local_steps": 1}
    given["fallback"] = lambda params: torch.optim.SGD(params, lr=FALLBACK_LR)
    return LocoProp(model, loss_fn=case.loss_fn, **{**given, **options})


def backward(model: nn.Module, case: Case, batch: Batch) -> float:
    torch.manual_seed(1)  # of dropout and noise
    loss = case.loss(model, batch)
    loss.backward()
    return loss.item()


def parameters_of(opt: LocoProp, fallback: bool) -> list[nn.Parameter]:
    return [p for g in opt.param_groups if g["fallback"] is fallback for p in g["params"]]


def summary_rows(opt: LocoProp) -> dict[str, list[str]]:
    """Return transfer, variant or optimizer, and note of each module."""
    lines = opt.summary().split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"\s{2,}", line) for line in lines]
    return {row[0]: [*row[3:], ""][:3] for row in cells}


def expected_row(case: Case, name: str) -> list[str]:
    (entry,) = {case.rows[p] for p in case.rows if fnmatchcase(name, p)} or {"no pattern"}
    how, _, reason = entry.partition(": ")
    if how == "fallback":
        return ["–", "SGD", reason]
    return {"S": ["none", "locoprop-s", reason], "?": ["?", "locoprop-m", reason]}.get(
        how, [how, "locoprop-m", ""]
    )


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_accounted_for(name: str) -> None:
    """Each parameter is in one group, and each module has the expected row of the summary."""
    case = ZOO[name]
    model, batch = make(case)
    opt = loco(model, case)
    backward(model, case, batch)
    opt.step()
    trained = parameters_of(opt, False) + parameters_of(opt, True)
    assert len(trained) == len(set(trained))
    assert set(trained) == set(model.parameters())
    modules = {n or "(model)": m for n, m in model.named_modules()}
    owners = {
        n: m for n, m in modules.items() if next(m.parameters(recurse=False), None) is not None
    }
    rows = summary_rows(opt)
    assert rows.keys() == owners.keys()
    for module, row in rows.items():
        frozen = not any(p.requires_grad for p in owners[module].parameters(recurse=False))
        assert (row[2] == "frozen") is frozen
        if not frozen:
            assert row == expected_row(case, module), module


@pytest.mark.parametrize("variant", BACKPROP_VARIANTS)
@pytest.mark.parametrize("name", ZOO)
def test_one_local_step_is_backprop(name: str, variant: str) -> None:
    case = ZOO[name]
    model, batch = make(case)
    plain = copy.deepcopy(model)
    opt = loco(model, case, variant=variant)
    for _ in range(2):
        backward(model, case, batch)
        opt.step()
        opt.zero_grad()
    served = {n for n, p in model.named_parameters() if p in set(parameters_of(opt, False))}
    for _ in range(2):
        backward(plain, case, batch)
        for n, p in plain.named_parameters():
            if p.grad is not None:
                p.data -= (LR * GAMMA if n in served else FALLBACK_LR) * p.grad
        plain.zero_grad()
    for (n, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            p, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ZOO)
def test_what_was_recorded_is_the_whole_layer(name: str) -> None:
    """X Wᵀ + b is the layer's output in all its calls, and gᵀX is autograd's gradient."""
    case = ZOO[name]
    model, batch = make(case)
    opt = loco(model, case)
    layers = [layer for layer in opt._layers if layer.trained]
    returned: dict[nn.Module, list[Tensor]] = {layer.module: [] for layer in layers}
    for layer in layers:
        layer.needs = frozenset({"g"})
        layer.use_of_rows = None  # and the rows
        layer.module.register_forward_hook(
            lambda m, _, out: returned[m].append(out.detach().clone())
        )
    backward(model, case, batch)
    for layer in layers:
        if layer.name in (*case.silent, "functional"):
            assert not layer.calls
            continue
        kind, x, g = layer.kind, layer.inputs(), row_gradients.gradients(layer)
        tensors = {n: kind.matrix(n, p.detach()) for n, p in layer.tensors.items()}
        rows = torch.cat([kind.rows(out) for out in returned[layer.module]], -2)
        found = kind.linear_map.forward(x, **tensors)
        torch.testing.assert_close(found.sort(-2)[0], rows.sort(-2)[0], rtol=1e-10, atol=1e-12)
        assert g is not None
        gradients = kind.linear_map.weight_grad(x, g)
        for n, p in layer.tensors.items():
            gradient = kind.restored(n, gradients[n], p)
            torch.testing.assert_close(gradient, p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_layers_outside_the_loss_stay(name: str) -> None:
    case = ZOO[name]
    model, batch = make(case)
    opt = loco(model, case, solver="rmsprop", local_steps=3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    backward(model, case, batch)
    opt.step()
    for n, p in model.named_parameters():
        outside = n.rpartition(".")[0] in case.silent or not p.requires_grad
        assert torch.equal(p, before[n]) is outside, n


METHODS: dict[str, dict[str, Any]] = {
    "locoprop-s": {"variant": "locoprop-s"},
    "locoprop-m": {"variant": "locoprop-m"},
    "under AdamW": {
        "apply": "gradient",
        "outer": lambda params: torch.optim.AdamW(params, lr=2e-2),
    },
}
STEPS = 24


def train(case: Case, opt: Any, model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Return the loss before and after STEPS steps on one batch."""
    losses = []
    for _ in range(STEPS + 1):
        losses.append(backward(model, case, batch))
        opt.step()
        opt.zero_grad()
    return losses[0], losses[-1]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@cache
def loss_by_the_fallback_alone(name: str) -> float:
    """Return the loss if AdamW trains only the parameters without a local problem."""
    model, batch = make(ZOO[name])
    params = parameters_of(loco(model, ZOO[name]), True)
    if not params:
        return float("inf")
    return train(ZOO[name], adamw(params), model, batch)[1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
def test_the_loss_falls(name: str, method: str) -> None:
    """The loss decreases, further than the fallback alone achieves."""
    case = ZOO[name]
    model, batch = make(case)
    given = {"lr": 1e-3, "gamma": 10.0, "local_steps": 5, "solver": "rmsprop", "momentum": 0.9}
    opt = loco(model, case, fallback=adamw, **given, **METHODS[method])
    start, end = train(case, opt, model, batch)
    assert end < 0.9 * start
    assert end < loss_by_the_fallback_alone(name)
    assert not any(opt.skipped_updates.values())


# A pair of networks that train each other -----------------------------------------------------


REAL = 0.2 * images()[0].double()


def play(pair: tuple[nn.Module, nn.Module], opts: tuple[Any, Any], rounds: int) -> list[int]:
    """Train a GAN; return the rows that the discriminator's head records before each of its steps."""
    generator, discriminator = pair
    rows = []
    for _ in range(rounds):
        fake = generator(torch.randn(16, 4, dtype=torch.float64))
        opts[1].zero_grad()  # of what the generator's loss left there
        tell_apart(discriminator, (REAL, fake.detach())).backward()
        if isinstance(opts[1], LocoProp):
            head = opts[1]._layers[-1]
            rows.append(head.row_count)
        opts[1].step()
        opts[0].zero_grad()
        verdict = discriminator(fake)
        F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)).backward()
        opts[0].step()
    return rows


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Generator().double(), Discriminator().double()


def test_a_gan_pair_under_one_local_step_is_sgd() -> None:
    """The generator's backward pass through the discriminator is not part of its problem."""
    nets, plain = pair(), pair()
    rate = LR * GAMMA
    options: dict[str, Any] = {"fallback": lambda params: torch.optim.SGD(params, lr=rate)}
    opts = (
        loco(nets[0], ZOO["GAN generator"], **options),
        loco(nets[1], ZOO["GAN discriminator"], **options),
    )
    torch.manual_seed(1)
    assert play(nets, opts, 3) == [32, 32, 32]
    torch.manual_seed(1)
    play(plain, tuple(torch.optim.SGD(net.parameters(), lr=rate) for net in plain), 3)
    for one, other in zip(nets, plain, strict=True):
        for p, expected in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_a_gan_pair_trains(variant: str) -> None:
    """After some rounds the generated images are nearly as dark as the real ones."""
    nets = pair()
    z = torch.randn(64, 4, dtype=torch.float64)
    assert nets[0](z).mean() > 0.4
    given = {"solver": "rmsprop", "lr": 1e-2, "gamma": 10.0, "local_steps": 5, "momentum": 0.5}
    opts = tuple(
        loco(net, ZOO[name], variant=variant, fallback=adamw, **given)
        for net, name in zip(nets, ("GAN generator", "GAN discriminator"), strict=True)
    )
    play(nets, opts, 80)
    assert nets[0](z).mean() < 0.2
