"""LocoProp once more, in plain numpy and float64: what the library is compared with.

Nothing here is fast, clever or shared with the library. A step is written as the paper's algorithm
boxes are: forward pass, backward pass by hand, explicit targets, then ``T`` times the residual
``δ(a)`` at the current pre-activations, its weight gradient ``δᵀX``, and one update of the solver.

Layout: ``X [rows, n (+1)]`` (the last column is the constant one of the bias), ``W [d, n (+1)]``,
pre-activations ``a = X Wᵀ [rows, d]``, post-activations ``y = f(a)``, and their gradients
``g = ∂L/∂a`` and ``dy = ∂L/∂y``. The last transfer sits inside the loss and chooses it: sigmoid,
softmax and linear come with sigmoid cross-entropy, softmax cross-entropy and half the squared
error, all summed over the features and divided by ``batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAKY_SLOPE = 0.01


# Transfers


def sigmoid(a: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-a))


def softmax(a: Array) -> Array:
    exponentials = np.exp(a - a.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def transfer(name: str, a: Array) -> Array:
    """Return ``f(a)``."""
    match name:
        case "linear":
            return a
        case "tanh":
            return np.tanh(a)
        case "relu":
            return np.where(a > 0, a, 0.0)
        case "leaky_relu":
            return np.where(a > 0, a, LEAKY_SLOPE * a)
        case "sigmoid":
            return sigmoid(a)
        case "softplus":
            return np.logaddexp(0.0, a)
        case "softmax":
            return softmax(a)
    raise ValueError(f"Unknown transfer {name!r}.")


def derivative(name: str, a: Array) -> Array:
    """Return ``f'(a)`` of an elementwise transfer."""
    match name:
        case "linear":
            return np.ones_like(a)
        case "tanh":
            return 1.0 - np.tanh(a) ** 2
        case "relu":
            return np.where(a > 0, 1.0, 0.0)
        case "leaky_relu":
            return np.where(a > 0, 1.0, LEAKY_SLOPE)
        case "sigmoid":
            return sigmoid(a) * (1.0 - sigmoid(a))
        case "softplus":
            return sigmoid(a)
    raise ValueError(f"No elementwise derivative of {name!r}.")


def jacobians(name: str, a: Array) -> Array:
    """Return ``J_f(a)`` of every row, ``[rows, d, d]``: the Hessians of the integral F."""
    if name == "softmax":
        y = softmax(a)
        return np.stack([np.diag(row) - np.outer(row, row) for row in y])
    return np.stack([np.diag(row) for row in derivative(name, a)])


def jacobian_transposed(name: str, a: Array, v: Array) -> Array:
    """Return ``J_f(a)ᵀ v``, row by row."""
    if name == "softmax":
        return np.einsum("rij,ri->rj", jacobians(name, a), v)
    return derivative(name, a) * v


# Losses, as functions of the last post-activation


def loss_value(output: str, y: Array, target: Array, batch: int) -> float:
    """Return the matching loss of the transfer ``output`` at ``y = f(a)``, up to a constant."""
    match output:
        case "sigmoid":
            terms = -target * np.log(y) - (1.0 - target) * np.log(1.0 - y)
        case "softmax":
            terms = -target * np.log(y)
        case "linear":
            terms = 0.5 * (y - target) ** 2
        case _:
            raise ValueError(f"No loss for the output transfer {output!r}.")
    return float(terms.sum() / batch)


def loss_gradient(output: str, y: Array, target: Array, batch: int) -> Array:
    """Return ``∂L/∂y`` at the last layer.

    For softmax, ``g / y`` is as good: it exceeds ``−target / y / batch`` by the constant 1/batch in
    every feature, and the Jacobian of softmax, which multiplies it in every use, maps constants to
    zero.
    """
    match output:
        case "sigmoid":
            return (y - target) / (y * (1.0 - y)) / batch
        case "softmax":
            return -target / y / batch
        case "linear":
            return (y - target) / batch
    raise ValueError(f"No loss for the output transfer {output!r}.")


# Forward and backward


def with_ones(x: Array, bias: bool) -> Array:
    return np.hstack([x, np.ones((len(x), 1))]) if bias else x


@dataclass
class Pass:
    """What one forward and backward pass leaves behind, one entry a layer."""

    X: list[Array]
    a: list[Array]
    y: list[Array]
    g: list[Array]
    dy: list[Array]
    loss: float

    def weight_gradient(self, layer: int) -> Array:
        """Return the BackProp gradient ``G = gᵀX``."""
        return self.g[layer].T @ self.X[layer]


