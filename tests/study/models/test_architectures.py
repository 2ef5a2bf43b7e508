"""Models by name: the shapes of the paper, any transfer, weights that depend on the seed alone."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.paper import transfers
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import deep_autoencoder, reconstruction_loss


def linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("name", "hidden", "weights"),
    [
        ("standard", [1000, 500, 250, 30, 250, 500, 1000], 2_837_314),
        ("deep", [1000, *8 * [500], 250, 30, 250, *8 * [500], 1000], 6_344_314),
        ("wide", [4000, 2000, 1000, 120, 1000, 2000, 4000], 26_526_904),
    ],
)
def test_presets_are_the_papers(name: str, hidden: list[int], weights: int) -> None:
    with torch.device("meta"):
        model = deep_autoencoder(architectures.sizes_of(name))
    assert [layer.out_features for layer in linear(model)] == [*hidden, 784]
    widths = [784, *hidden, 784]
    expected = sum((n + 1) * d for n, d in pairwise(widths))
    assert sum(p.numel() for p in model.parameters()) == expected == weights


def test_widths_may_be_given() -> None:
    assert architectures.sizes_of("784-64-16") == (784, 64, 16)
    shapes = [tuple(layer.weight.shape) for layer in linear(architectures.build("12-8-3"))]
    assert shapes == [(8, 12), (3, 8), (8, 3), (12, 8)]


@pytest.mark.parametrize("name", ["", "standart", "784", "784-", "784-0-3", "784-a-3", "784--3"])
def test_other_names_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"Invalid model=.*standard, deep, wide.*784-64-16"):
        architectures.sizes_of(name)


@pytest.mark.parametrize("name", architectures.SUITABLE)
def test_every_transfer_stands_between_the_layers_and_is_found_by_locoprop(name: str) -> None:
    model = architectures.build("12-8-6-3", name, seed=1)
    images = torch.rand(20, 12)
    f = transfers.get(name).f
    first, second, code, *rest = linear(model)
    h = code(f(second(f(first(images)))))
    for layer in rest[:-1]:
        h = f(layer(h))
    torch.testing.assert_close(model(images), rest[-1](h))
    optimizer = LocoProp(model, output_transfer="sigmoid")
    reconstruction_loss(model(images), images).backward()
    optimizer.step()
    table = optimizer.summary().partition("\n\n")[0]
    rows = [line for line in table.splitlines() if "coder." in line]
    found = [next(word for word in row.split() if word in transfers.NAMES) for row in rows]
    assert found == [name, name, "linear", name, name, "sigmoid"]


@pytest.mark.parametrize("name", ["softmax", "step", "gelu", "nonsense"])
def test_transfers_that_make_no_sense_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid transfer='{name}'"):
        architectures.build("12-8-3", name)


def test_a_seed_gives_the_same_weights_for_every_transfer() -> None:
    tanh, arctan = (
        architectures.build("12-8-3", "tanh", seed=3),
        architectures.build("12-8-3", "Arctan", seed=3),
    )
    for one, other in zip(tanh.parameters(), arctan.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "arctan" in repr(arctan)
    another = architectures.build("12-8-3", "tanh", seed=4)
    assert not torch.equal(linear(tanh)[0].weight, linear(another)[0].weight)
