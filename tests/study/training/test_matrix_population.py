"""Members of a population have the losses of the study's own runs."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_population import train_together
from torch_locoprop.study.training.matrix_updates import Soap
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.training.update import Passes

PEERS = importlib.util.find_spec("pytorch_optimizer") is not None

SETTINGS = {
    "muon": [{}, {"lr": 1e-2, "momentum": 0.8}],
    "exact-s-muon@3": [{"damping": 1.0}, {"lr": 3e-2, "damping": 0.3, "decay": 0.8}],
    "locoprop-spectral@3": [
        {},
        {"lr": 3e-2, "momentum": 0.7, "damping": 0.3, "decay": 0.8, "fall": 2.0, "averaging": 0.5},
        {"bias_rate": 1.0},
    ],
    "shampoo@3": [{"early": 5}, {"lr": 3e-3, "eps": 1e-3, "decay": 0.8, "early": 5}],
    "kfac@25": [{}, {"lr": 0.1, "clip": 1.0, "damping": 0.1, "decay": 0.8}],
}


def data() -> Dataset:
    numbers = torch.Generator().manual_seed(7)
    draw = torch.rand(50, 12, generator=numbers)
    return Dataset("curves", draw[:40], draw[40:], "made for tests")


def config(method: str, settings: dict[str, float], seed: int = 0, epochs: int = 10) -> RunConfig:
    return RunConfig(method, settings, model="12-8-3", batch_size=15, epochs=epochs, seed=seed)


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_a_member_has_the_losses_of_a_run_alone(
    method: str, seeds: tuple[int, int], tmp_path: Path
) -> None:
    configs = [config(method, *each) for each in zip(SETTINGS[method], (*seeds, 0), strict=False)]
    for number, (own, found) in enumerate(
        zip(configs, train_together(configs, data()), strict=True)
    ):
        alone = run(own, tmp_path / str(number), data=data()).metrics
        for name in ("train_loss", "test_loss"):
            expected = [getattr(row, name) for row in alone]
            assert expected[-1] < 0.995 * expected[0]
            assert [getattr(row, name) for row in found] == pytest.approx(expected, rel=3e-4)


def test_layers_large_enough_for_bfloat16_have_the_precision_of_a_run_alone(tmp_path: Path) -> None:
    draw = torch.rand(40, 160, generator=torch.Generator().manual_seed(7))
    images = Dataset("curves", draw[:30], draw[30:], "made for tests")
    given = RunConfig("locoprop-spectral", {"lr": 0.1}, model="160-140-3", batch_size=15, epochs=4)
    (together,) = train_together([given], images)
    alone = run(given, tmp_path, data=images).metrics
    expected = [row.train_loss for row in alone]
    assert expected[-1] < 0.99 * expected[0]
    assert [row.train_loss for row in together] == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(not PEERS, reason="pytorch_optimizer is not installed")
@pytest.mark.parametrize(("d", "n"), [(6, 6), (4, 6), (6, 4), (3, 8)])
def test_soap_is_that_of_its_package(d: int, n: int) -> None:
    """The basis of vanishing eigenvalues is arbitrary: equal statistics to the bit make it equal.

    They are so if the first gradient has whole numbers and the average is over powers of two.
    """
    torch.manual_seed(0)
    shared = {"weight_decay": 0.01, "every": 3}
    settings = [
        {"lr": 1e-2, "momentum": 0.9, "decay": 0.5, "eps": 1e-8, **shared},
        {"lr": 3e-2, "momentum": 0.8, "decay": 0.5, "eps": 1e-3, **shared},
    ]
    models = [nn.Linear(n, d) for _ in settings]
    layer = {
        "weight": torch.stack([model.weight.detach().clone() for model in models]),
        "bias": torch.stack([model.bias.detach().clone() for model in models]),
    }
    numbers = {name: torch.tensor([own[name] for own in settings]) for name in settings[0]}
    together = Soap(numbers, every=3, layers=1)
    alone = [
        methods.get("soap").build(model, own) for model, own in zip(models, settings, strict=True)
    ]
    for step in range(20):
        gradients = {"weight": torch.randn(2, d, n), "bias": torch.randn(2, d)}
        if step == 0:
            gradients = {name: (4 * gradient).round() for name, gradient in gradients.items()}
        together.step([layer], Passes([], [gradients], list), 1.0)
        for k, (model, optimizer) in enumerate(zip(models, alone, strict=True)):
            model.weight.grad = gradients["weight"][k].clone()
            model.bias.grad = gradients["bias"][k].clone()
            optimizer.step()
    for k, model in enumerate(models):
        torch.testing.assert_close(layer["weight"][k], model.weight.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(layer["bias"][k], model.bias.detach(), rtol=0, atol=1e-6)


def test_a_member_that_diverges_or_is_stopped_leaves_the_others_alone() -> None:
    configs = [config("muon", {"lr": lr}) for lr in (1e-2, 1e6, 1e-2)]

    def stop(rows: Mapping[int, Metrics]) -> list[int]:
        return [place for place, row in rows.items() if place == 2 and row.epoch == 3]

    first, second, third = train_together(configs, data(), stop)
    (alone,) = train_together(configs[:1], data())
    assert [row.train_loss for row in first] == pytest.approx([row.train_loss for row in alone])
    assert second[-1].diverged
    assert len(second) < len(first) == 11
    assert [row.train_loss for row in third] == pytest.approx([row.train_loss for row in alone[:4]])


def test_configurations_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="cannot be trained together"):
        train_together([config("muon", {}), config("muon", {}, epochs=3)], data())
    with pytest.raises(ValueError, match="Unknown method 'adam'"):
        train_together([config("adam", {})], data())