def forward_backward(
    weights: Sequence[Array],
    transfers: Sequence[str],
    bias: bool,
    x: Array,
    target: Array,
    batch: int,
) -> Pass:
    """Return all activations, and the gradients of the loss with respect to them."""
    depth = len(weights)
    X: list[Array] = []
    a: list[Array] = []
    y: list[Array] = []
    for W, name in zip(weights, transfers, strict=True):
        X.append(with_ones(y[-1] if y else x, bias))
        a.append(X[-1] @ W.T)
        y.append(transfer(name, a[-1]))

    g: list[Array] = [np.empty(0)] * depth
    dy: list[Array] = [np.empty(0)] * depth
    dy[-1] = loss_gradient(transfers[-1], y[-1], target, batch)
    for m in reversed(range(depth)):
        g[m] = jacobian_transposed(transfers[m], a[m], dy[m])
        if m > 0:
            inputs = weights[m].shape[1] - int(bias)
            dy[m - 1] = g[m] @ weights[m][:, :inputs]
    return Pass(X, a, y, g, dy, loss_value(transfers[-1], y[-1], target, batch))


# Solvers, with the semantics of TensorFlow


class Solver:
    """One first-order solver of one weight matrix; its state lives across steps."""

    def __init__(self, name: str, shape: tuple[int, ...], mu: float, rho: float, eps: float):
        self.name, self.mu, self.rho, self.eps = name, mu, rho, eps
        self.m = np.zeros(shape)
        # RMSProp's average of squares starts at one, Adagrad's sum at ε.
        self.v = np.full(shape, {"rmsprop": 1.0, "adagrad": eps}.get(name, 0.0))
        self.t = 0

    def update(self, W: Array, gradient: Array, eta: float) -> Array:
        """Return the weights after one iteration with the rate ``eta``."""
        mu, rho, eps = self.mu, self.rho, self.eps
        self.t += 1
        match self.name:
            case "sgd":
                return W - eta * gradient
            case "momentum":
                self.m = mu * self.m + gradient
                return W - eta * self.m
            case "nesterov":
                self.m = mu * self.m + gradient
                return W - eta * (gradient + mu * self.m)
            case "adagrad":
                self.v = self.v + gradient**2
                return W - eta * gradient / np.sqrt(self.v)
            case "rmsprop":
                self.v = rho * self.v + (1.0 - rho) * gradient**2
                self.m = mu * self.m + eta * gradient / np.sqrt(self.v + eps)
                return W - self.m
            case "adam":
                self.m = mu * self.m + (1.0 - mu) * gradient
                self.v = rho * self.v + (1.0 - rho) * gradient**2
                rate = eta * np.sqrt(1.0 - rho**self.t) / (1.0 - mu**self.t)
                return W - rate * self.m / (np.sqrt(self.v) + eps)
        raise ValueError(f"Unknown solver {self.name!r}.")


# One layer's local problem


def residual_at_target(
    variant: str, name: str, a0: Array, g: Array, dy: Array, gamma: float, D: Array | None
):
    """Return the residual ``δ(a)`` of a layer as a function, with its target fixed.

    Algorithms LocoProp-S, LocoProp-M, PocoProp-S and PocoProp-M; ProxProp is LocoProp-S below the
    last layer; ``natural-s`` takes the Fisher matrix ``D [d, d]`` of the pre-activations.
    """
    match variant:
        case "locoprop-s" | "proxprop":
            a_target = a0 - gamma * g
            return lambda a: a - a_target
        case "natural-s":
            a_target = a0 - gamma * g @ np.linalg.inv(D)
            return lambda a: a - a_target
        case "locoprop-m":
            y_target = transfer(name, a0) - gamma * g
            return lambda a: transfer(name, a) - y_target
        case "pocoprop-s":
            y_target = transfer(name, a0) - gamma * dy
            return lambda a: jacobian_transposed(name, a, transfer(name, a) - y_target)
        case "pocoprop-m":
            a_target = a0 - gamma * dy
            return lambda a: jacobian_transposed(name, a, a - a_target)
    raise ValueError(f"Unknown variant {variant!r}.")


