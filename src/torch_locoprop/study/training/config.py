"""The configuration of a run: the task, the method with all its settings, and the seed.

Two runs with equal configurations on equal data and the same machine have bit-identical results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.config.setting_kinds import check_number
from torch_locoprop.paper.names import unknown
from torch_locoprop.study import methods
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training import schedules

PRECISIONS = ("fp32", "tf32", "bf16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run; the defaults are the protocol of the paper.

    Args:
        method: A name of :mod:`~torch_locoprop.study.methods`.
        settings: Settings of the method that differ from its defaults. The configuration adds the
            others.
        dataset: A name of :mod:`~torch_locoprop.study.data.datasets`, or of your own data.
        model: ``standard``, ``deep``, ``wide``, or widths from the input to the code: ``784-64-16``.
        transfer: The transfer function between layers: ``tanh``, ``relu``, ...
        epochs: Passes over the training images.
        batch_size: Images per step.
        warmup_epochs: Epochs of increasing learning rate, at most half of all epochs.
        weight_decay: Decoupled weight decay of weights, the same for every method.
        seed: The seed of the initial weights and of the order of images.
        schedule: ``paper`` (constant within an epoch) or ``linear`` (changes with every step).
        precision: The precision of matrix products: ``fp32``; on a GPU also ``tf32``, or ``bf16``,
            which is ``tf32`` with LocoProp's local products in bfloat16.
        device: ``cpu`` or ``cuda``; CUDA_VISIBLE_DEVICES selects the GPU.

    Raises:
        ValueError: If a value is invalid.
    """

    method: str = "locoprop-m"
    settings: dict[str, Any] = field(default_factory=dict)
    dataset: str = "curves"
    model: str = "standard"
    transfer: str = "tanh"
    epochs: int = 100
    batch_size: int = 1000
    warmup_epochs: int = 5
    weight_decay: float = 1e-5
    seed: int = 0
    schedule: str = "paper"
    precision: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("method", "dataset", "model", "transfer"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"Invalid {name}={getattr(self, name)!r}. Must be a string.")
        if not isinstance(self.settings, dict):
            raise ValueError(f"Invalid settings={self.settings!r}. Must be a dictionary.")
        method = methods.get(self.method)
        settings, transfer = (
            method.resolve(self.settings),
            architectures.transfer_between(self.transfer),
        )
        canonical = {"method": method.name, "settings": settings, "transfer": transfer.name}
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        architectures.sizes_of(self.model)
        for name, least in (("epochs", 1), ("batch_size", 1), ("warmup_epochs", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= {least}.")
        if self.seed >= 2**63:
            raise ValueError(f"Invalid seed={self.seed}. Must be below 2**63.")
        check_number("weight_decay", self.weight_decay, 0.0, True, float("inf"))
        if self.device not in DEVICES:
            raise ValueError(
                f"Unknown device {self.device!r}. Known: cpu, cuda; CUDA_VISIBLE_DEVICES selects the "
                "GPU."
            )
        choices = {"schedule": schedules.NAMES, "precision": PRECISIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(unknown(name, getattr(self, name), known))
        if self.precision != "fp32" and self.device != "cuda":
            raise ValueError(
                f"precision={self.precision!r} needs a GPU. Use device='cuda' or precision='fp32'."
            )
        if self.precision == "bf16" and "local_steps" not in settings:
            raise ValueError(
                f"precision='bf16' applies to local problems, and {method.name} has none. Use "
                "precision='tf32'."
            )

    @property
    def local_products(self) -> str:
        """LocoProp's setting ``local_products`` for this precision."""
        return "bf16" if self.precision == "bf16" else "full"

    def build_model(self) -> nn.Sequential:
        """Return the untrained model on the CPU."""
        return architectures.build(self.model, self.transfer, self.seed)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the method with all settings."""
        optimizer = methods.get(self.method).build(model, self._with_weight_decay)
        for group in optimizer.param_groups:
            if "local_products" in group:
                group["local_products"] = self.local_products
        return optimizer

    def check_settings(self) -> None:
        """Raise if the method refuses a setting or needs a missing package."""
        methods.get(self.method).check(self._with_weight_decay)

    def rate(self, images: int) -> schedules.Rate:
        """Return the learning-rate schedule for this number of training images."""
        return schedules.rate(
            self.schedule,
            epochs=self.epochs,
            warmup_epochs=self.warmup_epochs,
            steps=math.ceil(images / self.batch_size),
        )

    @property
    def _with_weight_decay(self) -> dict[str, Any]:
        return {**self.settings, "weight_decay": self.weight_decay}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with these fields and the defaults of the others.

        Raises:
            ValueError: If a field is unknown or a value is invalid.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(unknown("field of a configuration", name, known))
        return cls(**values)

    def name(self, fingerprint: str) -> str:
        """Return a short name that is unique to this configuration and these data.

        Args:
            fingerprint: The fingerprint of the data set.
        """
        whole = json.dumps({**self.to_dict(), "data": fingerprint}, sort_keys=True)
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        return f"{self.dataset}-{self.model}-{self.method}-{digest}"
