"""The updates of Muon, SOAP, K-FAC, Shampoo and LocoProp's closed forms for K members at a time.

Every tensor has the leading dimension K: weights ``[K, d, n]``, biases ``[K, d]``, inputs
``[K, rows, n]``, settings ``[K]``. Each update repeats, member by member, the arithmetic of the
optimizer that the study builds for the method, whose record names the update (`matrix_update`); the
tests compare the two. What they share is in `torch_locoprop.study.training.update`, and the training
loop in `torch_locoprop.study.training.matrix_population`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_locoprop import solvers
from torch_locoprop.baselines.kfac import EARLY
from torch_locoprop.baselines.kronecker_factors import damped_factors
from torch_locoprop.fast import dispatch
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.fisher import damped, second_moment
from torch_locoprop.paper.linear_map import with_ones
from torch_locoprop.paper.spectral import (
    above_rounding,
    damped_inverse,
    equal_rows,
    length,
    longer,
    mean_size,
    relative,
)
from torch_locoprop.paper.tensors import Tensors, join, split
from torch_locoprop.study.machine import matmul_precision
from torch_locoprop.study.training.factorisations import (
    eigenbasis,
    in_threads,
    inverse,
    inverse_fourth_root,
    q,
)
from torch_locoprop.study.training.update import (
    Passes,
    Update,
    along,
    average,
    from_first,
    from_zero,
    put,
)

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Muon's coefficients, as in `torch.optim.Muon`."""


class Muon(Update):
    """`torch.optim.Muon` for weights, at the scale of AdamW's steps, and Adam for biases."""

    def begin(self, rate: float) -> None:
        super().begin(rate)
        t = self.steps + 1
        put(self.now, bias_rate=self.now["lr"] * ((1 - 0.999**t) ** 0.5 / (1 - 0.9**t)))

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        weight, gradient = layer["weight"], gradients["weight"]
        momentum = along(self.numbers["momentum"], gradient)
        buffer = from_zero(state, "momentum", gradient)
        buffer.lerp_(gradient, 1 - momentum)
        found = orthogonalised(torch.lerp(gradient, buffer, momentum))
        self.shrink(weight)
        weight.sub_(along(0.2 * max(weight.shape[1:]) ** 0.5 * self.now["lr"], weight) * found)
        self._move_bias(layer["bias"], state, gradients["bias"])

    def _move_bias(self, bias: Tensor, state: Tensors, gradient: Tensor) -> None:
        """TensorFlow's Adam at its default averages (`torch_locoprop.baselines.Adam`)."""
        first = from_zero(state, "bias_average", bias)
        second = from_zero(state, "bias_square", bias)
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
        bias.sub_(along(self.now["bias_rate"], bias) * first / (second.sqrt() + 1e-8))


class ExactSMuon(Muon):
    """Muon on ``[G_W G_b] (C + λ mean(diag C) I)⁻¹``, C a running average of ``[X 1]ᵀ[X 1]/rows``."""

    def prepare(self, passes: Passes) -> None:
        with matmul_precision("fp32"):
            for state, x in zip(self.states, passes.inputs, strict=True):
                square = second_moment(with_ones(x, True, True))
                average(from_first(state, "gram", square), square, self.numbers["decay"])
        graphs.outside(self._renew_when_due)

    def _renew_when_due(self) -> None:
        if self.steps % self.every != 0:
            return
        damping = along(self.numbers["damping"], self.states[0]["gram"])
        with matmul_precision("fp32"):
            systems = [
                (damped(state["gram"], damping),)  # type: ignore[arg-type]  # one for each member
                for state in self.states
            ]
            for state, found in zip(self.states, in_threads(inverse, systems), strict=True):
                old = state.get("inverse", found)
                put(state, inverse=torch.where(all_finite(found), found, old))

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        joint = join(gradients)
        with matmul_precision("fp32"):
            direction = joint @ state["inverse"]
        # As LocoProp does with a solution that is not finite: the ordinary gradient replaces it.
        direction = torch.where(all_finite(direction), direction, torch.nan_to_num(joint))
        directions = {"weight": direction[..., :-1].contiguous(), "bias": direction[..., -1]}
        super().move(layer, state, directions)


