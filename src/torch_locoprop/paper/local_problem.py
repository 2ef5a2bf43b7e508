"""The local problem of one layer, as tensors: no module, no hook, no parameter group.

With ``a(W̃) = X W̃ᵀ + b̃`` and the residual ``δ(a)`` of the local loss, the gradient is

    ∇D(W̃) = δ₀ᵀX + (δ(a(W̃)) − δ(a₀))ᵀX .

The first term is known before any matrix product: for a target that follows BackProp it is ``γ G`` with
the ordinary gradient ``G``. The first local iteration therefore is BackProp, to the last bit, and the
problem includes everything that was done to ``G`` (clipping, averaging, a penalty on the weights).

The value of the loss, which no solver needs, is in ``objective.py``. How the problem is solved is in
``solvers/``; how it is built from a layer's record is in ``stepping/build_problem.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torch_locoprop.paper.gram import (
    Gram,
    GramOf,
    RowProducts,
    Structure,
    gram_dtype,
    saves_work,
)
from torch_locoprop.paper.linear_map import LinearMap
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.regularizers import Metric, Regularizer
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.tensors import Number, Tensors, norm, spread
from torch_locoprop.paper.transfers import Transfer

T = TypeVar("T")


class _computed_once(cached_property[T]):  # noqa: N801  # lower case, as it is used as a decorator
    """``functools.cached_property`` without Python 3.11's lock, which torch.compile cannot trace."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> T:  # type: ignore[override]
        if instance is None:
            return self  # type: ignore[return-value]  # for the documentation
        value = self.func(instance)
        instance.__dict__[self.func.__name__] = value
        return value


class Before(NamedTuple):
    """The pre-activations of the forward pass, at the weight before weight decay."""

    a: Tensor  # pre-activations [..., rows, d]
    lr: Number  # the weight's learning rate: a number, or [K] for a population
    weight_decay: Number  # a number or [K]; the weight was multiplied by 1 − lr · weight_decay

    def at_start(self, bias: Tensor | None) -> Tensor:
        """Return the pre-activations at the start of the problem, after weight decay.

        Args:
            bias: the bias, to which weight decay does not apply; None without a bias.
        """
        lost = spread(self.lr * self.weight_decay, self.a)
        return self.a - lost * (self.a if bias is None else self.a - bias.unsqueeze(-2))


class OtherRows(Protocol):
    """Access to the rows of one problem that other processes have."""

    @property
    def rows(self) -> int:
        """The number of rows of all processes."""
        ...

    @property
    def some_have_gram(self) -> bool:
        """True if at least one process keeps XᵀX in place of its rows."""
        ...

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all processes (its mean, for mean losses)."""
        ...

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over all processes of each process's mean over rows."""
        ...


class OtherOutputs(Protocol):
    """Access to the outputs of one layer whose problems other processes solve."""

    @property
    def d(self) -> int:
        """The number of outputs of all processes."""
        ...

    def add_up(self, of_rows: Tensor) -> Tensor:
        """Return the sum over all processes."""
        ...


