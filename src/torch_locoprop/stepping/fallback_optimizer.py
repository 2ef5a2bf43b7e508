"""The fallback: an ordinary optimizer inside ours, for the parameters without a local problem.

Which parameters these are is decided in ``recording/model_scan.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers import Solver, Spectral
from torch_locoprop.stepping.spectral_adamw import SpectralAdamW, hidden_matrices, matrix_group

# ε of the AdamW that is made if the user gives no fallback. It is far below usual gradients, so that
# the scale of the loss does not matter, and above the root of float32's smallest number, so that no
# step gets long where squares of gradients are rounded to zero.
_EPS = 1e-15

FallbackFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class WithFallback(torch.optim.Optimizer):
    """Base class of optimizers that leave parameters without a local problem to a fallback.

    ``param_groups`` includes the fallback's groups, with ``group["fallback"]`` True, and both
    optimizers share one ``state``. Schedulers, ``zero_grad`` and state dicts therefore cover all
    parameters.
    """

    _model: nn.Module
    _fallback: torch.optim.Optimizer | None
    # For the fallback that is made if the user gives none: the learning rate of AdamW, and the numbers
    # of the spectral step for matrices. None: AdamW trains the matrices too.
    _fallback_rate: float = 1e-3
    _fallback_maximizes: bool = False
    _matrix_group: Mapping[str, Any] | None = None

    def _plan_fallback(self, solver: Solver, settings: Mapping[str, Any]) -> None:
        """Set the numbers of a fallback that the user has not given, from those of the local problems.

        Args:
            solver: the solver of the local problems.
            settings: the settings of the local problems.
        """
        if solver.over_fallback is not None:
            self._fallback_rate = float(settings["lr"]) / solver.over_fallback
        self._fallback_maximizes = bool(settings["maximize"])
        if isinstance(solver, Spectral):
            self._matrix_group = matrix_group(solver, settings)

    def _add_to_fallback(self, params: list[nn.Parameter], factory: FallbackFactory | None) -> None:
        """Give parameters to the fallback, which is made if there is none yet.

        Args:
            params: parameters without a local problem.
            factory: makes the fallback; None makes AdamW, with a warning.

        Raises:
            TypeError: if ``factory`` is not callable.
        """
        if factory is not None and not callable(factory):
            raise TypeError(
                f"fallback= must be a function of the parameters that have no local problem, not "
                f"{type(factory).__name__}: fallback=lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        if not params:
            return
        groups: list[dict[str, Any]] = [{"params": params}]
        if factory is None and self._matrix_group is not None:
            groups = _with_matrices(params, hidden_matrices(self._model), self._matrix_group)
        if self._fallback is not None:
            for group in groups:
                self._fallback.add_param_group(group)
        else:
            rate, up = self._fallback_rate, self._fallback_maximizes
            self._fallback = make_fallback(factory, params, rate, groups, maximize=up)
            self.state.update(self._fallback.state)
        for group in self._fallback.param_groups:
            if not any(group is own for own in self.param_groups):
                group["fallback"] = True
                self.param_groups.append(group)
        self._link_fallback()

    def _link_fallback(self) -> None:
        """Share groups and state with the fallback again, after one of them was replaced.

        Groups that the user has added to the fallback itself are its own.
        """
        if self._fallback is not None:
            added = [g for g in self._fallback.param_groups if "fallback" not in g]
            self._fallback.param_groups = [*(g for g in self.param_groups if g["fallback"]), *added]
            self._fallback.state = self.state

    def _step_fallback(self) -> None:
        if self._fallback is not None:
            self._link_fallback()  # the user may have taken out a group
            move_state(self._fallback)
            self._fallback.step()


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters; the dtypes of the state stay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                # PyTorch's optimizers keep their step counts on the host.
                if torch.is_tensor(value) and value.device != parameter.device and name != "step":
                    state[name] = value.to(parameter.device)


def check_recorded(layers: Iterable[LayerRecord]) -> None:
    """Raise ``RuntimeError`` if no layer with a gradient has recorded a backward pass."""
    if not any(layer.calls or layer.obstacle for layer in layers):
        raise RuntimeError(
            "No layer recorded a backward pass since the last step, so there is nothing to do. "
            "Call loss.backward() before step() and zero_grad() after it, and compute the loss "
            "with the model this optimizer was made for, with gradients enabled. Other causes: "
            "(1) The model was compiled and called before the optimizer was made; its compiled graphs "
            "have no hooks. Call torch.compiler.reset(). "
            "(2) Another model of the same class is compiled too; the compiler does not distinguish "
            "models with hooks from models without. Set "
            "torch._dynamo.config.skip_nnmodule_hook_guards = False. "
            "(3) Compiled autograd is on, which runs no hooks. Turn it off. "
            "(4) nn.DataParallel is used, whose replicas have no hooks. Use DistributedDataParallel. "
            "(5) The backward pass ran inside a compiled function, which runs no hooks. Compile the "
            "model, or the computation of the loss, and call backward() and step() outside. "
            "(6) A zero-bubble schedule of torch.distributed.pipelining computes weight gradients "
            "without hooks. Use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B. "
            "(7) Gradients were computed by torch.autograd.grad and put into .grad. Call "
            "loss.backward()."
        )


def _with_matrices(
    params: list[nn.Parameter], matrices: set[nn.Parameter], numbers: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a group of the matrices, after a group of all other parameters; leave out empty groups."""
    others = {"params": [p for p in params if p not in matrices]}
    own = {"params": [p for p in params if p in matrices], **numbers}
    return [group for group in (others, own) if group["params"]]


def make_fallback(
    factory: FallbackFactory | None,
    params: list[nn.Parameter],
    rate: float,
    groups: list[dict[str, Any]],
    *,
    maximize: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters without a local problem.

    Args:
        factory: the user's ``fallback=``; None makes AdamW, with a warning.
        params: the parameters without a local problem.
        rate: the learning rate of that AdamW.
        groups: these parameters as groups; those with ``spectral`` take the spectral step.
        maximize: that AdamW maximizes the loss.

    Raises:
        TypeError: if ``factory`` does not return a suitable optimizer.
        ValueError: if the optimizer does not train exactly ``params``.
    """
    if factory is None:
        matrices = [p for group in groups if "spectral" in group for p in group["params"]]
        trained = sum(p.requires_grad for p in params)
        if trained:
            how = f"AdamW(lr={rate:g})"
            if moved := sum(p.requires_grad for p in matrices):
                matrix = "are matrices and take" if moved > 1 else "is a matrix and takes"
                how += f"; {moved} of them {matrix} spectral steps without inputs"
            has = "parameters have" if trained > 1 else "parameter has"
            gets = "get" if trained > 1 else "gets"
            warnings.warn(
                f"{trained} {has} no local problem and {gets} {how}. Pass fallback= to choose another "
                "optimizer. print(opt.summary()) lists what it trains.",
                stacklevel=4,
            )
        if matrices:
            return SpectralAdamW(groups, rate, _EPS, maximize=maximize)
        return torch.optim.AdamW(params, lr=rate, eps=_EPS, maximize=maximize)
    fallback = factory(params)
    if isinstance(fallback, torch.optim.LBFGS):
        raise TypeError("LBFGS needs a closure of its own and cannot be the fallback.")
    if not isinstance(fallback, torch.optim.Optimizer):
        raise TypeError(
            f"fallback= must return a torch.optim.Optimizer, not {type(fallback).__name__}."
        )
    if {p for group in fallback.param_groups for p in group["params"]} != set(params):
        raise ValueError(
            "fallback= must return an optimizer of exactly the parameters it is given."
        )
    return fallback
