"""A population: K configurations of one autoencoder, trained together as one batched model.

Every tensor has the leading dimension K: weights ``[K, d, n]``, biases ``[K, d]``, rows
``[K, rows, features]``. Local problems, solvers and transfers are those of the library and accept any
leading dimensions. Forward and backward pass are written out here, so a step is a fixed sequence of
tensor operations without host synchronisation, and is replayed as one CUDA graph on a GPU.

A member whose solution is not finite keeps its weights, and the skipped step is counted. Other members
are not affected. Epochs, schedules and losses of populations are in ``population_run``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_locoprop.fast import dispatch
from torch_locoprop.fast.dispatch import graphs, streams
from torch_locoprop.paper.fisher import running_average, sampled_output_gradient, second_moment
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import Before, LocalProblem
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.tensors import Tensors, spread
from torch_locoprop.paper.transfers import Sigmoid, Tanh, Transfer
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.solvers import SOLVERS, FirstOrder, Numbers, Solver
from torch_locoprop.solvers.base import Checked

MOST = 8  # side streams: each has memory of its own, and a population needs few to fill a GPU
NUMBERS = ("lr", "gamma", "momentum", "decay", "eps", "weight_decay")


@dataclass(frozen=True)
class Method:
    """The components and settings that all members of a population share; their numbers differ."""

    variant: Variant = VARIANTS["locoprop-m"]
    solver: Solver = SOLVERS["rmsprop"]
    local_steps: int = 10
    local_decay: str = "linear"
    regularizer: Regularizer = REGULARIZERS["none"]
    local_reduction: str = "sum"
    local_products: str = "full"

    @property
    def asks_for_fisher(self) -> Any:
        """The target or regularizer that needs a Fisher matrix, or None."""
        parts = (self.variant.target, self.regularizer)
        return next((part for part in parts if "fisher" in part.needs), None)


class Population:
    """The weights, solver states and numbers of K members.

    Args:
        models: K untrained models of one shape.
        transfers: The transfer after each linear layer, with that of the output.
        method: What all members share.
        numbers: The numbers of each member, by the names in ``NUMBERS``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        transfers: Sequence[Transfer],
        method: Method,
        numbers: Sequence[Mapping[str, float]],
    ) -> None:
        if not models or len(models) != len(numbers):
            raise ValueError(
                f"{len(models)} models and {len(numbers)} settings: give one for each."
            )
        linear = [[m for m in model.modules() if isinstance(m, nn.Linear)] for model in models]
        if len(linear[0]) != len(transfers):
            raise ValueError(f"{len(linear[0])} layers and {len(transfers)} transfers.")
        if not isinstance(transfers[-1], Sigmoid):
            raise ValueError(
                "The loss is a sigmoid cross-entropy: the last transfer must be sigmoid."
            )
        self.method = method
        self.transfers = tuple(transfers)
        self.layers: list[Tensors] = [
            {
                "weight": torch.stack([own[m].weight.detach() for own in linear]),
                "bias": torch.stack([own[m].bias.detach() for own in linear]),
            }
            for m in range(len(transfers))
        ]
        like = self.layers[0]["weight"]
        self.numbers = {
            name: torch.tensor(
                [float(own.get(name, 0.0)) for own in numbers], dtype=like.dtype, device=like.device
            )
            for name in NUMBERS
        }
        # One counter per layer: layers solved at the same time must not write to the same one.
        self.skips = torch.zeros(len(transfers), len(models), dtype=torch.long, device=like.device)
        self.steps = 0
        self.rate = torch.ones(
            (), dtype=like.dtype, device=like.device
        )  # the factor of the schedule
        self.states = [self._first_states(layer) for layer in self.layers]

    def __len__(self) -> int:
        return self.skips.shape[1]

    @property
    def skipped(self) -> Tensor:
        """The number of solutions of each member that were not finite, ``[K]``."""
        return self.skips.sum(0)

    @property
    def capturable(self) -> bool:
        """True if a step is a fixed sequence of device operations, so that it fits a CUDA graph."""
        return self.method.asks_for_fisher is None and isinstance(self.method.solver, FirstOrder)

    @torch.no_grad()
    def step(self, images: Tensor) -> None:
        """Take one training step.

        Args:
            images: ``[rows, pixels]`` for all members, or ``[K, rows, pixels]``.
        """
        x = images if images.dim() == 3 else images.expand(len(self), *images.shape)
        inputs, pre_activations = self._forward(x)
        fishers = self._fishers(pre_activations)
        g = (self.transfers[-1].f(pre_activations[-1]) - x) / x.shape[
            -2
        ]  # the gradient of the mean loss
        v: Tensor | None = None
        in_use: list[Tensor | None] = []  # kept alive while side streams still read them
        with streams.side_streams(MOST) as side:
            for m in reversed(range(len(self.layers))):
                below = g @ self.layers[m]["weight"] if m > 0 else None
                in_use += [g, v]
                with side(None):
                    self._solve(m, inputs[m], pre_activations[m], g, v, fishers[m])
                if below is not None:
                    v = below
                    g = _behind(self.transfers[m - 1], pre_activations[m - 1], inputs[m], below)
        self.steps += 1

    @torch.no_grad()
    def losses(self, images: Tensor, rows: int = 10_000) -> Tensor:
        """Return the mean loss of each member, ``[K]``, float64, on the device.

        Args:
            images: All images ``[n, pixels]``.
            rows: Images evaluated at a time, summed over the members.
        """
        total = torch.zeros(len(self), dtype=torch.float64, device=images.device)
        for part in torch.split(images, max(rows // len(self), 1)):
            target = part.expand(len(self), *part.shape)
            logits = self._forward(target)[1][-1]
            per_pixel = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            total += per_pixel.sum((-2, -1)).double()
        return total / len(images)

    def keep(self, members: Sequence[int]) -> None:
        """Drop all members except these; the order is that of ``members``."""
        if (
            not members
            or len(set(members)) != len(members)
            or not set(members) <= set(range(len(self)))
        ):
            raise ValueError(
                f"Invalid members={list(members)}. Must be different ones of 0..{len(self) - 1}, "
                "and at least one."
            )
        index = torch.tensor(members, device=self.skips.device)
        self.layers = [_selected(layer, index) for layer in self.layers]
        self.states = [
            {name: _selected(state, index) for name, state in states.items()}
            for states in self.states
        ]
        self.numbers = _selected(self.numbers, index)
        self.skips = self.skips[:, index]

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs and the pre-activations of all layers."""
        inputs, pre_activations = [], []
        for layer, transfer in zip(self.layers, self.transfers, strict=True):
            inputs.append(x)
            pre_activations.append(Dense().forward(x, **layer))
            x = transfer.f(pre_activations[-1])
        return inputs, pre_activations

    def _fishers(self, pre_activations: list[Tensor]) -> list[Tensor | None]:
        """Return the Fisher matrix ``[K, d, d]`` of each layer, from the labels of a run alone."""
        asking, layers = self.method.asks_for_fisher, range(len(self.layers))
        known = [self.states[m]["weight"].get("fisher") for m in layers]
        if asking is None or self.steps % getattr(asking, "every", 1) != 0:
            return known
        a = pre_activations[-1]
        generator = torch.Generator(a.device)
        seed = 1000 * self.steps  # as in LocoProp itself
        g = torch.stack(
            [
                sampled_output_gradient(self.transfers[-1], own, generator.manual_seed(seed))
                for own in a
            ]
        )
        for m in reversed(layers):
            known[m] = running_average(known[m], second_moment(g), asking.decay)
            if m > 0:
                below = g @ self.layers[m]["weight"]
                g = self.transfers[m - 1].vjp(pre_activations[m - 1], below)
        return known

    def _first_states(self, layer: Tensors) -> dict[str, Tensors]:
        solver, numbers = self.method.solver, self._solver_numbers()
        if not isinstance(solver, FirstOrder):
            return {name: {} for name in layer}
        return {name: solver.init(t, numbers.at(1.0, t)) for name, t in layer.items()}

    def _solver_numbers(self) -> Numbers:
        own = self.numbers
        return Numbers(own["lr"] * self.rate, own["momentum"], own["decay"], own["eps"])

    def _solve(
        self, m: int, x: Tensor, a: Tensor, g: Tensor, v: Tensor | None, fisher: Tensor | None
    ) -> None:
        """Solve the local problem of one layer for all members."""
        layer, numbers, method = self.layers[m], self._solver_numbers(), self.method
        lr = numbers.lr
        shrink = 1 - lr * self.numbers["weight_decay"]
        if "v" in method.variant.target.needs and v is None:
            v = self.transfers[m].pull_back(a, g)
        output = m == len(self.layers) - 1 and method.variant.output_by_gradient_descent
        of_each = 1 / x.shape[-2] if method.local_reduction == "mean" else 1.0
        problem = LocalProblem(
            linear_map=Dense(),
            x=x,
            start={
                "weight": layer["weight"] * spread(shrink, layer["weight"]),
                "bias": layer["bias"],
            },
            fixed={},
            backprop=Dense().weight_grad(x, g),
            target=method.variant.target,
            loss=method.variant.loss,
            transfer=self.transfers[m],
            gamma=self.numbers["gamma"],
            eta=lr,
            regularizer=REGULARIZERS["none"] if output else method.regularizer,
            row_weight=of_each,
            g=g / of_each if "g" in method.variant.target.needs else None,
            v=v / of_each if v is not None and "v" in method.variant.target.needs else None,
            fisher=fisher,
            before=Before(a, lr, self.numbers["weight_decay"]),
            products=method.local_products,
            gram_of=dispatch.gram,
        )
        solver = SOLVERS["sgd"] if output else method.solver
        local_steps = 1 if output else method.local_steps
        new, states = dispatch.solve(
            solver,
            problem,
            {name: {} for name in layer} if output else _without_fisher(self.states[m]),
            dict.fromkeys(layer, numbers),
            local_steps,
            method.local_decay,
        )
        if fisher is not None:
            states["weight"] = {**states["weight"], "fisher": fisher}
        self._write(m, new, states)

    def _write(self, m: int, new: Tensors, states: dict[str, Tensors]) -> None:
        """Write finite solutions in place, as replaying a CUDA graph requires."""
        entries = [*new.values(), *(entry for own in states.values() for entry in own.values())]
        tensors = [t for t in entries if t.dim() > 0]
        ok = new.finite if isinstance(new, Checked) else dispatch.finite(tensors, len(self))
        self.skips[m] += (~ok).long()
        pairs = [(value, self.layers[m][name]) for name, value in new.items()]
        for name in new:
            for key, entry in states.get(name, {}).items():
                old = self.states[m][name].get(key)
                if old is None:
                    self.states[m][name][key] = entry
                elif entry.dim() == 0:  # a count of iterations
                    old.copy_(entry)
                else:
                    pairs.append((entry, old))
        dispatch.write(ok, pairs)


def _behind(transfer: Transfer, a: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Return the gradient with respect to a, given that with respect to y = f(a), like autograd."""
    if isinstance(transfer, Tanh):
        return torch.ops.aten.tanh_backward(v, y)  # type: ignore[no-any-return]  # in one pass
    return transfer.vjp(a, v)


def _without_fisher(states: dict[str, Tensors]) -> dict[str, Tensors]:
    return {
        name: {key: entry for key, entry in state.items() if key != "fisher"}
        for name, state in states.items()
    }


def _selected(tensors: Tensors, index: Tensor) -> Tensors:
    """Return the entries of some members; a count of iterations is shared and stays."""
    return {name: t[index] if t.dim() > 0 else t for name, t in tensors.items()}


class GraphedPopulation:
    """Steps of a population, replayed as one CUDA graph on a GPU.

    The CUDA graph is for ``rows`` images; a step on another number of images runs without it. Members
    have the same images, or each its own.
    """

    def __init__(self, population: Population, images: Tensor, rows: int) -> None:
        self.population = population
        self.images = images
        self.rows = rows
        self.index = torch.zeros(0, dtype=torch.long, device=images.device)
        self._repeated = graphs.Repeated[None](eager=1)

    def step(self, index: Tensor, rate: float) -> None:
        """Take one step on ``images[index]``, at ``rate`` times each member's learning rate.

        Args:
            index: Positions of the images, ``[rows]``, or ``[K, rows]`` of each member.
            rate: The factor of the schedule.
        """
        self.population.rate.fill_(rate)
        graphed = self.images.is_cuda and self.population.capturable
        if not graphed or index.shape[-1] != self.rows:
            self.population.step(self.images[index])
            return
        if index.shape != self.index.shape:
            self.index = torch.empty_like(index)
            self._repeated = graphs.Repeated[None](eager=1)
        self.index.copy_(index)
        self._repeated(lambda: self.population.step(self.images[self.index]))

    def keep(self, members: Sequence[int]) -> None:
        """Drop all members except these, and record a new CUDA graph for their tensors."""
        self.population.keep(members)
        self._repeated = graphs.Repeated[None](eager=1)
