"""The methods that the comparisons train with: AdamW, Muon, SOAP, the spectral step, LocoProp-S.

Each `by_...` method makes the optimizer of a model whose inner layers are in `model.blocks`. Layers
outside of it (embeddings, the first and the last layer) and all norms and biases are trained by AdamW.
Weights decay by the same fraction in every method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon import adamw, decayed, muon_and_adamw
from torch import nn
from torch.optim import AdamW, Optimizer
from training import Settings

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact
from torch_locoprop.study.methods.combined_optimizer import CombinedOptimizer

SHRINK = 1e-4  # fraction by which weights decay in a step at the full learning rate
BETAS = (0.9, 0.99)  # of AdamW
INNER = ["blocks.*"]  # names of the layers that have local problems, and that Muon trains


@dataclass(frozen=True)
class Optimizers:
    """Makers of optimizers for one kind of model.

    Args:
        layers: the layers with local problems, as patterns of names, for each value of the setting
            `layers`. None: all layers.
        max_rows: the most rows that LocoProp keeps for each call of a layer. None: all rows.
        other_lr: learning rate of AdamW beside Muon, SOAP and the spectral step, for the parameters
            that these do not train. None: their own.
    """

    layers: Mapping[str, Sequence[str] | None]
    max_rows: int | None = None
    other_lr: float | None = None

    def by_adamw(self, model: nn.Module, settings: Settings) -> Optimizer:
        return adamw(model.parameters(), settings["lr"], SHRINK, BETAS)

    def by_muon(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make Muon for the weights of the inner layers, and AdamW for all other parameters."""
        matrices = [layer.weight for layer in inner_layers(model)]
        return muon_and_adamw(model.parameters(), matrices, settings, SHRINK, BETAS, self.other_lr)

    def by_soap(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make SOAP for all parameters; it treats vectors, such as biases, as Adam does."""
        lr = settings["lr"]
        params = decayed(model.parameters(), SHRINK / lr)
        return plain_soap()(params, lr=lr, betas=(settings["momentum"], 0.95), every=10)

    def by_soap_and_adamw(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make SOAP for the weights of the inner layers, and AdamW for all other parameters."""
        lr = settings["lr"]
        matrices = [layer.weight for layer in inner_layers(model)]
        inside = set(matrices)
        soap = plain_soap()(
            matrices, lr=lr, betas=(settings["momentum"], 0.95), weight_decay=SHRINK / lr, every=10
        )
        rest = [p for p in model.parameters() if p not in inside]
        return CombinedOptimizer(soap, self._other(lr)(rest))

    def by_default(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make LocoProp with its default settings, with AdamW for the other parameters."""
        lr = settings["lr"]
        return LocoProp(
            model,
            lr=lr,
            weight_decay=SHRINK / lr,
            max_rows=self.max_rows,
            layers=INNER,
            fallback=self._other(lr),
        )

    def by_spectral(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make the preset "spectral", with AdamW for the other parameters."""
        lr = settings["lr"]
        return LocoProp(
            model,
            preset="spectral",
            lr=lr,
            momentum=settings["momentum"],
            weight_decay=SHRINK / lr,
            max_rows=self.max_rows,
            layers=self.layers[settings["layers"]],
            fallback=self._other(lr),
        )

    def by_exact_muon(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make LocoProp-S in closed form, `G (XᵀX + λI)⁻¹`, as the gradient that Muon gets."""
        return LocoProp(
            model,
            lr=settings["lr"],
            variant="locoprop-s",
            gamma=1.0,
            # XᵀX of one batch is enough: LocoProp keeps input rows in one step of twenty only.
            solver=Exact(every=20, damping=settings["damping"]),
            local_reduction="mean",
            max_rows=self.max_rows,
            layers=self.layers[settings["layers"]],
            apply="gradient",
            outer=self.by_muon(model, settings),
        )

    def by_local_steps_adamw(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make LocoProp-S with five plain iterations, as the gradient that AdamW gets.

        The iterations converge for `lr < 2 / λ`, where λ is the largest eigenvalue of XᵀX / rows. λ is
        below the trace of that matrix: the number of inputs times their mean square. So each layer's
        learning rate is the setting `reach` over its number of inputs.
        """
        groups, inside = [], set()
        for layer in inner_layers(model):
            own = list(layer.parameters())
            groups.append({"params": own, "lr": settings["reach"] / layer.weight[0].numel()})
            inside.update(own)
        rest = [p for p in model.parameters() if p not in inside]
        lr = settings["lr"]
        return LocoProp(
            model,
            param_groups=[*groups, {"params": rest}],
            variant="locoprop-s",
            gamma=1.0,
            solver="sgd",
            local_steps=5,
            local_decay="constant",
            local_reduction="mean",
            max_rows=self.max_rows,
            layers=INNER,
            apply="gradient",
            outer=lambda params: adamw(params, lr, SHRINK, BETAS),
            fallback=lambda params: adamw(params, lr, SHRINK, BETAS),
        )

    def by_locoprop(self, model: nn.Module, settings: Settings) -> Optimizer:
        """Make LocoProp-S as in the paper: RMSProp, whose solution replaces the weights."""
        lr = settings["lr"]
        return LocoProp(
            model,
            lr=lr,
            variant="locoprop-s",
            gamma=settings["gamma"],
            local_steps=5,
            solver="rmsprop",
            momentum=0.9,
            decay=0.9,
            eps=1e-8,
            weight_decay=SHRINK / lr,
            local_reduction="mean",
            max_rows=self.max_rows,
            layers=INNER,
            fallback=lambda params: adamw(params, settings["fallback_lr"], SHRINK, BETAS),
        )

    def _other(self, lr: float) -> Callable[[Iterable[nn.Parameter]], AdamW]:
        """Return a maker of AdamW for the parameters that a method with this rate does not train."""
        return lambda params: adamw(params, self.other_lr or lr, SHRINK, BETAS)


def plain_soap() -> Callable[..., Optimizer]:
    """Return the SOAP of `benchmarks`, which needs no package and takes the same steps as one."""
    root = str(Path(__file__).resolve().parents[1])
    if root not in sys.path:  # a script in this folder has this folder alone
        sys.path.append(root)
    from benchmarks.plain_soap import SOAP

    return SOAP


def inner_layers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the linear layers and convolutions of `model.blocks`."""
    modules = model.get_submodule("blocks").modules()
    return [module for module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