class Spectral(Update):
    """LocoProp's spectral step at its full length: ``solver="spectral"`` without growth."""

    def prepare(self, passes: Passes) -> None:
        graphs.outside(partial(self._renew_when_due, passes.inputs))

    def _renew_when_due(self, inputs: list[Tensor]) -> None:
        if not solvers.Spectral(every=self.every).renews(self.steps):
            return
        falling = 1 / (1 + self.steps / self.numbers["fall"])
        damping = torch.maximum(self.numbers["damping"], falling)
        damping = damping.clamp_min(64 * torch.finfo(damping.dtype).eps)
        systems = []
        with matmul_precision("fp32"):
            for state, x in zip(self.states, inputs, strict=True):
                square = second_moment(with_ones(x, True, True))
                mean = square.diagonal(dim1=-2, dim2=-1).mean(-1)
                square = square / along(mean.clamp_min(torch.finfo(mean.dtype).tiny), square)
                average(from_first(state, "gram", square), square, self.numbers["averaging"])
                eye = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
                before = state.get("inverse", eye.expand_as(square))
                systems.append((state["gram"], along(damping, square), before))
            inverse_of = partial(damped_inverse, inverse_of=dispatch.inverse)
            for state, found in zip(self.states, in_threads(inverse_of, systems), strict=True):
                put(state, inverse=found)

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        joint = join(gradients)
        momentum = along(self.numbers["momentum"], joint)
        past = from_zero(state, "average", joint)
        new = torch.lerp(joint, past, momentum)
        with matmul_precision("fp32"):
            direction = dispatch.product(torch.lerp(joint, new, momentum), state["inverse"])
        factor = dispatch.polar(direction)
        lengths = torch.linalg.vector_norm(factor, dim=-1, keepdim=True)
        square = lengths.square() / factor.shape[-1]
        past_rows = from_zero(state, "rows", square)
        rows = torch.lerp(square, past_rows, along(self.numbers["decay"], square))
        scale = along(0.2 * max(factor.shape[1:]) ** 0.5 * self.now["lr"], factor)
        has_gradient = joint.abs().sum((-2, -1), keepdim=True) != 0  # small squares may be zero
        moved = -scale * equal_rows(lengths, rows) * factor * has_gradient
        past_size = from_zero(state, "bias_size", joint[..., -1:])
        decay = longer(along(self.numbers["decay"], joint), momentum)
        size = mean_size(past_size, above_rounding(joint), decay)
        rate = along(self.numbers["bias_rate"] * self.now["lr"], joint) * has_gradient
        moved[..., -1:] -= rate * relative(new[..., -1:], size)
        self.shrink(layer["weight"])
        # As LocoProp does with a solution that is not finite, which is not written.
        sound = all_finite(moved)
        for name, part in split(torch.where(sound, moved, 0.0), layer).items():
            layer[name].add_(part)
        torch.where(sound, new, past, out=past)
        torch.where(sound, rows, past_rows, out=past_rows)
        torch.where(sound, size, past_size, out=past_size)


