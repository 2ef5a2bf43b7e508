"""One layer's local problem, in tensors: no module, no hook, no parameter group.

With ``a(W̃) = X W̃ᵀ + b̃`` and the residual ``δ(a)`` of the local loss, the gradient is

    ∇D(W̃) = δ₀ᵀX + (δ(a(W̃)) − δ(a₀))ᵀX ,

and the first term is known before any matrix product: for a target that follows BackProp it is
``γ G`` with the ordinary gradient ``G``. The first local iteration therefore is BackProp to the last
bit, and the problem sees whatever was done to ``G`` (clipping, averaging, a penalty on the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_locoprop.paper.gram import Gram, GramOf, saves_work
from torch_locoprop.paper.linear_map import LinearMap
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.regularizers import Metric, Regularizer
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.tensors import Number, Tensors, spread
from torch_locoprop.paper.transfers import Transfer


class Before(NamedTuple):
    """The pre-activations of the forward pass, at a weight that weight decay has shrunk since."""

    a: Tensor  # pre-activations [..., rows, d]
    lr: Number  # the weight's learning rate, one or [K]
    weight_decay: Number  # one or [K]; the weight has lost lr · weight_decay of itself

    def at_start(self, bias: Tensor | None) -> Tensor:
        """Return the pre-activations at the start of the problem; the bias has not shrunk."""
        lost = spread(self.lr * self.weight_decay, self.a)
        return self.a - lost * (self.a if bias is None else self.a - bias.unsqueeze(-2))


class OtherRows(Protocol):
    """The rows of one problem that other processes hold."""

    @property
    def rows(self) -> int:
        """The number of rows of all processes together."""
        ...

    @property
    def some_have_gram(self) -> bool:
        """True if a process keeps XᵀX in place of its rows."""
        ...

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the processes (or mean, for mean losses)."""
        ...

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over the processes of what is a mean over rows in each."""
        ...


@dataclass(frozen=True)
class LocalProblem:
    """``min D(a(W̃), target) + R(W̃, W)`` over the tensors of one layer."""

    linear_map: LinearMap
    x: Any  # the layer's inputs as the map keeps them (dense: [..., rows, n]), or their Gram
    start: Tensors  # W: the trained ones of "weight" [..., d, n] and "bias" [..., d]
    fixed: Tensors  # the frozen ones
    backprop: Tensors  # G: the ordinary gradient of each tensor in start
    target: Target
    loss: LocalLoss
    transfer: Transfer
    gamma: Number  # γ
    eta: Number  # η of the group, before the decay over local iterations
    regularizer: Regularizer
    # 1: sum over rows, as the paper; 1/rows: their mean; [rows, 1] where a row stands for several.
    row_weight: float | Tensor = 1.0
    g: Tensor | None = None  # [..., rows, d], ∂L/∂a over row_weight, where the target asks for it
    v: Tensor | None = None  # [..., rows, d], ∂L/∂y likewise
    recorded: Callable[[], Tensor | None] | None = None  # g for diagnostics, if the target has none
    fisher: Tensor | None = None  # [..., d, d], of the pre-activations
    before: Before | None = None
    base: Tensors = field(default_factory=dict)  # what start and all iterates are relative to
    products: str = "full"  # or "bf16": how exact those after the first gradient need to be
    others: OtherRows | None = None  # the rows that other processes have of the problem
    gram_of: GramOf = Gram.of  # computes XᵀX of rows; the fast paths have their own
    number: int = 0  # how many problems the layer has had before this one

    @cached_property
    def a0(self) -> Tensor:
        """The pre-activations at the start."""
        if self.before is not None:
            return self.before.at_start((self.start | self.fixed).get("bias"))
        return self._forward(self.start)

    @cached_property
    def target_rows(self) -> Tensor:
        return self.target(self.a0, self.transfer, self.g, self.v, self.gamma)

    @cached_property
    def delta0(self) -> Tensor | None:
        """The residual at the start; None where it is zero because the first gradient has it all."""
        if self.target.starts_at_zero and self.g is None:
            return None
        return self.loss.residual(self.a0, self.target_rows, self.transfer)

    @cached_property
    def first_gradient(self) -> Tensors:
        """``δ₀ᵀX``, weighted."""
        known = self.target.first_gradient(self.backprop, self.gamma, self.fisher)
        if known is not None:
            return known
        assert self.delta0 is not None
        return self._exchanged(self._weight_grad(self.row_weight * self.delta0))

    @cached_property
    def metric(self) -> Metric | None:
        """The Fisher metric of the layer where the regularizer asks for it."""
        if self.fisher is None or "fisher" not in self.regularizer.needs:
            return None
        x = self.inputs
        return Metric(self.fisher, self.averaged(x.mT @ x / x.shape[-2]))

    @cached_property
    def inputs(self) -> Tensor:
        """The rows that multiply the trained columns ``[W b]``."""
        return self.linear_map.inputs(self.x, "weight" in self.start, "bias" in self.start)

    def through_gram(self, local_steps: int) -> Gram | None:
        """The Gram matrix of the rows if so many iterations are right and cheaper with it alone."""
        if local_steps < 2 or not self.loss.is_quadratic(self.transfer):
            return None
        d = self._like.shape[-2 if "weight" in self.start else -1]
        if self.others is not None:
            return self._gram_of_all(d, local_steps - 1)
        if isinstance(self.x, Gram):
            return self.x.to(self._like.dtype)
        if not self.linear_map.holds_rows:
            return None
        rows, n = self.x.shape[-2:]
        cheaper = saves_work(rows, d, n, local_steps - 1)
        return self.gram_of(self.x, self._own_weights) if cheaper else None

    def square(self, dtype: torch.dtype) -> Tensor:
        """``[X 1]ᵀ[X 1]`` of the trained columns and of all rows, each as often as it counts."""
        if isinstance(self.x, Gram):
            own = self.x.to(dtype).joint("weight" in self.start, "bias" in self.start)
            return self.of_all(own * self.row_weight)
        x = self.inputs.to(dtype)
        return self.of_all((self.row_weight * x).mT @ x)

    def gradient(self, at: Tensors, gram: Gram | None = None) -> Tensors:
        """The gradient of the local loss, without the regularizer; by rows, or by ``gram``."""
        if gram is not None:
            added = gram.gradient(self.displacement(at))
            return self._after_first(added if self.others is not None else self._weighted(added))
        delta = self.loss.residual(self._forward(at), self.target_rows, self.transfer)
        change = delta if self.delta0 is None else delta - self.delta0
        if self._own_weights is not None:
            change = change * self._own_weights
        return self._after_first(self._exchanged(self._weighted(self._weight_grad(change))))

    @property
    def weight(self) -> Tensor:
        """The layer's weight at the start ``[..., d, n]``, trained or frozen."""
        return (self.fixed | self.start | self.base)["weight"]

    @property
    def backprop_step(self) -> Tensors:
        """The displacement by one plain gradient step, ``−η δ₀ᵀX``, for each trained tensor."""
        return {name: -self.eta * g for name, g in self.first_gradient.items()}

    def displacement(self, at: Tensors) -> Tensors:
        """Return ``Δ = W̃ − W``, the unknown of Eq. 9, for each trained tensor."""
        return {name: value - self.start[name] for name, value in at.items()}

    def objective(self, at: Tensors) -> Tensor:
        """The objective less its value at the start: ``⟨δ₀ᵀX, W̃ − W⟩`` and the loss's curvature.

        The latter is what is left of large terms when the step is small: hence what the rows have moved
        from the step itself, and the terms in float64.
        """
        moved = self.displacement(at)
        linear = torch.stack([(self.first_gradient[k] * moved[k]).sum() for k in moved]).sum()
        penalty = self.regularizer.value(moved, self.eta, self.metric)
        if isinstance(self.x, Gram):
            curved = self.x.to(linear.dtype).gradient(moved)
            half = 0.5 * torch.stack([(curved[k] * moved[k]).sum() for k in moved]).sum()
            return linear + self.of_all(self.row_weight * half) + penalty
        still = {name: torch.zeros_like(t) for name, t in self.fixed.items()}
        change = self.linear_map.forward(self.x, **moved, **still)
        if self.loss.is_quadratic(self.transfer):
            beyond_linear = 0.5 * change.square().sum(-1)
        else:
            parts = (self.a0, self.target_rows.expand_as(self.a0), change)
            most = max(_AT_ONCE * change.shape[-2] // max(change.numel(), 1), 1)
            some = zip(*(torch.split(t, most, -2) for t in parts), strict=True)
            beyond_linear = torch.cat(
                [self._beyond_linear(*map(_precise, each)) for each in some], -1
            )
        return linear + self.of_all(self._added_up(beyond_linear).to(linear)) + penalty

    def _beyond_linear(self, a0: Tensor, target: Tensor, change: Tensor) -> Tensor:
        """What the loss of each row has in excess of its slope times the change."""
        before, after = (self.loss.value(a, target, self.transfer) for a in (a0, a0 + change))
        slope = self.loss.residual(a0, target, self.transfer)
        return after - before - (slope * change).sum(-1)

    def objective_at_start(self) -> Tensor:
        """The objective at the start; NaN where ∂L/∂a, or ∂L/∂y, is not known row by row.

        Exact where the loss is; where the residual is ``a − a*`` also if the loss leaves out a
        constant. A process that knows it not makes it unknown to all.
        """
        rows = self._losses_at_start()
        unknown = self._like.new_full((), torch.nan)
        return self.of_all(unknown if rows is None else self._added_up(rows).to(unknown))

    def _losses_at_start(self) -> Tensor | None:
        """The local loss at the start, of each row, where it is known."""
        g, target = self.g, self.target
        if target.starts_at_zero and g is None:
            g = None if self.recorded is None else self.recorded()
            if g is None:
                return None
            if self.loss.is_quadratic(self.transfer):
                # The residual of a row comes from its g as the first gradient does from G.
                first = target.first_gradient({"weight": g.mT}, self.gamma, self.fisher)
                return None if first is None else 0.5 * first["weight"].square().sum(-2)
        given = {"g": g, "v": self.v}
        if isinstance(self.x, Gram) or any(given.get(name) is None for name in target.needs):
            return None
        goal = target(self.a0, self.transfer, g, self.v, self.gamma)
        return self.loss.value(self.a0, goal, self.transfer)

    def _added_up(self, rows: Tensor) -> Tensor:
        """The sum over the rows ``[..., rows]``, each as often as it counts."""
        own = self._own_weights
        weight = self.row_weight if own is None else _precise(own).squeeze(-1)
        return (weight * _precise(rows)).sum()

    def _forward(self, at: Tensors) -> Tensor:
        """The pre-activations at these tensors."""
        tensors = {name: self.base[name] + t if self.base else t for name, t in at.items()}
        return self.linear_map.forward(self.x, **tensors, **self.fixed)

    @property
    def _own_weights(self) -> Tensor | None:
        """The rows' weights where they are not one number."""
        return self.row_weight if isinstance(self.row_weight, Tensor) else None

    def _weighted(self, change: Tensors) -> Tensors:
        """What rows that all count the same have added, in place."""
        if self._own_weights is None and self.row_weight != 1:
            for tensor in change.values():
                tensor.mul_(self.row_weight)
        return change

    def _after_first(self, change: Tensors) -> Tensors:
        """The first gradient and what was added to it since; ``change`` is used up."""
        for name, first in self.first_gradient.items():
            change[name].add_(first)
        return change

    # ---- with other processes ------------------------------------------------------------------

    def averaged(self, mean: Tensor) -> Tensor:
        """A mean over these rows, over all rows."""
        return mean if self.others is None else self.others.average(mean)

    def _exchanged(self, of_rows: Tensors) -> Tensors:
        if self.others is not None:
            self.others.add_up(of_rows[name] for name in self.start)
        return of_rows

    def of_all(self, of_rows: Tensor) -> Tensor:
        """What these rows add up to, in place with what all rows do."""
        if self.others is not None:
            self.others.add_up([of_rows])
        return of_rows

    @property
    def _like(self) -> Tensor:
        """One of the trained tensors, which have one dtype."""
        return next(iter(self.start.values()))

    def _gram_of_all(self, d: int, gradients: int) -> Gram | None:
        """That of all rows, weighted, if it is cheaper: by what all processes know, to agree."""
        assert self.others is not None
        own = self.x
        if isinstance(own, Gram):
            own = own.to(self._like.dtype)
        else:
            has_rows = self.linear_map.holds_rows
            cheaper = has_rows and saves_work(self.others.rows, d, own.shape[-1], gradients)
            if not cheaper and not self.others.some_have_gram:
                return None
            if self._own_weights is None:
                first, *rest = map(self.gram_of, self.linear_map.row_blocks(own))
                own = sum(rest, first)
            else:
                own = self.gram_of(self.linear_map.inputs(own, True, False), self._own_weights)
        weight = 1.0 if self._own_weights is not None else self.row_weight
        square, total = own.square * weight, own.total * weight
        rows = torch.as_tensor(own.rows, dtype=square.dtype, device=square.device) * weight
        self.others.add_up([square, total, rows])
        return Gram(square, total, rows)

    def _weight_grad(self, delta: Tensor) -> Tensors:
        gradient = self.linear_map.weight_grad(self.x, delta)
        return {name: gradient[name] for name in self.start}


_AT_ONCE = 2**18  # numbers in float64


def _precise(tensor: Tensor) -> Tensor:
    """In float64, which Apple's GPUs do not have: on the host then."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