@dataclass(frozen=True)
class LocalProblem:
    """The problem ``min D(a(W̃), target) + R(W̃, W)`` over the tensors of one layer.

    Leading dimensions ``[..., ]`` are those of a population of K models, if there is one.
    """

    linear_map: LinearMap
    x: Any  # the layer's inputs as linear_map takes them (dense: [..., rows, n]), or their Gram
    start: Tensors  # W: the trained ones of "weight" [..., d, n] and "bias" [..., d]
    fixed: Tensors  # the tensors that are frozen, with the same names
    backprop: Tensors  # G: the ordinary gradient of each tensor in start
    target: Target
    loss: LocalLoss
    transfer: Transfer
    gamma: Number  # γ
    eta: Number  # η of the group, before the decay over local iterations
    regularizer: Regularizer
    # The weight of each row in the loss: 1 for a sum as in the paper, 1/rows for a mean, and [rows, 1]
    # if rows were dropped and each row counts for several.
    row_weight: float | Tensor = 1.0
    g: Tensor | None = None  # ∂L/∂a divided by row_weight [..., rows, d], if the target needs it
    v: Tensor | None = None  # ∂L/∂y divided by row_weight [..., rows, d], if the target needs it
    recorded: Callable[[], Tensor | None] | None = None  # returns g for diagnostics
    fisher: Tensor | None = None  # the Fisher matrix of the pre-activations [..., d, d]
    before: Before | None = None  # pre-activations that the forward pass has kept
    # The weights to which start and all iterates are relative; empty: they are not relative.
    base: Tensors = field(default_factory=dict)
    products: str = "full"  # precision of matrix products after the first gradient, or "bf16"
    others: OtherRows | None = None  # the rows of the problem that other processes have
    outputs: OtherOutputs | None = None  # the outputs of the layer that other processes have
    gram_of: GramOf = Gram.of  # computes XᵀX of rows
    structure: Structure | None = None  # which entries of [X 1]ᵀ[X 1] there are; None: all
    whole_square: Tensor | None = None  # [X 1]ᵀ[X 1] of all rows, if processes have added it up
    number: int = 0  # number of problems that the layer has had before this one

    @_computed_once
    def a0(self) -> Tensor:
        """The pre-activations at the start ``[..., rows, d]``."""
        if self.before is not None:
            return self.before.at_start((self.start | self.fixed).get("bias"))
        return self._forward(self.start)

    @_computed_once
    def target_rows(self) -> Tensor:
        """The target of each row ``[..., rows, d]``."""
        return self.target(self.a0, self.transfer, self.g, self.v, self.gamma)

    @_computed_once
    def delta0(self) -> Tensor | None:
        """The residual δ₀ at the start ``[..., rows, d]``.

        None if the target is relative to the start, so that only :attr:`first_gradient` contains it.
        """
        if self.target.starts_at_zero and self.g is None:
            return None
        return self.loss.residual(self.a0, self.target_rows, self.transfer)

    @_computed_once
    def first_gradient(self) -> Tensors:
        """The gradient at the start, ``δ₀ᵀX`` with the row weights, for each trained tensor."""
        known = self.target.first_gradient(self.backprop, self.gamma, self.fisher)
        if known is not None:
            return known
        assert self.delta0 is not None
        return self._sum_over_processes(self._weight_grad(self.row_weight * self.delta0))

    @_computed_once
    def metric(self) -> Metric | None:
        """The Fisher metric of the layer; None if the regularizer does not need it."""
        if self.fisher is None or "fisher" not in self.regularizer.needs:
            return None
        x = self.inputs
        return Metric(self.fisher, self.averaged(x.mT @ x / x.shape[-2]))

    @_computed_once
    def inputs(self) -> Tensor:
        """The rows that multiply the trained columns of ``[W b]``: ``X``, ``1`` or ``[X 1]``."""
        return self.linear_map.inputs(self.x, "weight" in self.start, "bias" in self.start)

    def through_gram(self, local_steps: int) -> Gram | None:
        """Return the Gram matrix if local iterations can use it and are cheaper with it.

        Only a quadratic loss can use it. If other processes have rows of the problem, the result is the
        Gram matrix of the rows of all processes, with their weights.

        Args:
            local_steps: number of local iterations.

        Returns:
            The Gram matrix; None if the iterations have to use the rows.
        """
        if local_steps < 2 or not self.loss.is_quadratic(self.transfer):
            return None
        d = self._like.shape[-2 if "weight" in self.start else -1]
        if self.others is not None:
            return self._gram_of_all_processes(d, local_steps - 1)
        if isinstance(self.x, Gram):
            return self.x.to(gram_dtype(self._like))
        if not self.linear_map.holds_rows:
            return None
        rows, n = self.x.shape[-2:]
        cheaper = saves_work(rows, d, n, local_steps - 1)
        return self.gram_of(self._wide(self.x), self.row_weights) if cheaper else None

    def square(self, dtype: torch.dtype) -> Tensor:
        """Return ``[X 1]ᵀ[X 1]`` for the trained columns, summed over all rows with their weights."""
        if self.whole_square is not None:
            return self.whole_square.to(dtype)
        if isinstance(self.x, Gram):
            own = self.x.to(dtype).joint("weight" in self.start, "bias" in self.start)
            return self.of_all_processes(own * self.row_weight)
        x = self.inputs.to(dtype)
        return self.of_all_processes((self.row_weight * x).mT @ x)

    def gradient(self, at: Tensors, gram: RowProducts | None = None) -> Tensors:
        """Return the gradient of the local loss, without the regularizer.

        Args:
            at: the tensors W̃.
            gram: the Gram matrix from :meth:`through_gram`; None computes it from the rows.
        """
        if gram is not None:
            added = gram.gradient(self.displacement(at))
            return self._plus_first_gradient(
                added if self.others is not None else self._times_row_weight(added)
            )
        delta = self.loss.residual(self._forward(at), self.target_rows, self.transfer)
        return self.gradient_after(delta if self.delta0 is None else delta - self.delta0)

    def gradient_after(self, change: Tensor) -> Tensors:
        """Return the gradient of the local loss where the residuals have changed since the start.

        Args:
            change: ``δ(a) − δ(a₀)``, ``[..., rows, d]``.
        """
        if self.row_weights is not None:
            change = change * self.row_weights
        return self._plus_first_gradient(
            self._sum_over_processes(self._times_row_weight(self._weight_grad(change)))
        )

    def row_change(self, moved: Tensors) -> Tensor:
        """Return by how much a displacement changes the pre-activations, ``[..., rows, d]``.

        Args:
            moved: the displacement of each trained tensor.
        """
        still = {name: torch.zeros_like(t) for name, t in self.fixed.items()}
        return self.linear_map.forward(self.x, **moved, **still)

    def sum_of_rows(self, values: Tensor) -> Tensor:
        """Return the sum over all rows, with their weights: ``[..., rows, d] -> [..., d]``."""
        if self.row_weights is not None:
            return self.of_all_processes((values * self.row_weights).sum(-2))
        return self.of_all_processes(values.sum(-2) * self.row_weight)

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

    def _forward(self, at: Tensors) -> Tensor:
        """Return the pre-activations ``[..., rows, d]`` for the tensors W̃."""
        tensors = {name: self.base[name] + t if self.base else t for name, t in at.items()}
        return self.linear_map.forward(self.x, **tensors, **self.fixed)

    @property
    def row_weights(self) -> Tensor | None:
        """The weights of the rows ``[rows, 1]``; None if all rows have the same weight."""
        return self.row_weight if isinstance(self.row_weight, Tensor) else None

    def _times_row_weight(self, change: Tensors) -> Tensors:
        """Multiply sums over rows, in place, by the row weight if all rows have the same."""
        if self.row_weights is None and self.row_weight != 1:
            for tensor in change.values():
                tensor.mul_(self.row_weight)
        return change

    def _plus_first_gradient(self, change: Tensors) -> Tensors:
        """Add the first gradient, in place, to the change of the gradient since the start."""
        for name, first in self.first_gradient.items():
            change[name].add_(first)
        return change

    # ---- with other processes ------------------------------------------------------------------

    def averaged(self, mean: Tensor) -> Tensor:
        """Return the mean over the rows of all processes.

        Args:
            mean: the mean over this process's rows.
        """
        return mean if self.others is None else self.others.average(mean)

    def _sum_over_processes(self, of_rows: Tensors) -> Tensors:
        """Add up, in place and over all processes, sums over rows for each trained tensor."""
        if self.others is not None:
            self.others.add_up(of_rows[name] for name in self.start)
        return of_rows

    def of_all_processes(self, of_rows: Tensor) -> Tensor:
        """Add up, in place and over all processes, a sum over this process's rows."""
        if self.others is not None:
            self.others.add_up([of_rows])
        return of_rows

    def of_all_outputs(self, of_rows: Tensor) -> Tensor:
        """Return a sum over the outputs of all processes, from that over this process's outputs."""
        return of_rows if self.outputs is None else self.outputs.add_up(of_rows)

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the norm of all entries of tensors over all outputs, in float32 or wider."""
        own = norm(tensors)
        return own if self.outputs is None else self.of_all_outputs(own.square()).sqrt()

    @property
    def _like(self) -> Tensor:
        """One of the trained tensors, all of which have the same dtype and device."""
        return next(iter(self.start.values()))

    def _gram_of_all_processes(self, d: int, gradients: int) -> Gram | None:
        """Return the Gram matrix of the rows of all processes, with their weights, if it is cheaper.

        Only facts that all processes know decide whether it is, so that all decide the same.

        Args:
            d: number of output features.
            gradients: number of gradients that will be computed with it.
        """
        assert self.others is not None
        own = self.x
        if isinstance(own, Gram):
            own = own.to(gram_dtype(self._like))
        else:
            has_rows = self.linear_map.holds_rows
            cheaper = has_rows and saves_work(self.others.rows, d, own.shape[-1], gradients)
            if not cheaper and not self.others.some_have_gram:
                return None
            if self.row_weights is None:
                blocks = map(self._wide, self.linear_map.row_blocks(own))
                first, *rest = map(self.gram_of, blocks)
                own = sum(rest, first)
            else:
                inputs = self._wide(self.linear_map.inputs(own, True, False))
                own = self.gram_of(inputs, self.row_weights)
        weight = self.row_weight if isinstance(self.row_weight, float) else 1.0
        # Filled on the device: a CUDA graph cannot copy a number from the host.
        rows = (own.square.new_ones(()) * own.rows).to(own.square)
        weighted = own.times(weight, rows * weight)
        self.others.add_up(weighted.tensors)
        return weighted

    def _wide(self, rows: Tensor) -> Tensor:
        """Return rows in the dtype of their products with themselves."""
        return rows.to(gram_dtype(self._like))

    def _weight_grad(self, delta: Tensor) -> Tensors:
        gradient = self.linear_map.weight_grad(self.x, delta)
        return {name: gradient[name] for name in self.start}
