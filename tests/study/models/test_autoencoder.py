"""The shape, initial weights and loss of the autoencoder."""

import math

import pytest
import torch
from torch import Generator, nn

from torch_locoprop import LocoProp
from torch_locoprop.study.models.autoencoder import deep_autoencoder, entropy, reconstruction_loss


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_standard_model_has_the_size_the_paper_names() -> None:
    model = deep_autoencoder((784, 1000, 500, 250, 30))
    widths = [layer.out_features for layer in linear_layers(model)]
    assert widths == [1000, 500, 250, 30, 250, 500, 1000, 784]
    assert 2.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 2.9e6


@pytest.mark.parametrize("transfer", [nn.Tanh, nn.ReLU])
def test_all_layers_but_code_and_output_have_the_transfer(transfer: type[nn.Module]) -> None:
    model = deep_autoencoder((8, 6, 4, 2), transfer=transfer)
    sequence = [module for half in model for module in half]
    kinds = [type(module) for module in sequence]
    half = [nn.Linear, transfer, nn.Linear, transfer, nn.Linear]
    assert kinds == half + half


def test_the_start_is_glorot_uniform_with_uniform_biases() -> None:
    model = deep_autoencoder((400, 300, 200), generator=Generator().manual_seed(0))
    for layer in linear_layers(model):
        for tensor, bound in [
            (layer.weight, math.sqrt(6 / (layer.in_features + layer.out_features))),
            (layer.bias, math.sqrt(3 / layer.out_features)),
        ]:
            assert tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_the_generator_decides_the_start() -> None:
    first, second, third = (
        deep_autoencoder((8, 4, 2), generator=Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    for one, same, other in zip(
        first.parameters(), second.parameters(), third.parameters(), strict=True
    ):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_loss_sums_over_pixels_and_averages_over_the_batch() -> None:
    logits = torch.tensor([[0.3, -1.2, 2.0], [0.0, 0.7, -0.1]], dtype=torch.float64)
    images = torch.tensor([[0.0, 0.5, 1.0], [0.2, 1.0, 0.9]], dtype=torch.float64)
    expected = 0.0
    for row in range(2):
        for column in range(3):
            y, p = images[row, column].item(), 1 / (1 + math.exp(-logits[row, column].item()))
            expected -= (y * math.log(p) + (1 - y) * math.log(1 - p)) / 2
    assert reconstruction_loss(logits, images).item() == pytest.approx(expected)


def test_entropy_is_the_loss_of_a_perfect_reconstruction() -> None:
    images = torch.rand(5, 7, dtype=torch.float64) * 0.98 + 0.01
    assert entropy(images) == pytest.approx(reconstruction_loss(images.logit(), images).item())
    assert entropy(torch.tensor([[0.0, 1.0]])) == 0


def test_every_layer_has_its_local_problem() -> None:
    model = deep_autoencoder((8, 6, 4))
    optimizer = LocoProp(model, output_transfer="sigmoid")
    images = torch.rand(3, 8)
    reconstruction_loss(model(images), images).backward()
    optimizer.step()
    lines = optimizer.summary().partition("\n\n")[0].splitlines()
    found = [line for name in ("encoder", "decoder") for line in lines if f"{name}." in line]
    for line, transfer in zip(found, ("tanh", "linear", "tanh", "sigmoid"), strict=True):
        assert transfer in line
