"""Steps without local iterations: the closed form, the spectral step and the polar factor."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.config.presets import PRESETS
from torch_locoprop.functional.arguments import check_settings, with_gram, working_dtype
from torch_locoprop.functional.squared_problem import squared_problem
from torch_locoprop.paper import spectral as pure
from torch_locoprop.paper.gram import Structure, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors, spread, without_autocast
from torch_locoprop.solvers import Numbers, Spectral

_SPECTRAL = PRESETS["spectral"].settings


def closed_form(
    grad: Tensor, gram: Tensor, *, damping: float | None, lr: Number = 1.0, gamma: Number = 1.0
) -> Tensor:
    """Return the solution of the local problem of LocoProp-S (Eq. 4), without local iterations.

    This is the step of ``LocoProp(variant="locoprop-s", solver=Exact(damping=damping))``,
    ``Δ = −lr γ G (C + λI)⁻¹``. With ``damping=None`` it is that of ``solver="exact"``, where 1/lr is
    the weight of the proximal term: ``Δ (I + lr C) = −lr γ G``.

    Args:
        grad: G, ``[..., d, n]``.
        gram: C, dense, block-diagonal or diagonal. The sum over rows ``XᵀX`` corresponds to
            ``local_reduction="sum"``, the mean ``XᵀX / rows`` to ``local_reduction="mean"``.
        damping: λ relative to the mean diagonal of all of C, > 0; None for the proximal term.
        lr: the learning rate.
        gamma: the distance γ of the target.

    Returns:
        The displacement Δ, ``[..., d, n]``; NaN where the damped C has no Cholesky factor by rounding.

    Raises:
        ValueError: if the shapes do not fit each other, or a number is out of range.

    Example::

        >>> grad, x, weight = torch.randn(5, 3), torch.randn(100, 3), torch.zeros(5, 3)
        >>> weight += closed_form(grad, x.T @ x / 100, damping=1e-2, lr=0.1)

    The solution is linear in G. To use one factorization in several steps, keep
    ``inverse = -closed_form(torch.eye(n), gram, damping=damping)`` and add ``-lr * grad @ inverse``.
    """
    check_settings(lr=lr, gamma=gamma)
    if damping is not None and not damping > 0:
        raise ValueError(f"Invalid damping={damping}. Must be > 0, or None for the proximal term.")
    own, curvature = with_gram(grad, gram)
    with without_autocast(own), full_products(own):
        if damping is None:
            found = curvature.solve(own, own.new_ones(()), lr)
        else:
            found = curvature.solve(own, curvature.damping(damping), 1.0)
    return (-spread(lr * gamma, own) * found).to(grad.dtype)


def polar(matrix: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return an approximate polar factor ``U Vᵀ`` of ``M = U Σ Vᵀ``, Muon's orthogonalized matrix.

    Args:
        matrix: M, ``[..., d, n]``.
        dtype: dtype of the matrix products. None is that of ``matrix``, and float32 for half precision;
            ``torch.bfloat16`` is faster on a GPU.

    Returns:
        The factor, ``[..., d, n]``. Singular values above about 1/1000 of the Frobenius norm become
        0.7 to 1.2; matrices of zeros stay zeros.

    Raises:
        ValueError: if ``matrix`` has fewer than two dimensions, or no floating dtype.
    """
    if matrix.dim() < 2:
        raise ValueError(f"Invalid matrix of shape {list(matrix.shape)}. Expected [..., d, n].")
    with without_autocast(matrix):
        return pure.polar(matrix.to(working_dtype(matrix)), dtype).to(matrix.dtype)


