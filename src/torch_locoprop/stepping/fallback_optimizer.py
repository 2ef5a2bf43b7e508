"""Parameters with no local problem: an ordinary optimizer trains them inside ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torch_locoprop.recording.layer_record import LayerRecord

FallbackFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class WithFallback(torch.optim.Optimizer):
    """An optimizer of layers that hands what it cannot serve to another one.

    The fallback's groups stand among our own, marked, and both share one state, so schedulers,
    ``zero_grad`` and state dicts see all parameters.
    """

    _fallback: torch.optim.Optimizer | None

    def _add_to_fallback(self, params: list[nn.Parameter], factory: FallbackFactory | None) -> None:
        """Let the fallback, made now if there is none, train these too."""
        if not params:
            return
        if self._fallback is not None:
            self._fallback.add_param_group({"params": params})
        else:
            self._fallback = make_fallback(factory, params)
            self.state.update(self._fallback.state)
        for group in self._fallback.param_groups:
            if not any(group is own for own in self.param_groups):
                group["fallback"] = True
                self.param_groups.append(group)
        self._link_fallback()

    def _link_fallback(self) -> None:
        """Share groups and state again, after either was replaced."""
        if self._fallback is not None:
            self._fallback.param_groups = [g for g in self.param_groups if g["fallback"]]
            self._fallback.state = self.state

    def _step_fallback(self) -> None:
        if self._fallback is not None:
            move_state(self._fallback)
            self._fallback.step()

    def _local_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["fallback"]]


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's state to the device the model was moved to, in a precision of its own."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                # Steps are counted on the host.
                if torch.is_tensor(value) and value.device != parameter.device and name != "step":
                    state[name] = value.to(parameter.device)


def check_recorded(layers: Iterable[LayerRecord]) -> None:
    """Raise if no backward pass has gone through any of the layers with a gradient."""
    if not any(layer.calls or layer.obstacle for layer in layers):
        raise RuntimeError(
            "No layer recorded a backward pass since the last step, so there is nothing to do. "
            "Call loss.backward() before step() and zero_grad() after it, and compute the loss "
            "with the model this optimizer was made for, with gradients enabled. If that model was "
            "compiled and called before the optimizer was made, call torch.compiler.reset(): what "
            "is compiled already knows no hooks. If another model of its class is compiled too, set "
            "torch._dynamo.config.skip_nnmodule_hook_guards = False: the compiler does not tell one "
            "with hooks from one without. Compiled autograd runs none either: turn it off. The "
            "replicas of nn.DataParallel are not seen: use DistributedDataParallel."
        )


def make_fallback(
    factory: FallbackFactory | None, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of parameters with no local problem: the user's, or AdamW and a warning."""
    if factory is None:
        warnings.warn(
            f"{len(params)} parameters have no local problem and get AdamW(lr=1e-3). Choose for "
            "yourself with fallback=; print(opt.summary()) names them.",
            stacklevel=4,
        )
        return torch.optim.AdamW(params, lr=1e-3)
    if not callable(factory):
        raise TypeError(
            f"fallback= must be a function of the parameters that have no local problem, not "
            f"{type(factory).__name__}: fallback=lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    fallback = factory(params)
    if isinstance(fallback, torch.optim.LBFGS):
        raise TypeError("LBFGS needs a closure of its own and cannot be the fallback.")
    if not isinstance(fallback, torch.optim.Optimizer):
        raise TypeError(
            f"fallback= must return a torch.optim.Optimizer, not {type(fallback).__name__}."
        )
    if {p for group in fallback.param_groups for p in group["params"]} != set(params):
        raise ValueError("fallback= must make an optimizer of exactly the parameters it is given.")
    return fallback
