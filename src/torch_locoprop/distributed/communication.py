"""How much the processes of a sharded model exchange in a step, as formulas.

Symbols: P processes, each with r input rows of a layer; W is ``[d, n]``; numbers of ``itemsize`` bytes.
Bytes are those of the tensor that a collective leaves in each process. A ring sends (P − 1)/P of them
for an all-gather, and twice as many for an all-reduce.

What ``fully_shard`` itself exchanges for the passes, and what a fallback does, is not counted. The
formulas are for layers that separate by rows, on a mesh of one dimension.
"""

from __future__ import annotations

from typing import NamedTuple

FACTS = 6  # numbers that a process tells about a layer


class Traffic(NamedTuple):
    """The collectives of a step, or of a part of it."""

    reductions: int = 0  # number of all-reduces
    reduced_bytes: int = 0
    gathers: int = 0  # number of all-gathers
    gathered_bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of two parts of a step."""
        return Traffic(*(one + more for one, more in zip(self, other, strict=True)))

    def sent_bytes(self, processes: int) -> float:
        """Return the bytes that each process sends if all collectives are rings."""
        share = (processes - 1) / processes
        return share * (2 * self.reduced_bytes + self.gathered_bytes)


def of_all_layers(layers: int, processes: int) -> Traffic:
    """Return the exchange of facts, once a step for all layers together."""
    return Traffic(gathers=1, gathered_bytes=8 * processes * (FACTS * layers + 1))


def through_gram(n: int, itemsize: int) -> Traffic:
    """Return LocoProp-S through XᵀX, or a closed form: ``[XᵀX; 1ᵀX]`` of all rows."""
    return Traffic(reductions=1, reduced_bytes=(n + 1) * n * itemsize).plus(_finite())


def by_rows(rows: int, n: int, processes: int, itemsize: int) -> Traffic:
    """Return LocoProp-M: the input rows of all processes.

    Args:
        rows: r, the largest number of rows of a process.
        n: input features.
        processes: P.
        itemsize: bytes of a number.
    """
    gathered = processes * rows * n * itemsize
    return Traffic(gathers=1, gathered_bytes=gathered).plus(_finite())


def spectral(
    d: int, columns: int, n: int, processes: int, itemsize: int, *, renews: bool, agreement: bool
) -> Traffic:
    """Return the spectral step: XᵀX where it is renewed, the direction of all outputs, some norms.

    Args:
        d: outputs.
        columns: columns of ``[W b]``.
        n: input features.
        processes: P.
        itemsize: bytes of a number.
        renews: True in steps that renew XᵀX.
        agreement: True if steps are scaled by the agreement of gradients.
    """
    rows = processes * -(-d // processes)  # each process sends as many as the one with most
    norms = 4 if agreement else 2
    step = Traffic(norms, norms * itemsize, 1, rows * columns * itemsize)
    if renews:
        step = step.plus(Traffic(reductions=1, reduced_bytes=(n + 1) * n * itemsize))
    return step.plus(_finite())


def _finite() -> Traffic:
    """Return the exchange of one flag: whether the solution of a layer is finite."""
    return Traffic(reductions=1, reduced_bytes=4)
