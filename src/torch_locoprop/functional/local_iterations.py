"""Steps of T local iterations: LocoProp-S from a gradient and ``XᵀX``, LocoProp-M from the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.config.settings import DEFAULTS
from torch_locoprop.functional.arguments import (
    check_settings,
    check_state,
    first_order_solver,
    regularizer_without_fisher,
    with_gram,
    working_dtype,
)
from torch_locoprop.functional.squared_problem import squared_problem
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.tensors import Number, Tensors, join, split, without_autocast
from torch_locoprop.paper.transfers import Transfer, get
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import Numbers, Solver
from torch_locoprop.solvers.first_order import Iterate


def locoprop_s(
    grad: Tensor,
    gram: Tensor,
    state: Tensors | None,
    *,
    lr: Number,
    gamma: Number,
    local_steps: int,
    solver: str | Solver = DEFAULTS["solver"],
    momentum: Number = DEFAULTS["momentum"],
    decay: Number = DEFAULTS["decay"],
    eps: Number = DEFAULTS["eps"],
    local_decay: str = DEFAULTS["local_decay"],
    regularizer: str | Regularizer | None = DEFAULTS["regularizer"],
) -> tuple[Tensor, Tensors]:
    """Return the step of LocoProp-S (Algorithm 1) and the new state.

    The gradient of the local loss is ``γ G + Δ C``, so the step needs no rows and no weights. The first
    local iteration is BackProp with the learning rate ``lr · gamma``.

    Args:
        grad: G, ``[..., d, n]``.
        gram: C, dense, block-diagonal or diagonal. The sum over rows ``XᵀX`` corresponds to
            ``local_reduction="sum"``, the default of ``LocoProp``, the mean ``XᵀX / rows`` to
            ``local_reduction="mean"``.
        state: None at first, then what the last call returned.
        lr: the learning rate η of a local iteration.
        gamma: the distance γ of the target.
        local_steps: number T of local iterations.
        solver: a first-order solver, by name or as an object.
        momentum: the solver's momentum.
        decay: the solver's decay of squared gradients.
        eps: the solver's ε.
        local_decay: ``"linear"`` or ``"constant"``, the learning rate over local iterations.
        regularizer: None, ``"l2"``, ``"l1"``, or an object.

    Returns:
        The displacement, ``[..., d, n]``, and the state.

    Raises:
        ValueError: if the shapes do not fit each other, or a setting is out of range.

    Example::

        >>> state = None
        >>> displacement, state = locoprop_s(
        ...     grad, gram, state, lr=2e-5, gamma=100.0, local_steps=10
        ... )
        >>> weight = weight + displacement
    """
    check_settings(
        lr=lr,
        gamma=gamma,
        local_steps=local_steps,
        momentum=momentum,
        decay=decay,
        eps=eps,
        local_decay=local_decay,
    )
    own, curvature = with_gram(grad, gram)
    iterations = first_order_solver(solver, eps)
    penalty = regularizer_without_fisher(regularizer)
    problem = squared_problem(own, curvature, lr=lr, gamma=gamma, regularizer=penalty)
    with without_autocast(own):
        new, states = iterations.iterate(
            Iterate(problem, curvature),
            {"weight": check_state(state, iterations, own)},
            {"weight": Numbers(lr, momentum, decay, eps)},
            local_steps,
            local_decay,
            iterations.advance_,
        )
    return new["weight"].to(grad.dtype), states["weight"]


def locoprop_m(
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    grad: Tensor,
    transfer: str | Transfer,
    state: Tensors | None,
    *,
    lr: Number,
    gamma: Number,
    local_steps: int,
    solver: str | Solver = DEFAULTS["solver"],
    momentum: Number = DEFAULTS["momentum"],
    decay: Number = DEFAULTS["decay"],
    eps: Number = DEFAULTS["eps"],
    local_decay: str = DEFAULTS["local_decay"],
    local_reduction: str = DEFAULTS["local_reduction"],
    regularizer: str | Regularizer | None = DEFAULTS["regularizer"],
) -> tuple[Tensor, Tensors]:
    """Return the step of LocoProp-M (Algorithm 2) and the new state.

    The first local iteration is BackProp with the learning rate ``lr · gamma``; each further one takes
    two products with the rows.

    Args:
        weight: W, ``[..., d, n]``.
        bias: b, ``[..., d]``; None for a layer without one.
        inputs: the layer's input rows X, ``[..., rows, n]``.
        grad: G, the ordinary gradient of the loss in the weights: ``[..., d, n+1]`` of ``[W b]``, or
            ``[..., d, n]`` of W alone; a bias then keeps its value.
        transfer: the transfer f behind the layer, by name or as a
            :class:`~torch_locoprop.transfers.Transfer`.
        state: None at first, then what the last call returned.
        lr: the learning rate η of a local iteration.
        gamma: the distance γ of the target.
        local_steps: number T of local iterations.
        solver: a first-order solver, by name or as an object.
        momentum: the solver's momentum.
        decay: the solver's decay of squared gradients.
        eps: the solver's ε.
        local_decay: ``"linear"`` or ``"constant"``, the learning rate over local iterations.
        local_reduction: ``"sum"`` or ``"mean"`` of the local loss over the rows.
        regularizer: None, ``"l2"``, ``"l1"``, or an object.

    Returns:
        The displacement, of the shape of ``grad``, and the state.

    Raises:
        ValueError: if the shapes do not fit each other, or a setting is out of range.

    Example::

        >>> grad = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(-1)], dim=-1)
        >>> displacement, state = locoprop_m(
        ...     layer.weight, layer.bias, x, grad, "tanh", state, lr=1e-5, gamma=10.0, local_steps=10
        ... )
        >>> layer.weight.data += displacement[:, :-1]
        >>> layer.bias.data += displacement[:, -1]
    """
    check_settings(
        lr=lr,
        gamma=gamma,
        local_steps=local_steps,
        momentum=momentum,
        decay=decay,
        eps=eps,
        local_decay=local_decay,
        local_reduction=local_reduction,
    )
    _check_shapes(weight, bias, inputs, grad)
    given = (weight, inputs, grad) if bias is None else (weight, bias, inputs, grad)
    dtype = working_dtype(*given)
    tensors = {"weight": weight.detach().to(dtype)}
    if bias is not None:
        tensors["bias"] = bias.detach().to(dtype)
    with_bias = grad.shape[-1] > weight.shape[-1]
    moving = tensors if with_bias else {"weight": tensors["weight"]}
    own = grad.to(dtype)
    iterations = first_order_solver(solver, eps)
    problem = LocalProblem(
        linear_map=Dense(),
        x=inputs.detach().to(dtype),
        start={name: torch.zeros_like(tensor) for name, tensor in moving.items()},
        fixed={name: tensor for name, tensor in tensors.items() if name not in moving},
        backprop=split(own, moving),
        target=VARIANTS["locoprop-m"].target,
        loss=VARIANTS["locoprop-m"].loss,
        transfer=get(transfer),
        gamma=gamma,
        eta=lr,
        regularizer=regularizer_without_fisher(regularizer),
        row_weight=1 / max(inputs.shape[-2], 1) if local_reduction == "mean" else 1.0,
        base=moving,
    )
    with without_autocast(own):
        new, states = iterations.solve(
            problem,
            _by_name(check_state(state, iterations, own), moving),
            dict.fromkeys(moving, Numbers(lr, momentum, decay, eps)),
            local_steps,
            local_decay,
        )
    return join(new).to(grad.dtype), _joined(states)


def _by_name(state: Tensors, moving: Tensors) -> dict[str, Tensors]:
    """Return the state of each tensor, from entries in the shape of the joint gradient."""
    return {
        name: {
            key: split(entry, moving)[name] if entry.dim() > 0 else entry
            for key, entry in state.items()
        }
        for name in moving
    }


def _joined(states: dict[str, Tensors]) -> Tensors:
    """Return entries in the shape of the joint gradient; the inverse of :func:`_by_name`."""
    return {
        key: join({name: state[key] for name, state in states.items()})
        if entry.dim() > 0
        else entry
        for key, entry in states["weight"].items()
    }


def _check_shapes(weight: Tensor, bias: Tensor | None, inputs: Tensor, grad: Tensor) -> None:
    """Raise ``ValueError`` if the shapes of a layer's tensors do not fit each other."""
    *leading, d, n = weight.shape if weight.dim() >= 2 else (0, 0)
    stack = "".join(f"{size}, " for size in leading)
    given = {"inputs": inputs, "grad": grad}
    right = weight.dim() >= 2
    right = right and inputs.dim() == weight.dim() and inputs.shape[-1] == n
    right = right and list(inputs.shape[:-2]) == leading
    columns = (n,) if bias is None else (n, n + 1)
    right = right and list(grad.shape[:-1]) == [*leading, d] and grad.shape[-1] in columns
    if bias is not None:
        given["bias"] = bias
        right = right and list(bias.shape) == [*leading, d]
    if not right:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        wide = f"[{stack}{d}, {n}]" + ("" if bias is None else f" or [{stack}{d}, {n + 1}]")
        raise ValueError(
            f"Shapes do not fit a weight of shape {list(weight.shape)}: {shapes}. Expected inputs "
            f"[{stack}rows, {n}] (flatten sequences to rows), bias [{stack}{d}], and grad {wide}: the "
            "gradient of the weights, not of the layer's outputs."
        )
