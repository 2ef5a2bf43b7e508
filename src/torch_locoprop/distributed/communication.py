"""The traffic between processes in a step, as formulas.

Symbols: P processes, each with r input rows of a layer; W is ``[d, n]``; numbers of ``itemsize`` bytes.
Bytes are those of the tensor that a collective leaves in each process. A process sends (P − 1)/P of
them for an all-gather in a ring, twice as many for an all-reduce, P − 1 times as many for a
reduce-scatter, and in an all-to-all as many as it receives, which is (P − 1)/P of them on average over
the processes.

What ``fully_shard``, tensor parallelism or DDP exchanges for the passes, and what a fallback does, is
not counted. The formulas for sharded layers are for those that separate by rows, on a mesh of one
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch_locoprop.distributed import divided_matrices
from torch_locoprop.distributed.collectives import row_counts
from torch_locoprop.distributed.ddp import DDP_FACTS
from torch_locoprop.paper.closed_form import operations
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.paper.spectral import polar_operations
from torch_locoprop.solvers.preconditioned import CHECKS

FACTS = 6  # numbers that a process tells about a sharded layer


class Traffic(NamedTuple):
    """The collectives of a step, or of a part of it."""

    reductions: int = 0  # number of all-reduces
    reduced_bytes: int = 0
    gathers: int = 0  # number of all-gathers
    gathered_bytes: int = 0
    exchanges: int = 0  # number of all-to-alls
    exchanged_bytes: int = 0
    scatters: int = 0  # number of reduce-scatters
    scattered_bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of two parts of a step."""
        return Traffic(*(one + more for one, more in zip(self, other, strict=True)))

    def sent_bytes(self, processes: int) -> float:
        """Return the bytes that each process sends if reductions and gathers are rings."""
        share = (processes - 1) / processes
        of_whole = 2 * self.reduced_bytes + self.gathered_bytes + self.exchanged_bytes
        return share * of_whole + (processes - 1) * self.scattered_bytes


def of_all_layers(layers: int, processes: int) -> Traffic:
    """Return the traffic of facts, once a step for all layers together."""
    return Traffic(gathers=1, gathered_bytes=8 * processes * (FACTS * layers + 1))


def through_gram(n: int, itemsize: int, structure: Structure = FULL) -> Traffic:
    """Return the traffic of LocoProp-S through XᵀX, or of a closed form.

    Processes add up ``[XᵀX; 1ᵀX]`` of all rows, or parts of it.

    Args:
        n: input features.
        itemsize: bytes of a number.
        structure: which entries of XᵀX the step takes.
    """
    return _gram(n, itemsize, structure).plus(_finite())


def by_rows(rows: int, n: int, processes: int, itemsize: int) -> Traffic:
    """Return the traffic of LocoProp-M where rows are gathered: the input rows of all processes, once.

    Args:
        rows: r, the largest number of rows of a process.
        n: input features.
        processes: P.
        itemsize: bytes of a number.
    """
    gathered = processes * rows * n * itemsize
    return Traffic(gathers=1, gathered_bytes=gathered).plus(_finite())


def by_images(calls: int, dimensions: int, numbers: int, processes: int, itemsize: int) -> Traffic:
    """Return the traffic of LocoProp-M of a convolution: the images of all processes, once.

    Args:
        calls: the largest number of calls of the layer in a process.
        dimensions: dimensions of an image, 1 to 3.
        numbers: the largest number of numbers that the images of a process have.
        processes: P.
        itemsize: bytes of a number.
    """
    counts = 2 + calls * (2 + 3 * dimensions)  # of each call shape, padding and output size
    gathered = processes * (8 * counts + numbers * itemsize)
    return Traffic(gathers=3, gathered_bytes=gathered).plus(_finite())