def spectral(
    grad: Tensor,
    gram: Tensor | None,
    state: Tensors | None,
    *,
    lr: Number,
    momentum: Number = _SPECTRAL["momentum"],
    decay: Number = _SPECTRAL["decay"],
    averaging: float = Spectral.averaging,
    damping: float = Spectral.damping,
    fall: float = Spectral.fall,
    agreement: float = Spectral.agreement,
    bias_rate: float = 0.0,
) -> tuple[Tensor, Tensors]:
    """Return the spectral step, the default of :class:`torch_locoprop.LocoProp`, and the new state.

    The arguments are those of :class:`torch_locoprop.solvers.Spectral` and the settings of that solver.
    ``agreement=1.0`` is the step of ``LocoProp(model)``, and 0 with ``bias_rate=1.0`` for layers with a
    bias that of ``preset="spectral"``. The scales of ``grad`` and ``gram`` do not matter.

    Args:
        grad: G, ``[..., d, n]``.
        gram: C of this step's rows, dense, block-diagonal or diagonal. None keeps the inverse of the
            last call that had one; before any, the step is made without C. ``LocoProp`` renews C in
            each of the first ten steps, and in every tenth after them.
        state: None at first, then what the last call returned.
        lr: the learning rate; entries of a weight move by about 0.2 lr.
        momentum: weight of the past in the average gradient.
        decay: weight of the past in the mean squares of the rows of the step.
        averaging: weight of the past in the running average of C.
        damping: the damping λ in a long run.
        fall: λ falls from 1 as ``1 / (1 + t / fall)`` in step t until it is ``damping``.
        agreement: the step is multiplied by this power of the agreement of the last gradients and of
            the growth of steps.
        bias_rate: if above 0, the last column of ``grad`` and ``gram`` is that of a bias, which takes
            a step of its own in addition, as ``preset="spectral"`` has it with 1.

    Returns:
        The displacement, ``[..., d, n]``, and the state.

    Raises:
        ValueError: if the shapes do not fit each other, or a number is out of range.

    Example::

        >>> state = None
        >>> displacement, state = spectral(grad, gram, state, lr=0.015)
        >>> weight = weight + displacement
    """
    check_settings(lr=lr, momentum=momentum, decay=decay)
    numbers = {
        "averaging": averaging,
        "damping": damping,
        "fall": fall,
        "agreement": agreement,
        "bias_rate": bias_rate,
    }
    own, curvature = (grad.to(working_dtype(grad)), None) if gram is None else with_gram(grad, gram)
    if state is not None:
        _check_state(state, {"average": grad} if gram is None else {"average": grad, "gram": gram})
    solver = _OnGivenGram(every=1, **numbers)
    problem = squared_problem(own, None if curvature is None else curvature.entries, lr=lr)
    with without_autocast(own):
        new, states = (solver if curvature is not None else solver.without_rows()).solve(
            problem,
            {"weight": state or {}},
            {"weight": Numbers(lr, momentum, decay)},
            1,
            "constant",
        )
    return new["weight"].to(grad.dtype), states["weight"]


def _check_state(state: Tensors, given: Tensors) -> None:
    """Raise ``ValueError`` if a state of the spectral step was made with tensors of other shapes."""
    if "average" not in state:
        raise ValueError(
            f"The state has the entries {sorted(state)}, which are not those of the spectral step. "
            "Pass None to begin with a new state."
        )
    for name, tensor in given.items():
        if name in state and state[name].shape != tensor.shape:
            what = "gradient" if name == "average" else "Gram matrix"
            raise ValueError(
                f"The state is that of a {what} of shape {list(state[name].shape)}, not "
                f"{list(tensor.shape)}. Pass None to begin with a new state."
            )


class _OnGivenGram(Spectral):
    """The spectral step on C itself, of any structure and width; the problem has no rows."""

    def _moves_bias(self, start: Tensors) -> bool:
        return self.bias_rate > 0  # the bias is a column of the weight

    def _has_use_of_rows(
        self, number: int, state: Tensors, columns: int, structure: Structure
    ) -> bool:
        return True

    def _square(self, problem: LocalProblem, like: Tensor) -> Tensor:
        given: Tensor = problem.x
        return given
