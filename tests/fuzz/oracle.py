"""The expected weights of a program: LocoProp once more, from autograd and the paper's formulas.

Nothing here knows how the library records or steps. A plain copy of the model runs in float64 and keeps
every value with its gradient. The rows X of a layer are found by its linearity: the layer's outputs for
unit vectors as weights. Residuals, solvers and closed forms are those of ``reference.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import reference
import torch
from fuzz import matrices
from fuzz.programs import FALLBACK_LR, Model, Program, Seen
from fuzz.roles import Roles
from reference import Array
from torch import Tensor


def train(program: Program) -> list[Tensor]:
    """Return the parameters after all steps."""
    model = Model(program, plain=True)
    roles = Roles(program)
    states: dict[tuple[int, int], Any] = {}
    for step in range(program.steps):
        model.zero_grad()
        model.seen.clear()
        for part in range(program.micro_batches):
            outputs = model(program.batch(part, step))
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            loss = sum(program.losses(outputs, part, step))
            if program.penalty:
                weights = [m.weight for m in model.layers if m.weight.requires_grad]
                loss = loss + program.penalty * sum(w.square().sum() for w in weights)
            if loss.requires_grad:
                loss.backward()
        clip = _clip_factor(model, program.clip)
        with torch.no_grad():
            for number in range(len(model.layers)):
                _step_layer(program, roles, model, number, states, clip, step)
            for gain in model.gains:
                if gain.grad is not None:
                    gain -= FALLBACK_LR * clip * gain.grad
    return [p.detach() for p in model.parameters()]


def _clip_factor(model: Model, most: float | None) -> float:
    """Return the factor of all gradients that brings their norm to at most ``most``."""
    if most is None:
        return 1.0
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return min(1.0, most / (float(sum(squares)) ** 0.5 + 1e-6))


# ---- one layer -------------------------------------------------------------------------------------


def _step_layer(
    program: Program,
    roles: Roles,
    model: Model,
    number: int,
    states: dict[tuple[int, int], Any],
    clip: float,
    step: int,
) -> None:
    """Write the new weights of one layer."""
    module = model.layers[number]
    trained = [n for n, p in module.named_parameters() if p.grad is not None]
    if not trained:
        return
    runs: dict[int, list[Seen]] = {}  # of each instruction, one for each part of the batch
    for each in model.seen:
        runs.setdefault(each.index, []).append(each)
    calls = [
        (index, part, each)
        for index, instruction in enumerate(program.instructions)
        if instruction.op == "layer" and instruction.what == number
        for part, each in enumerate(runs[index])
        if each.value.grad is not None
    ]
    transfer, behind = roles.transfer(number, sorted({index for index, *_ in calls}))
    X = np.concatenate([matrices.rows_of_inputs(module, e.inputs) for *_, e in calls], axis=1)
    g = np.concatenate([matrices.rows(module, e.value.grad) for *_, e in calls], axis=1) * clip
    dy = None
    if transfer is not None and min(behind.values()) >= 0:
        parts = [
            matrices.rows(module, runs[behind[index]][part].gradient.reshape(each.value.shape))
            for index, part, each in calls
        ]
        dy = np.concatenate(parts, axis=1) * clip
    for group in range(len(X)):
        problem = _Problem(
            program.method,
            transfer,
            matrices.columns(X[group], trained),
            matrices.still(module, group, trained, X[group]),
            g[group],
            None if dy is None else dy[group],
            decayed=X.shape[-1] if "weight" in trained else 0,
        )
        W = matrices.joint(module, group, trained)
        G = matrices.joint(module, group, trained, gradient=True) * clip
        state = states.setdefault((number, group), {})
        matrices.write(module, group, trained, problem.solve(W, G, state, step))


class _Problem:
    """The local problem of one layer, or of one group of a convolution."""

    def __init__(
        self,
        method: dict[str, Any],
        transfer: str | None,
        X: Array,
        still: Array,
        g: Array,
        dy: Array | None,
        decayed: int,  # columns of [W b] that weight decay shrinks
    ) -> None:
        self.decayed = decayed
        self.method, self.X, self.still = method, X, still
        variant = method.get("variant", "locoprop-s")
        self.variant = "locoprop-s" if transfer is None else variant
        self.name = transfer or "linear"
        self.g, self.dy = g, dy
        self.weight = 1 / len(X) if method.get("local_reduction") == "mean" else 1.0

    def solve(self, W: Array, G: Array, state: dict[str, Any], step: int) -> Array:
        """Return the new ``[W b]``, as far as it is trained."""
        method = self.method
        if "preset" in method:
            with_bias = 0 < self.decayed < W.shape[1]
            return W + spectral_move(method, G, self.X, state, step, with_bias)
        lr, gamma = method["lr"], method["gamma"]
        start = W.copy()
        start[:, : self.decayed] *= 1 - lr * method["weight_decay"]
        a0 = self._forward(start)
        if method["solver"] == "exact":
            gram = self.weight * self.X.T @ self.X
            return start + reference.exact_displacement(
                self.variant, self.name, a0, G, gram, gamma, lr, None
            )
        residual = self._residual(a0, self._forward(W))
        solver = state.setdefault(
            "solver",
            reference.Solver(
                method["solver"], W.shape, method["momentum"], method["decay"], method["eps"]
            ),
        )
        W, T = start, method["local_steps"]
        for t in range(T):
            change = residual(self._forward(W)) - residual(a0)
            gradient = gamma * G + self.weight * change.T @ self.X
            if method["regularizer"] == "l2":
                gradient = gradient + (W - start) / lr
            eta = lr * max(1 - t / T, 0.25) if method["local_decay"] == "linear" else lr
            W = solver.update(W, gradient, eta)
        return W

    def _forward(self, W: Array) -> Array:
        return self.X @ W.T + self.still

    def _residual(self, a0: Array, a: Array) -> Any:
        """Return ``δ(a)`` at the target of a problem with the sum or the mean of the rows' losses."""
        g, dy = self.g / self.weight, self.dy
        if self.variant.startswith("pocoprop"):
            if dy is None:  # the transfer is inside the loss, or the next layer follows
                dy = self.g / self._slope(a)
            dy = dy / self.weight
        return reference.residual_at_target(
            self.variant, self.name, a0, g, dy, self.method["gamma"], None
        )

    def _slope(self, a: Array) -> Array:
        if self.name == "softmax":
            return reference.softmax(a)
        return reference.derivative(self.name, a)


