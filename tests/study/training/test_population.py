"""A population trains its members as LocoProp trains each alone."""

from __future__ import annotations

import pytest
import torch
from cases import FIRST_ORDER, batch
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.paper import transfers
from torch_locoprop.paper.regularizers import L1, L2, FisherMahalanobis, Regularizer
from torch_locoprop.paper.tensors import spread
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import SOLVERS
from torch_locoprop.study.models.autoencoder import deep_autoencoder, reconstruction_loss
from torch_locoprop.study.training.population import GraphedPopulation, Method, Population

SIZES = (10, 8, 6, 3)
TANH, LINEAR = transfers.Tanh(), transfers.Linear()
TRANSFERS = (TANH, TANH, LINEAR, TANH, TANH, transfers.Sigmoid())
NUMBERS = [
    {"lr": 1e-3, "gamma": 2.0, "momentum": 0.9, "decay": 0.9, "eps": 1e-5, "weight_decay": 0.1},
    {"lr": 3e-3, "gamma": 1.0, "momentum": 0.5, "decay": 0.99, "eps": 1e-3},
]
IMAGES = batch(64, 10)


def model(seed: int) -> nn.Sequential:
    return deep_autoencoder(SIZES, generator=torch.Generator().manual_seed(seed)).double()


def alone(member: int, method: Method) -> float:
    """The loss after twelve steps of LocoProp itself, with a falling learning rate."""
    net, numbers = model(member), dict(NUMBERS[member])
    lr = numbers.pop("lr")
    opt = LocoProp(
        net,
        lr=lr,
        variant=method.variant,
        solver=method.solver,
        local_steps=method.local_steps,
        local_decay=method.local_decay,
        regularizer=method.regularizer,
        local_reduction=method.local_reduction,
        output_transfer="sigmoid",
        **numbers,
    )
    for step in range(12):
        opt.param_groups[0]["lr"] = lr * (1 - step / 20)
        x = IMAGES[(step % 4) * 16 : (step % 4 + 1) * 16]
        reconstruction_loss(net(x), x).backward()
        opt.step()
        opt.zero_grad()
    return reconstruction_loss(net(IMAGES), IMAGES).item()


def together(method: Method, numbers: list[dict[str, float]]) -> Population:
    population = Population([model(k) for k in range(len(numbers))], TRANSFERS, method, numbers)
    graphed = GraphedPopulation(population, IMAGES, rows=16)
    for step in range(12):
        graphed.step(torch.arange(16) + (step % 4) * 16, rate=1 - step / 20)
    return population


METHODS = [
    *((variant, solver, Regularizer()) for variant in VARIANTS for solver in FIRST_ORDER),
    *((variant, "exact", Regularizer()) for variant in ("locoprop-s", "locoprop-m", "proxprop")),
    ("locoprop-m", "rmsprop", L2()),
    ("locoprop-m", "sgd", L1(0.1)),
    ("locoprop-m", "rmsprop", FisherMahalanobis()),
]


@pytest.mark.parametrize(("variant", "solver", "regularizer"), METHODS)
def test_losses_equal_those_of_separate_runs(
    variant: str, solver: str, regularizer: Regularizer
) -> None:
    """A third member whose settings diverge does not change the others."""
    method = Method(VARIANTS[variant], SOLVERS[solver], 4, "linear", regularizer)
    wild = {"lr": 1e200, "gamma": 1e200, "momentum": 0.5, "decay": 0.9, "eps": 1e-5}
    population = together(method, [*NUMBERS, wild])
    losses = population.losses(IMAGES, rows=30)
    for member in range(2):
        assert losses[member].item() == pytest.approx(alone(member, method), rel=1e-11)
    assert population.skipped[:2].tolist() == [0, 0]
    assert len(population) == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mean_over_rows(variant: str) -> None:
    method = Method(VARIANTS[variant], SOLVERS["sgd"], local_steps=3, local_reduction="mean")
    losses = together(method, NUMBERS).losses(IMAGES)
    for member in range(2):
        assert losses[member].item() == pytest.approx(alone(member, method), rel=1e-11)


def test_the_wild_member_is_counted_and_stays_finite() -> None:
    wild = {"lr": 1e200, "gamma": 1e200}
    method = Method(VARIANTS["locoprop-s"], SOLVERS["sgd"], local_steps=3)
    population = together(method, [NUMBERS[0], wild])
    assert population.skipped[0] == 0
    assert population.skipped[1] > 0
    assert all(t.isfinite().all() for layer in population.layers for t in layer.values())


def test_each_member_may_have_rows_of_its_own() -> None:
    method = Method(local_steps=3)
    own = Population([model(0), model(1)], TRANSFERS, method, NUMBERS)
    own.step(torch.stack([IMAGES[:16], IMAGES[16:32]]))
    for member, rows in enumerate((IMAGES[:16], IMAGES[16:32])):
        single = Population([model(member)], TRANSFERS, method, [NUMBERS[member]])
        single.step(rows)
        torch.testing.assert_close(own.layers[0]["weight"][member], single.layers[0]["weight"][0])


@pytest.mark.parametrize("solver", ["adam", "rmsprop"])
def test_kept_members_go_on_as_if_nothing_had_been(solver: str) -> None:
    """Members keep their weights, states and numbers in any order; the step count is shared."""
    numbers = [*NUMBERS, {**NUMBERS[0], "lr": 5e-3}]
    method = Method(VARIANTS["locoprop-m"], SOLVERS[solver], local_steps=3)
    whole, part = (
        GraphedPopulation(
            Population([model(k) for k in range(3)], TRANSFERS, method, numbers), IMAGES, rows=16
        )
        for _ in range(2)
    )
    for step in range(8):
        if step == 4:
            part.keep([2, 0])
        for population in (whole, part):
            population.step(torch.arange(16) + (step % 4) * 16, rate=0.5)
    assert len(part.population) == 2
    expected = whole.population.losses(IMAGES)[[2, 0]]
    torch.testing.assert_close(part.population.losses(IMAGES), expected, rtol=1e-12, atol=0)
    assert part.population.skipped.tolist() == [0, 0]


@pytest.mark.parametrize("members", [[], [0, 0], [2], [-1]])
def test_only_members_can_be_kept(members: list[int]) -> None:
    population = Population([model(0), model(1)], TRANSFERS, Method(), NUMBERS)
    with pytest.raises(ValueError, match=r"Must be different ones of 0..1"):
        population.keep(members)


@pytest.mark.parametrize(
    ("models", "behind", "numbers", "message"),
    [
        (0, TRANSFERS, [], "0 models"),
        (1, TRANSFERS, NUMBERS, "1 models and 2 settings"),
        (2, TRANSFERS[1:], NUMBERS, "6 layers and 5 transfers"),
        (2, (*TRANSFERS[:-1], TANH), NUMBERS, "last transfer must be sigmoid"),
    ],
)
def test_bad_populations(
    models: int,
    behind: tuple[transfers.Transfer, ...],
    numbers: list[dict[str, float]],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Population([model(k) for k in range(models)], behind, Method(), numbers)


def test_spread() -> None:
    numbers = torch.arange(3.0)
    assert spread(2.0, torch.ones(3, 4)) == 2.0
    assert spread(numbers, torch.ones(3, 4, 5)).shape == (3, 1, 1)
    assert spread(numbers, torch.ones(3, 4)).shape == (3, 1)
    assert spread(torch.tensor(2.0), torch.ones(3, 4)).shape == ()