class Soap(Update):
    """SOAP as in `pytorch_optimizer`: Adam in the eigenbases of Shampoo's statistics.

    The first step collects statistics and moves nothing. Biases have no basis.
    """

    def begin(self, rate: float) -> None:
        super().begin(rate)
        t = self.steps
        first, second = (1 - self.numbers[name] ** t for name in ("momentum", "decay"))
        put(self.now, corrected=self.now["lr"] * second.sqrt() / first)

    def advance(self, layers: list[Tensors], passes: Passes) -> None:
        if self.steps > 0:
            super().advance(layers, passes)
        for state, gradients in zip(self.states, passes.gradients, strict=True):
            for side, outer in outer_products(gradients["weight"]).items():
                average(from_zero(state, side, outer), outer, self.numbers["decay"])

    def end(self) -> None:
        if self.steps == 0:
            self._renew([state[side] for state in self.states for side in SIDES], eigenbasis)
        elif self.steps % self.every == 0:
            self._renew([self._sorted(state, side) for state in self.states for side in SIDES], q)
        super().end()

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        rate = self.now["corrected"]
        weight, gradient = layer["weight"], gradients["weight"]
        left, right = state["left_basis"], state["right_basis"]
        mean, square = self._moments(state, "weight", gradient, left.mT @ gradient @ right)
        step = (left.mT @ mean @ right) / (square.sqrt() + along(self.numbers["eps"], square))
        weight.sub_(along(rate, weight) * (left @ step @ right.mT))
        self.shrink(weight)
        bias, gradient = layer["bias"], gradients["bias"]
        mean, square = self._moments(state, "bias", gradient, gradient)
        step = mean / (square.sqrt() + along(self.numbers["eps"], square))
        bias.sub_(along(rate, bias) * step)

    def _moments(
        self, state: Tensors, name: str, gradient: Tensor, projected: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The average of the gradient, and that of its squares in the eigenbases."""
        for kind, new, decay in (
            ("average", gradient, self.numbers["momentum"]),
            ("square", projected.square(), self.numbers["decay"]),
        ):
            old = from_zero(state, f"{name}_{kind}", new)
            old.lerp_(new, 1 - along(decay, new))
        return state[f"{name}_average"], state[f"{name}_square"]

    def _sorted(self, state: Tensors, side: str) -> Tensor:
        """Return a basis after a power iteration; sort its columns and the squares by eigenvalue."""
        basis = state[f"{side}_basis"]
        product = state[side] @ basis
        order = (basis * product).sum(-2).argsort(-1, descending=True)
        across, along_rows = order.unsqueeze(-2), order.unsqueeze(-1)
        places = (along_rows, -2) if side == "left" else (across, -1)
        put(state, weight_square=torch.take_along_dim(state["weight_square"], *places))
        return torch.take_along_dim(product, across, -1)

    def _renew(self, matrices: list[Tensor], function: Callable[..., Tensor]) -> None:
        bases = iter(in_threads(function, [(matrix,) for matrix in matrices]))
        for state in self.states:
            put(state, left_basis=next(bases), right_basis=next(bases))


class Shampoo(Update):
    """`torch_locoprop.baselines.Shampoo` with the length of RMSProp's step."""

    def begin(self, rate: float) -> None:
        super().begin(rate)
        t, decay = self.steps + 1, self.numbers["decay"].double()
        # The average that Adam's correction makes of one that starts at zero.
        corrected = decay * (1 - decay ** (t - 1)) / (1 - decay**t)
        put(self.now, decay=corrected.to(self.now["lr"].dtype))

    def prepare(self, passes: Passes) -> None:
        for state, gradients in zip(self.states, passes.gradients, strict=True):
            for side, outer in outer_products(gradients["weight"]).items():
                average(from_first(state, side, outer), outer, self.now["decay"])
        graphs.outside(self._renew_when_due)

    def _renew_when_due(self) -> None:
        if self.steps % self.every != 0 and self.steps >= self.early:
            return
        eps = self.numbers["eps"].unsqueeze(-1)
        matrices = [(state[side], eps) for state in self.states for side in SIDES]
        roots = iter(in_threads(inverse_fourth_root, matrices))
        for state in self.states:
            put(state, left_root=next(roots), right_root=next(roots))

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        self.shrink(layer["weight"])
        for name, gradient in gradients.items():
            new = gradient.square()
            square = from_first(state, f"{name}_square", new)
            average(square, new, self.now["decay"])
            direction = gradient / (square.sqrt() + along(self.numbers["eps"], square))
            if name == "weight":
                own = state["left_root"] @ gradient @ state["right_root"]
                scale = length(direction) / length(own).clamp_min(torch.finfo(own.dtype).tiny)
                direction = scale * own
            moving = from_zero(state, f"{name}_momentum", gradient)
            moving.mul_(along(self.numbers["momentum"], gradient)).add_(direction)
            layer[name].sub_(along(self.now["lr"], gradient) * moving)


class KFac(Update):
    """`torch_locoprop.baselines.KFAC`; `clip` bounds the step of all layers of a member together."""

    samples = True

    def begin(self, rate: float) -> None:
        super().begin(rate)
        # A running average that begins as the plain mean.
        put(self.now, decay=self.numbers["decay"].clamp_max(1 - 1 / (self.steps + 1)))

    def prepare(self, passes: Passes) -> None:
        for state, x, g in zip(self.states, passes.inputs, passes.sampled(), strict=True):
            for name, rows in (("inputs", with_ones(x, True, True)), ("gradients", g)):
                new = second_moment(rows)
                average(from_first(state, name, new), new, self.now["decay"])
        graphs.outside(self._renew_when_due)
        self._directions, products = [], []
        for state, gradients in zip(self.states, passes.gradients, strict=True):
            joint = join(gradients)
            found = state["inverse_gradients"] @ joint @ state["inverse_inputs"]
            self._directions.append(found)
            products.append((found * joint).sum((-2, -1)))
        norm = torch.stack(products).sum(0)
        self._scale = (self.numbers["clip"] / (self.now["lr"] ** 2 * norm)).sqrt().clamp_max(1.0)
        self._directions.reverse()  # `move` takes them from the end

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        direction = self._directions.pop()
        direction = direction * along(self._scale, direction)
        moving = from_zero(state, "momentum", direction)
        moving.mul_(along(self.numbers["momentum"], moving)).add_(direction)
        self.shrink(layer["weight"])
        change = along(self.now["lr"], moving) * moving
        layer["weight"].sub_(change[..., :-1])
        layer["bias"].sub_(change[..., -1])

    def _renew_when_due(self) -> None:
        if self.steps >= EARLY and self.steps % self.every != 0:
            return
        damping = along(self.numbers["damping"], self.states[0]["inputs"])
        factors = [
            (factor,)
            for state in self.states
            for factor in damped_factors(
                state["inputs"],
                state["gradients"],
                damping,  # type: ignore[arg-type]  # one for each member
            )
        ]
        inverses = iter(in_threads(inverse, factors))
        for state in self.states:
            put(state, inverse_inputs=next(inverses), inverse_gradients=next(inverses))


SIDES = ("left", "right")


def all_finite(tensor: Tensor) -> Tensor:
    """Return for each member whether all its entries are finite, ``[K, 1, 1]``."""
    return tensor.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def outer_products(gradient: Tensor) -> Tensors:
    """Return ``G Gᵀ`` and ``Gᵀ G``."""
    return {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}


def orthogonalised(update: Tensor) -> Tensor:
    """Return Muon's approximate polar factor: five quintic Newton–Schulz iterations in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    found = update.bfloat16()
    found = found.mT if tall else found
    found = found / length(found).clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, polynomial, found, beta=a)
    return found.mT if tall else found
