"""Bytes and operations that a step adds to BackProp under `fully_shard`, from formulas.

    python -m benchmarks.communication_costs            # the tables of docs/communication.md

Every number is for one process and one step. P processes hold the rows of each weight `[d, n]`, d/P
each. Collectives are rings, so of S bytes a process receives

    all-gather, reduce-scatter   (P − 1)/P · S
    all-reduce                   2 (P − 1)/P · S

Operations are multiplications and additions of matrix products and factorizations; elementwise work is
counted for AdamW alone, where it shows that it does not matter. What LocoProp exchanges is computed by
`torch_locoprop.distributed.communication`, which a test compares with collectives of real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_locoprop.distributed import communication
from torch_locoprop.distributed.divided_matrices import MATRICES, owners
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.paper.spectral import polar_operations
from torch_locoprop.solvers.spectral import WIDEST

SINGLE, HALF = 4, 2  # bytes of a number
TOKENS = 2**22  # of all processes in a step
PROCESSES = (8, 64, 256, 1024)
ADAMW = 15  # operations for each parameter
EIGENVECTORS = 9  # operations of a symmetric eigendecomposition over n³ (Golub and Van Loan)


@dataclass(frozen=True)
class Cost:
    """What one process receives and computes in one step, on average over steps."""

    received: float = 0.0  # bytes
    flop: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.received + other.received, self.flop + other.flop)

    def __rmul__(self, factor: float) -> Cost:
        return Cost(factor * self.received, factor * self.flop)


@dataclass(frozen=True)
class Transformer:
    """A decoder with gated MLPs and, for `keys < width`, grouped queries."""

    name: str
    blocks: int
    width: int
    hidden: int  # of the MLP
    keys: int  # width of keys and of values
    vocabulary: int
    tied: bool = False  # embedding and head are one matrix

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes `(d, n)` of all weights that have a local problem."""
        w, f, k = self.width, self.hidden, self.keys
        of_block = [(w, w), (k, w), (k, w), (w, w), (f, w), (f, w), (w, f)]
        return of_block * self.blocks

    @property
    def parameters(self) -> int:
        """The number of weights, with embedding and head, without norms."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return sum(d * n for d, n in self.matrices) + embeddings


MODELS = (
    Transformer("1B", 16, 2048, 8192, 512, 128256, tied=True),
    Transformer("7B", 32, 4096, 11008, 4096, 32000),
    Transformer("70B", 80, 8192, 28672, 1024, 32000),
)

# ---- collectives ---------------------------------------------------------------------------------


def gathered(numbers: float, size: int, processes: int) -> Cost:
    """Return the cost of an all-gather or reduce-scatter of so many numbers in all."""
    return Cost((processes - 1) / processes * numbers * size)


def _exchange(traffic: communication.Traffic, processes: int) -> Cost:
    """Return the cost of collectives of LocoProp; in a ring, a process receives what another sends."""
    return Cost(traffic.sent_bytes(processes))


# ---- BackProp and other optimizers ---------------------------------------------------------------


def backprop(model: Transformer, processes: int) -> Cost:
    """Return the cost of both passes, without scores of attention and recomputation.

    Weights are gathered twice in bfloat16, gradients reduced once in float32.
    """
    weights = model.parameters
    passes = 2 * gathered(weights, HALF, processes) + gathered(weights, SINGLE, processes)
    return passes + Cost(flop=6 * weights * TOKENS / processes)


def adamw(model: Transformer, processes: int) -> Cost:
    """Return the cost of AdamW: elementwise on each process's own rows."""
    return Cost(flop=ADAMW * model.parameters / processes)


