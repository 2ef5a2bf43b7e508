"""A number for one problem, or one for each of a population of problems."""

from __future__ import annotations

from torch import Tensor

Number = float | Tensor  # a tensor has the leading dimensions of the population


def spread(number: Number, like: Tensor) -> Number:
    """The number shaped to multiply ``like``: ``[K] -> [K, 1, 1]`` for ``[K, d, n]``."""
    if not isinstance(number, Tensor) or number.dim() == 0:
        return number
    return number.reshape(number.shape + (1,) * (like.dim() - number.dim()))
