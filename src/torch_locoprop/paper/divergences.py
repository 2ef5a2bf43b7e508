"""The divergences that a transfer function f induces through its convex integral F.

Pure functions of tensors. :func:`bregman` and :func:`matching_loss` return one value for each
independent problem: ``[..., d] -> [..., d]`` for an elementwise transfer and ``[..., d] -> [...]`` for
softmax. The functions ``*_per_row`` return one value for each row, ``[..., d] -> [...]``, for every
transfer; the local losses of the variants (``losses.py``) are made of them.
"""

from __future__ import annotations

from torch import Tensor

from torch_locoprop.paper.transfers import Transfer, get


def bregman(transfer: str | Transfer, a_hat: Tensor, a: Tensor) -> Tensor:
    """Return the Bregman divergence ``D_F(â, a) = F(â) − F(a) − ⟨f(a), â − a⟩`` (Eq. 5).

    Args:
        transfer: the transfer f, or its name.
        a_hat: predicted pre-activations ``â``, ``[..., d]``.
        a: target pre-activations, ``[..., d]``; the shapes broadcast.

    Returns:
        The non-negative divergence, ``[..., d]`` (softmax: ``[...]``).

    Example::

        >>> bregman("linear", torch.tensor(3.0), torch.tensor(1.0))
        tensor(2.)
    """
    transfer = get(transfer)
    linear = _pair(transfer, transfer.f(a), a_hat - a)
    return _non_negative(transfer.integral(a_hat) - transfer.integral(a) - linear)


def matching_loss(transfer: str | Transfer, y: Tensor, a_hat: Tensor) -> Tensor:
    """Return the matching loss ``L_f(y, f(â))``, the integral of ``f(z) − y`` from f⁻¹(y) to â (Eq. 1).

    It is computed as ``F(â) + F*(y) − ⟨y, â⟩``, which equals ``D_F(â, f⁻¹(y))`` and is finite even
    where ``f⁻¹(y)`` is infinite. Its gradient in ``â`` is ``f(â) − y`` (Eq. 2). For softmax and a
    distribution ``y`` it is the relative entropy ``KL(y, f(â))`` (Eq. 6), and the cross-entropy for a
    one-hot ``y``.

    Args:
        transfer: the transfer f, or its name.
        y: target post-activations, ``[..., d]``.
        a_hat: predicted pre-activations ``â``, ``[..., d]``; the shapes broadcast.

    Returns:
        The non-negative loss, ``[..., d]`` (softmax: ``[...]``); infinite where ``y`` is outside the
        transfer's domain.
    """
    transfer = get(transfer)
    linear = _pair(transfer, y, a_hat)
    return _non_negative(transfer.integral(a_hat) + transfer.dual(y) - linear)


def bregman_per_row(transfer: Transfer, a_hat: Tensor, a: Tensor) -> Tensor:
    """Return ``D_F(â, a)`` (Eq. 5) summed over the features: ``[..., d] -> [...]``.

    Unlike in :func:`bregman`, rounding may make a value slightly negative.
    """
    linear = (transfer.f(a) * (a_hat - a)).sum(-1)
    return integral_per_row(a_hat, transfer) - integral_per_row(a, transfer) - linear


def matching_loss_per_row(transfer: Transfer, y: Tensor, a_hat: Tensor) -> Tensor:
    """Return the matching loss without its constant ``F*(y)``: ``F(â) − ⟨y, â⟩``.

    The gradient in ``â`` is ``f(â) − y`` (Eq. 2) for every ``y``, also outside the range of f, where
    ``F*(y)`` is infinite. Shapes: ``[..., d] -> [...]``.
    """
    return integral_per_row(a_hat, transfer) - (y * a_hat).sum(-1)


def integral_per_row(a: Tensor, transfer: Transfer) -> Tensor:
    """Return ``F(a)`` summed over the features: ``[..., d] -> [...]``.

    Args:
        a: pre-activations, ``[..., d]``.
        transfer: the transfer f, whose integral F is.
    """
    value = transfer.integral(a)
    return value.sum(-1) if transfer.elementwise else value


def _pair(transfer: Transfer, y: Tensor, a: Tensor) -> Tensor:
    """Return ``⟨y, a⟩`` for each independent problem."""
    return y * a if transfer.elementwise else (y * a).sum(-1)


def _non_negative(divergence: Tensor) -> Tensor:
    """Replace negative rounding noise by zero. Unlike clamp, this leaves the gradient as it is."""
    return divergence + (-divergence).detach().relu()