def muon(model: Transformer, processes: int) -> Cost:
    """Return the cost of Muon by layers, for the process that has the most to compute.

    Each matrix has one owner, which receives its rows from all others in bfloat16, computes the polar
    factor, and sends the rows of the update back.
    """
    owned: list[list[tuple[int, int]]] = [[] for _ in range(processes)]
    work = [polar_operations(d, n) for d, n in model.matrices]
    for shape, owner in zip(model.matrices, owners(work, processes), strict=True):
        owned[owner].append(shape)
    busiest = max(owned, key=lambda shapes: sum(polar_operations(d, n) for d, n in shapes))
    numbers = sum(d * n for d, n in busiest)
    others = sum(d * n for d, n in model.matrices) - numbers
    return (
        gathered(numbers, HALF, processes)
        + Cost(others / processes * HALF)
        + Cost(flop=sum(polar_operations(d, n) for d, n in busiest))
    )


def shampoo(model: Transformer, processes: int, *, block: int = 1024, every: int = 100) -> Cost:
    """Return the cost of Shampoo on square blocks that are divided evenly among the processes.

    Owners receive their blocks of the gradient in float32 and send updates back. Both factors are
    renewed in every step, their roots in every `every`-th one.
    """
    numbers = sum(d * n for d, n in model.matrices)
    flop = 0.0
    for d, n in model.matrices:
        for a in _parts(d, block):
            for b in _parts(n, block):
                factors = 2 * a * a * b + 2 * a * b * b
                roots = (EIGENVECTORS + 2) * (a**3 + b**3)
                flop += 2 * factors + roots / every
    exchange = 2 * gathered(numbers / processes, SINGLE, processes)
    return exchange + Cost(flop=flop / processes)


# ---- LocoProp ------------------------------------------------------------------------------------


def gram(n: int, processes: int, structure: Structure = FULL) -> Cost:
    """Return the cost of `XᵀX` of all tokens: a product of own rows, then an all-reduce in float32."""
    exchange = _exchange(communication.through_gram(n, SINGLE, structure), processes)
    return exchange + Cost(flop=2 * TOKENS / processes * n * _columns(n, structure))


def closed_form(
    model: Transformer, processes: int, *, every: int, structure: Structure = FULL
) -> Cost:
    """Return the cost of `G (C + λI)⁻¹` on each process's rows; C and its inverse are everywhere."""
    total = Cost()
    for d, n in model.matrices:
        columns = _columns(n, structure)
        inverse = Cost(flop=n * columns**2)
        total += 1 / every * (gram(n, processes, structure) + inverse)
        total += Cost(flop=2 * d / processes * n * columns)
    return total


def locoprop_s(
    model: Transformer,
    processes: int,
    *,
    local_steps: int,
    every: int,
    structure: Structure = FULL,
) -> Cost:
    """Return the cost of T iterations of LocoProp-S: one product with C after each but the last."""
    total = Cost()
    for d, n in model.matrices:
        total += 1 / every * gram(n, processes, structure)
        products = (local_steps - 1) * 2 * d / processes * n
        total += Cost(flop=products * _columns(n, structure))
    return total