def by_iterations(d: int, columns: int, local_steps: int, processes: int, itemsize: int) -> Traffic:
    """Return the traffic of LocoProp-M where weights are exchanged.

    They are exchanged at the start and in each iteration but the first.
    Each process gathers ``[W b]`` for its own input rows. The sum of their gradients goes back to the
    processes that have the rows of ``[W b]``.

    Args:
        d: outputs.
        columns: columns of ``[W b]``.
        local_steps: T, at least 2.
        processes: P.
        itemsize: bytes of a number.
    """
    own = -(-d // processes) * columns * itemsize  # bytes of the largest part
    return Traffic(
        gathers=local_steps,
        gathered_bytes=local_steps * processes * own,
        scatters=local_steps - 1,
        scattered_bytes=(local_steps - 1) * own,
    ).plus(_finite())


def spectral(
    n: int, itemsize: int, *, renews: bool, agreement: bool, structure: Structure = FULL
) -> Traffic:
    """Return the traffic of a spectral step without its polar factor: XᵀX if renewed, few numbers.

    Args:
        n: input features.
        itemsize: bytes of a number.
        renews: True in steps that renew XᵀX.
        agreement: True if steps are scaled by the agreement of gradients and by their growth.
        structure: which entries of XᵀX the step takes.
    """
    step = Traffic(3, (7 if agreement else 3) * itemsize)
    if renews:
        step = step.plus(_gram(n, itemsize, structure))
    return step.plus(_finite())


def polar_factors(
    shapes: Sequence[tuple[int, int]], processes: int, rank: int, itemsize: int
) -> Traffic:
    """Return the traffic of all polar factors: rows go to the owners of matrices and back.

    A process is left with all rows of the matrices that it owns, then with its own rows of all.

    Args:
        shapes: ``[d, columns]`` of each ``[W b]``, from the last layer to the first.
        processes: P.
        rank: the process.
        itemsize: bytes of a number.
    """
    total, size = Traffic(), divided_matrices.MATRICES * processes
    for start in range(0, len(shapes), size):
        together = shapes[start : start + size]
        work = [polar_operations(d, columns) for d, columns in together]
        owners = divided_matrices.owners(work, processes)
        numbers = sum(
            (d if owner == rank else 0) * columns + row_counts(d, processes)[rank] * columns
            for (d, columns), owner in zip(together, owners, strict=True)
        )
        total = total.plus(Traffic(exchanges=2, exchanged_bytes=numbers * itemsize))
    return total


# ---- tensor parallelism -------------------------------------------------------------------------


def same_inputs() -> Traffic:
    """Return the traffic of LocoProp-S or -M, or of a closed form, in tensor parallelism.

    All processes have the same input rows in tensor parallelism. The spectral step of tensor
    parallelism is :func:`spectral` without renewals of XᵀX.
    """
    return _finite()


def row_parallel(
    shape: tuple[int, int], rows: int, processes: int, rank: int, itemsize: int, *, bias: bool
) -> Traffic:
    """Return the further traffic of a ``RowwiseParallel`` layer: columns for rows, and back.

    The all-to-alls are those of the weight, of its gradient, and of the solution. The all-gathers are
    those of input features and of the bias of the solution.

    Args:
        shape: d and n.
        rows: number of input rows whose features are gathered; 0 in steps that need none.
        processes: P.
        rank: the process.
        itemsize: bytes of a number.
        bias: True if the layer has one.
    """
    d, n = shape
    own = 2 * row_counts(d, processes)[rank] * n + d * row_counts(n, processes)[rank]
    total = Traffic(exchanges=3, exchanged_bytes=own * itemsize)
    if rows > 0:
        features = processes * row_counts(n, processes)[0]
        total = total.plus(Traffic(gathers=1, gathered_bytes=features * rows * itemsize))
    if bias:
        outputs = processes * row_counts(d, processes)[0]
        total = total.plus(Traffic(gathers=1, gathered_bytes=outputs * itemsize))
    return total


# ---- DistributedDataParallel --------------------------------------------------------------------


def of_all_layers_in_ddp(layers: int) -> Traffic:
    """Return the traffic of facts, once a step for all layers together."""
    return Traffic(reductions=1, reduced_bytes=8 * (DDP_FACTS * layers + 2))


def square_in_ddp(columns: int, itemsize: int, structure: Structure = FULL) -> Traffic:
    """Return the traffic of C, in a closed form or a spectral step that renews C.

    Args:
        columns: columns of ``[W b]``.
        itemsize: bytes of a number.
        structure: which entries of C the step takes.
    """
    return Traffic(reductions=1, reduced_bytes=prod(structure.shape(columns)) * itemsize)


def gram_in_ddp(n: int, itemsize: int) -> Traffic:
    """Return the traffic of LocoProp-S through XᵀX: XᵀX, 1ᵀX and the number of rows."""
    return Traffic(reductions=3, reduced_bytes=(n * n + n + 1) * itemsize)


def by_iterations_in_ddp(d: int, n: int, bias: bool, local_steps: int, itemsize: int) -> Traffic:
    """Return the traffic of LocoProp-M with rows that stay: a gradient in each iteration but one."""
    later = local_steps - 1
    size = d * (n + bias) * itemsize
    return Traffic(reductions=later * (1 + bias), reduced_bytes=later * size)


def preconditioned_in_ddp(
    d: int, n: int, bias: bool, local_steps: int, itemsize: int, *, slopes: bool
) -> Traffic:
    """Return the traffic of preconditioned iterations with rows that stay where they are.

    Exchanged are C, the mean slopes of the transfer, the gradients, and in each iteration the slopes of
    the losses of all outputs at the start of the step and at each length of it that is tried.

    Args:
        d: outputs.
        n: input features.
        bias: True if the layer has one.
        local_steps: T.
        itemsize: bytes of a number.
        slopes: True if the mean slopes of the transfer are needed.
    """
    later = by_iterations_in_ddp(d, n, bias, local_steps, itemsize)
    checks = local_steps * (1 + CHECKS) + slopes
    own = Traffic(reductions=checks, reduced_bytes=checks * d * itemsize)
    return square_in_ddp(n + bias, itemsize).plus(later).plus(own)


def rows_in_ddp(rows: int, n: int, processes: int, itemsize: int) -> Traffic:
    """Return the traffic of input rows to all processes, which divide the outputs among them.

    Args:
        rows: r, the rows of each process; of a convolution 1.
        n: input features; of a convolution the numbers that the images of a process have.
        processes: P.
        itemsize: bytes of a number.
    """
    return Traffic(gathers=1, gathered_bytes=processes * rows * n * itemsize)


def outputs_in_ddp(d: int, columns: int, entries: int, processes: int, itemsize: int) -> Traffic:
    """Return the traffic of the solution and the state of outputs that processes have divided.

    Args:
        d: outputs.
        columns: columns of ``[W b]``.
        entries: tensors of the state for each of weight and bias.
        processes: P.
        itemsize: bytes of a number.
    """
    rows = processes * -(-d // processes)  # every process sends the largest number of rows
    return Traffic(gathers=1, gathered_bytes=rows * columns * (1 + entries) * itemsize)


def polar_factors_in_ddp(
    shapes: Sequence[tuple[int, int]], processes: int, itemsize: int
) -> Traffic:
    """Return the traffic of all polar factors: each goes from its owner to all processes.

    Args:
        shapes: ``[d, columns]`` of each ``[W b]``, from the last layer to the first.
        processes: P.
        itemsize: bytes of a number.
    """
    work = [polar_operations(*shape) for shape in shapes]
    return _computed([d * columns for d, columns in shapes], work, processes, itemsize)


def closed_forms_in_ddp(
    shapes: Sequence[tuple[int, int]],
    kept: int,
    bent: bool,
    processes: int,
    itemsize: int,
    structure: Structure = FULL,
) -> Traffic:
    """Return the traffic of all closed forms: each goes from its owner to all processes.

    The traffic of C is :func:`square_in_ddp`.

    Args:
        shapes: ``[d, columns]`` of each ``[W b]``, from the last layer to the first.
        kept: matrices of the size of C that the state keeps of a factorization.
        bent: the loss contains a transfer, whose mean slopes are added up, and whose solution keeps
            eigenvalues beside each matrix.
        processes: P.
        itemsize: bytes of a number.
        structure: which entries of C the step takes.
    """
    numbers = [d * n + kept * (prod(structure.shape(n)) + n * bent) for d, n in shapes]
    work = [operations(d, n, bent, structure) for d, n in shapes]
    total = _computed(numbers, work, processes, itemsize)
    slopes = [d * itemsize for d, _ in shapes] if bent else []
    return total.plus(Traffic(reductions=len(slopes), reduced_bytes=sum(slopes)))


def _computed(
    numbers: Sequence[int], work: Sequence[int], processes: int, itemsize: int
) -> Traffic:
    """Return the traffic of results that are each computed by one process: an all-gather a round."""
    total, size = Traffic(), divided_matrices.MATRICES * processes
    for start in range(0, len(work), size):
        owners = divided_matrices.owners(work[start : start + size], processes)
        owned = [0] * processes
        for number, owner in zip(numbers[start : start + size], owners, strict=True):
            owned[owner] += number
        gathered = processes * max(owned) * itemsize  # every process sends the largest size
        total = total.plus(Traffic(gathers=1, gathered_bytes=gathered))
    return total


def _gram(n: int, itemsize: int, structure: Structure) -> Traffic:
    """Return the traffic of the sum of XᵀX over all processes."""
    columns = n + structure.ones
    numbers = (n + 1) * n
    if structure.reduces(columns):
        numbers = prod(structure.shape(columns))
    return Traffic(reductions=1, reduced_bytes=numbers * itemsize)


def _finite() -> Traffic:
    """Return the traffic of one flag: whether the solution of a layer is finite."""
    return Traffic(reductions=1, reduced_bytes=4)
