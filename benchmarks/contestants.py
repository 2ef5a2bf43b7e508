"""The methods whose training step is timed, each with its preparation for a model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import work
from benchmarks.per_layer import PerLayerLoop, stages
from torch_locoprop.baselines import kfac
from torch_locoprop.study import methods
from torch_locoprop.study.methods import label
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss

Do = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """What is timed: a model of the study on random images.

    Args:
        model: name or widths of the autoencoder, as `architectures.sizes_of` takes it.
        batch: number of images.
        T: local iterations of LocoProp.
        device: `cpu` or `cuda`.
    """

    model: str
    batch: int = 1000
    T: int = 10
    device: str = "cpu"

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The numbers of inputs and outputs of every layer."""
        encoder = architectures.sizes_of(self.model)
        return list(pairwise((*encoder, *encoder[-2::-1])))

    def prepared(self) -> tuple[nn.Sequential, Tensor]:
        """Return the model and the images on the device."""
        numbers = torch.Generator().manual_seed(0)
        images = torch.rand(self.batch, self.layers[0][0], generator=numbers)
        return architectures.build(self.model).to(self.device), images.to(self.device)


@dataclass(frozen=True)
class Ready:
    """A training step that is ready to be timed.

    Args:
        update: the optimizer's part of the step, or the whole step.
        gradients: forward and backward pass; None if `update` is the whole step.
        optimizer: the optimizer, if it is a `torch.optim.Optimizer`.
        model: the model of that optimizer.
        images: the images it trains on.
    """

    update: Do
    gradients: Do | None = None
    optimizer: Optimizer | None = None
    model: nn.Module | None = None
    images: Tensor | None = None

    def step(self) -> None:
        if self.gradients is not None:
            self.gradients()
        self.update()


Prepare = Callable[[Task, nn.Sequential, Tensor], Ready]
Flop = Callable[[work.Layers, int, int], int]


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Args:
        name: name in the table.
        prepare: makes the step for a task, its model and its images.
        flop: operations of the matrix products of a step, from layers, batch and T; None: unknown.
        cycle: the method repeats expensive work, such as inverses, every `cycle` steps.
        warm_up: steps before the first timed one.
        gpu_only: the row makes sense on a GPU only.
    """

    name: str
    prepare: Prepare
    flop: Flop | None = None
    cycle: int = 1
    warm_up: int = 3
    gpu_only: bool = False


def _backprop_flop(layers: work.Layers, b: int, T: int) -> int:
    return work.backprop_flop(layers, b)


def _products(task: Task, model: nn.Sequential, images: Tensor) -> Ready:
    return Ready(work.Gemms(task.layers, task.batch, task.T, task.device))


def _with(make: Callable[[Task, nn.Module], Optimizer]) -> Prepare:
    """Return the preparation of a plain training loop with the optimizer that `make` returns."""

    def prepare(task: Task, model: nn.Sequential, images: Tensor) -> Ready:
        optimizer = make(task, model)

        def gradients() -> None:
            optimizer.zero_grad()
            reconstruction_loss(model(images), images).backward()

        return Ready(optimizer.step, gradients, optimizer, model, images)

    return prepare


def _method(name: str, **more: Any) -> Prepare:
    """Return the preparation of a method of the study; `more` overrides its settings."""

    def make(task: Task, model: nn.Module) -> Optimizer:
        method = methods.get(name)
        local = {"local_steps": task.T} if "local_steps" in method.settings else {}
        settings = {**method.settings, **local, "weight_decay": 1e-5, **more}
        return method.build(model, settings)

    return _with(make)


def _adamw(task: Task, model: nn.Module) -> Optimizer:
    gpu = task.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=gpu)
    optimizer.capturable = gpu  # type: ignore[attr-defined]  # read by TrainingStep
    return optimizer


def _per_layer(task: Task, model: nn.Sequential, images: Tensor) -> Ready:
    def solver(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.RMSprop(params, lr=1e-5, alpha=0.9, eps=1e-5, momentum=0.999)

    loop = PerLayerLoop(model, images, solver, local_steps=task.T)
    return Ready(loop.update, loop.backprop)


def _pypi(task: Task, model: nn.Sequential, images: Tensor) -> Ready:
    """Prepare the package `locoprop` of PyPI: its default settings, but T of the task.

    The package has a trainer instead of an optimizer.
    """
    try:
        package = import_module("locoprop")
    except ImportError:
        raise ImportError("Install it with pip install locoprop==0.1.0.") from None
    *inner, last = stages(model)
    layers = [package.LocoLayer(stage.linear, stage.local) for stage in inner]
    layers.append(package.LocoLayer(last.linear, last.local, implicit=True))
    trainer = package.LocopropTrainer(
        nn.Sequential(*layers), reconstruction_loss, local_iterations=task.T
    )
    return Ready(lambda: trainer.step(images, images))


FLOOR, BACKPROP = "products", "sgd"
"""The rows that the ratios of the table refer to: matrix products alone, and BackProp."""

CONTESTANTS = {
    FLOOR: Contestant("matrix products alone", _products, work.locoprop_flop),
    BACKPROP: Contestant("BackProp (SGD)", _method("sgd"), _backprop_flop),
    "locoprop-m": Contestant("LocoProp-M", _method("locoprop-m"), work.locoprop_flop),
    "locoprop-m-eager": Contestant(
        "LocoProp-M, cuda_graph=False",
        _method("locoprop-m", cuda_graph=False),
        work.locoprop_flop,
        gpu_only=True,
    ),
    "locoprop-m-bf16": Contestant(
        'LocoProp-M, local_products="bf16"',
        _method("locoprop-m", local_products="bf16"),
        work.locoprop_flop,
        gpu_only=True,
    ),
    "locoprop-s": Contestant("LocoProp-S", _method("locoprop-s"), work.gram_flop),
    # Each of its two kinds of steps runs three times before it is recorded.
    "locoprop-spectral": Contestant(
        "LocoProp spectral", _method("locoprop-spectral"), cycle=10, warm_up=50
    ),
    "per-layer": Contestant("torch.optim for each layer", _per_layer, work.locoprop_flop),
    "pypi": Contestant("locoprop 0.1.0 of PyPI", _pypi, work.locoprop_flop),
    "adamw": Contestant("AdamW, fused", _with(_adamw), _backprop_flop),
    "muon": Contestant("Muon", _method("muon")),
    "soap": Contestant("SOAP@10", _method("soap"), cycle=10, warm_up=11),
    "kfac@10": Contestant("K-FAC@10", _method("kfac@10"), cycle=10, warm_up=kfac.EARLY),
    "shampoo@100": Contestant("Shampoo@100", _method("shampoo@100"), cycle=100),
}


def get(key: str) -> Contestant:
    """Return the row of that key in `CONTESTANTS`, or of any other method of the study."""
    if key in CONTESTANTS:
        return CONTESTANTS[key]
    every = methods.get(key).settings.get("every", 1)
    return Contestant(label(key), _method(key), cycle=every, warm_up=max(kfac.EARLY, every))