def exact_displacement(
    variant: str,
    name: str,
    a0: Array,
    G: Array,
    gram: Array,
    gamma: float,
    eta: float,
    D: Array | None,
) -> Array:
    """Return ``ΔW``: the closed form of LocoProp-S, or the Sylvester form for LocoProp-M.

    ``gram`` is ``XᵀX``. LocoProp-M replaces the Hessians of the rows by their mean ``H``, and then
    ``Δ + η H Δ XᵀX = −ηγ G``.
    """
    identity = np.eye(len(gram))
    if variant in ("locoprop-s", "proxprop"):
        return -eta * gamma * G @ np.linalg.inv(identity + eta * gram)
    if variant == "natural-s":
        return -eta * gamma * np.linalg.inv(D) @ G @ np.linalg.inv(identity + eta * gram)
    if variant != "locoprop-m":
        raise ValueError(f"{variant!r} has no exact solver.")
    H = jacobians(name, a0).mean(axis=0)
    if name == "softmax":
        # Row-major vec: vec(H Δ C) = (H ⊗ Cᵀ) vec(Δ), and C is symmetric.
        system = np.eye(G.size) + eta * np.kron(H, gram)
        return np.linalg.solve(system, -eta * gamma * G.ravel()).reshape(G.shape)
    return np.stack(
        [
            np.linalg.solve(identity + eta * h * gram, -eta * gamma * row)
            for h, row in zip(np.diag(H), G, strict=True)
        ]
    )


def soft_threshold(z: Array, threshold: float) -> Array:
    return np.sign(z) * np.maximum(np.abs(z) - threshold, 0.0)


# The optimizer


@dataclass
class Reference:
    """A multilayer network and its LocoProp optimizer.

    ``weights`` are ``[d, n + 1]`` with the bias as last column, or ``[d, n]`` where ``bias`` is
    false. ``regularizer`` is None, ``"l2"``, or a number: the strength of L1. ``fishers`` are the
    matrices ``D`` of ``natural-s``, one a layer.
    """

    weights: list[Array]
    transfers: list[str]
    bias: bool = True
    lr: float = 1e-2
    variant: str = "locoprop-s"
    gamma: float = 1.0
    local_steps: int = 1
    solver: str = "sgd"
    momentum: float = 0.0
    decay: float = 0.9
    eps: float = 1e-5
    weight_decay: float = 0.0
    local_decay: str = "linear"
    local_reduction: str = "sum"
    regularizer: str | float | None = None
    fishers: list[Array] | None = None

    def __post_init__(self) -> None:
        self.weights = [W.copy() for W in self.weights]
        self.solvers = [
            Solver(self.solver, W.shape, self.momentum, self.decay, self.eps) for W in self.weights
        ]

    def step(self, x: Array, target: Array, batch: int | None = None) -> float:
        """Train on ``x [rows, n]`` and return the loss before the step."""
        batch = len(x) if batch is None else batch
        passed = forward_backward(self.weights, self.transfers, self.bias, x, target, batch)
        self.weights = [self._updated(m, passed) for m in range(len(self.weights))]
        return passed.loss

    def _updated(self, m: int, passed: Pass) -> Array:
        W0 = self._decayed(self.weights[m])
        G = passed.weight_gradient(m)
        if self.variant == "proxprop" and m == len(self.weights) - 1:
            return W0 - self.lr * self.gamma * G

        X, g, dy, name = passed.X[m], passed.g[m], passed.dy[m], self.transfers[m]
        a0 = X @ W0.T
        D = self.fishers[m] if self.fishers is not None else None
        if self.solver == "exact":
            gram = X.T @ X / (len(X) if self.local_reduction == "mean" else 1)
            return W0 + exact_displacement(self.variant, name, a0, G, gram, self.gamma, self.lr, D)

        # The mean of the rows' own local losses: a row's gradient is then that of its own loss, of
        # which the backward pass has seen one share in so many rows.
        rows = len(X) if self.local_reduction == "mean" else 1
        g, dy = rows * g, rows * dy
        residual = residual_at_target(self.variant, name, a0, g, dy, self.gamma, D)
        # Decoupled weight decay leaves the first iteration BackProp's, with γ g of the forward pass.
        # The targets of LocoProp see to it by themselves; the Jacobian of PocoProp has moved with
        # the weights, and a constant makes up for it.
        moved = self.variant.startswith("pocoprop") and self.weight_decay != 0.0
        correction = self.gamma * g - residual(a0) if moved else 0.0
        W = W0
        for t in range(self.local_steps):
            gradient = (residual(X @ W.T) + correction).T @ X / rows
            if self.regularizer == "l2":
                gradient = gradient + (W - W0) / self.lr
            eta = self._local_rate(t)
            W = self.solvers[m].update(W, gradient, eta)
            if isinstance(self.regularizer, float):
                W = W0 + soft_threshold(W - W0, eta * self.regularizer)
        return W

    def _decayed(self, W: Array) -> Array:
        """Return ``W`` with its weights, not its bias, shrunk by ``1 − lr · weight_decay``."""
        W = W.copy()
        W[:, : W.shape[1] - int(self.bias)] *= 1.0 - self.lr * self.weight_decay
        return W

    def _local_rate(self, t: int) -> float:
        if self.local_decay == "constant":
            return self.lr
        return self.lr * max(1.0 - t / self.local_steps, 0.25)
