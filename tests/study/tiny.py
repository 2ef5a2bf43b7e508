"""A task that takes a second: few small images and a small model, equal at every call."""

from typing import Any

import torch

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig


def data(images: int = 40, pixels: int = 12, dtype: torch.dtype = torch.float32) -> Dataset:
    numbers = torch.Generator().manual_seed(7)
    draw = torch.rand(images + 10, pixels, generator=numbers, dtype=torch.float32).to(dtype)
    return Dataset("curves", draw[:images], draw[images:], "made for tests")


def config(method: str = "locoprop-m", **values: Any) -> RunConfig:
    return RunConfig(method, **{"model": "12-8-3", "batch_size": 15, "epochs": 4, **values})