def spectral_move(
    method: dict[str, Any], G: Array, X: Array, state: dict[str, Any], step: int, with_bias: bool
) -> Array:
    """Return the displacement of one spectral step.

    The presets renew C in each of the first ten steps; programs are shorter. With a bias, the last
    column is its column, and it takes a step of its own in the preset ``spectral``.
    """
    mu, rho, past = method["momentum"], method["decay"], 0.8
    lr, power = {"general": (0.04, 1.0), "spectral": (0.015, 0.0)}[method["preset"]]
    gram = X.T @ X
    mean = np.trace(gram) / len(gram)
    gram = gram / mean if mean > 0 else gram
    state["gram"] = gram if step == 0 else past * state["gram"] + (1 - past) * gram
    damping = max(0.02, 1 / (1 + step / 50))
    gradients = state.setdefault("gradients", [])
    gradients.append(G)
    shares = [(1 - mu) * mu ** (len(gradients) - 1 - i) for i in range(len(gradients))]
    average = sum(s * each for s, each in zip(shares, gradients, strict=True))
    found = (mu * average + (1 - mu) * G) @ np.linalg.inv(
        state["gram"] + damping * np.eye(len(gram))
    )
    direction = found / _or_one(np.linalg.norm(found))
    for _ in range(5):
        square = direction.T @ direction
        factor = 3.4445 * np.eye(len(square)) - 4.775 * square + 2.0315 * square @ square
        direction = direction @ factor
    state["rows"] = rho * state.get("rows", 0.0) + (1 - rho) * (direction**2).mean(1)
    even = direction / np.array([_or_one(root) for root in np.sqrt(state["rows"])])[:, None]
    even = even * np.linalg.norm(direction) / _or_one(np.linalg.norm(even))
    length = (_agreed(gradients, mu) * _grown(gradients, mu, state)) ** power
    length *= float(G.any())  # without a gradient the layer stays
    state["moved"] = -lr * 0.2 * max(G.shape) ** 0.5 * even * length
    if with_bias and method["preset"] == "spectral":
        rho, biases = max(mu, rho), np.array([each[:, -1] for each in gradients])
        falling = (1 - rho) * rho ** np.arange(len(gradients) - 1, -1, -1.0)
        size = np.sqrt(falling @ biases**2)
        size = np.array([_or_one(each) for each in size])
        state["moved"][:, -1] -= lr * length * average[:, -1] / size
    return state["moved"]


def _before(gradients: list[Array], i: int, mu: float) -> Array:
    """Return the weighted mean of the gradients before the i-th, of the first if there is none."""
    weights = mu ** np.arange(i - 1, -1, -1.0) if i else np.ones(1)
    return np.average(gradients[: max(i, 1)], axis=0, weights=weights)


def _grown(gradients: list[Array], mu: float, state: dict[str, Any]) -> float:
    """Return how many times their length steps have, from the slope that the last one has left."""
    if "moved" in state:
        slope = (_before(gradients, len(gradients) - 1, mu) * state["moved"]).sum()
        left = -(gradients[-1] * state["moved"]).sum() / _or_one(abs(slope))
        excess = np.clip(left, -1.0, 1.0) - 0.2
        excess *= 1 - 0.97 ** len(gradients) if excess > 0 else 1.0
        state["growth"] = float(np.clip(state["growth"] * np.exp(0.1 * excess), 1.0, 16.0))
    return state.setdefault("growth", 1.0)


def _agreed(gradients: list[Array], mu: float) -> float:
    """Return the root of the share of the signal in the squares of the gradients."""
    common = square = 0.0
    for i, each in enumerate(gradients):
        mean = _before(gradients, i, mu)
        common = 0.97 * common + (each * mean).sum()
        square = 0.97 * square + (each**2).sum()
    start = 0.97 ** len(gradients)
    share = start + (1 - start) * common / _or_one(square)
    return float(np.sqrt(np.clip(share, 0.15**2, 1.0)))


def _or_one(number: float) -> float:
    return number if number > 0 else 1.0