def locoprop_m(model: Transformer, processes: int, *, local_steps: int, rows: int) -> Cost:
    """Return the cost of T iterations of LocoProp-M, in float32.

    The rows are gathered once, or weights are exchanged in each iteration: whichever is less.

    Args:
        model: the model.
        processes: number of processes.
        local_steps: T.
        rows: number of rows that all processes keep together (`max_rows`).
    """
    total = Cost()
    for d, n in model.matrices:
        gathers = communication.by_rows(rows // processes, n, processes, SINGLE)
        iterates = communication.by_iterations(d, n, local_steps, processes, SINGLE)
        costs = [_exchange(traffic, processes) for traffic in (gathers, iterates)]
        total += min(costs, key=lambda cost: cost.received)
        total += Cost(flop=(local_steps - 1) * 4 * rows * n * d / processes)
    return total


def spectral(
    model: Transformer, processes: int, *, every: int, structure: Structure = FULL
) -> Cost:
    """Return the cost of the spectral step, for the process that has the most polar factors to compute.

    The closed form comes first. Then each matrix goes to one owner in float32, and rows of its polar
    factor come back. Layers with many inputs are served without C if it would be full.
    """
    total = Cost()
    for d, n in model.matrices:
        columns = _columns(n, structure)
        has_gram = columns <= WIDEST
        inverse = 1 / every * Cost(flop=2 * TOKENS / processes * n * columns + n * columns**2)
        product = Cost(flop=2 * d / processes * n * columns)
        for renews, part in ((True, 1 / every), (False, 1 - 1 / every)):
            traffic = communication.spectral(
                n, SINGLE, renews=renews and has_gram, agreement=True, structure=structure
            )
            total += part * _exchange(traffic, processes)
        total += inverse + product if has_gram else Cost()
    shapes, size = model.matrices[::-1], MATRICES * processes
    flop = [0] * processes
    for start in range(0, len(shapes), size):
        work = [polar_operations(d, n) for d, n in shapes[start : start + size]]
        for owner, own in zip(owners(work, processes), work, strict=True):
            flop[owner] += own
    busiest = max(range(processes), key=lambda process: flop[process])
    traffic = communication.polar_factors(shapes, processes, busiest, SINGLE)
    return total + _exchange(traffic, processes) + Cost(flop=flop[busiest])


BLOCKS, DIAGONAL = Structure("block", 1024, ones=False), Structure("diagonal", ones=False)

METHODS: dict[str, Callable[[Transformer, int], Cost]] = {
    "BackProp, without optimizer": backprop,
    "AdamW": adamw,
    "Muon, by layers (busiest process)": muon,
    "Shampoo, blocks of 1,024, roots every 100": shampoo,
    "spectral step, every 10 (busiest process)": lambda m, p: spectral(m, p, every=10),
    "spectral step, every 10, blocks of 1,024 (busiest process)": lambda m, p: spectral(
        m, p, every=10, structure=BLOCKS
    ),
    "closed form, every 10": lambda m, p: closed_form(m, p, every=10),
    "closed form, every 10, blocks of 1,024": lambda m, p: closed_form(
        m, p, every=10, structure=BLOCKS
    ),
    "closed form, every 10, diagonal": lambda m, p: closed_form(m, p, every=10, structure=DIAGONAL),
    "LocoProp-S, T = 10, every step": lambda m, p: locoprop_s(m, p, local_steps=10, every=1),
    "LocoProp-S, T = 10, every step, blocks of 1,024": lambda m, p: locoprop_s(
        m, p, local_steps=10, every=1, structure=BLOCKS
    ),
    "LocoProp-S, T = 10, every 10 ¹": lambda m, p: locoprop_s(m, p, local_steps=10, every=10),
    "LocoProp-M, T = 10": lambda m, p: locoprop_m(m, p, local_steps=10, rows=TOKENS),
    "LocoProp-M, T = 10, 65,536 rows kept": lambda m, p: locoprop_m(
        m, p, local_steps=10, rows=2**16
    ),
}


def tables() -> Iterator[str]:
    """Yield the lines of all tables in Markdown: gigabytes received, teraflop."""
    for model in MODELS:
        yield f"### {model.name}: {model.parameters / 1e9:.2f} billion weights"
        yield ""
        heads = [f"{p:,} GPUs" for p in PROCESSES]
        yield f"| step | {' | '.join(heads)} |"
        yield "| --- " * (len(heads) + 1) + "|"
        for name, method in METHODS.items():
            costs = [method(model, processes) for processes in PROCESSES]
            cells = [f"{_short(c.received / 1e9)} GB, {_short(c.flop / 1e12)} TFLOP" for c in costs]
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""


def _short(number: float) -> str:
    """Return a number with about two digits."""
    if number == 0:
        return "0"
    if number >= 10:
        return f"{number:,.0f}"
    if number < 0.001:
        return "< 0.001"
    return f"{number:.1f}" if number >= 1 else f"{number:.1g}"


def _columns(n: int, structure: Structure) -> int:
    """Return how many entries of each row of C are kept."""
    shape = structure.shape(n)
    return shape[-1] if len(shape) > 1 else 1


def _parts(size: int, block: int) -> list[int]:
    """Return the sizes of blocks that a dimension is cut into."""
    whole, rest = divmod(size, block)
    return [block] * whole + ([rest] if rest else [])


if __name__ == "__main__":
    print("\n".join(tables()))
