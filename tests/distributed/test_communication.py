"""The formulas of what processes exchange; ``traffic.py`` compares them with counted collectives."""

from torch_locoprop.distributed import communication
from torch_locoprop.distributed.collectives import row_counts
from torch_locoprop.distributed.divided_matrices import MATRICES, owners
from torch_locoprop.paper.gram import Structure
from torch_locoprop.paper.spectral import polar_operations

MIB = 2**20


def test_the_formulas_of_a_large_layer() -> None:
    """A layer of 4096 × 4096 on 8 processes with 8192 rows each, in float32."""
    gram = communication.through_gram(4096, 4)
    rows = communication.by_rows(8192, 4096, 8, 4)
    step = communication.spectral(4096, 4, renews=True, agreement=False)
    assert round(gram.reduced_bytes / MIB) == round(step.reduced_bytes / MIB) == 64
    assert round(rows.gathered_bytes / MIB) == 1024
    assert gram.sent_bytes(8) == 7 / 8 * 2 * gram.reduced_bytes
    in_blocks = communication.through_gram(4096, 4, Structure("block", 1024, ones=False))
    diagonal = communication.through_gram(4096, 4, Structure("diagonal"))
    assert in_blocks.reduced_bytes == 4 * 4096 * 1024 + 4
    assert diagonal.reduced_bytes == 4 * 4097 + 4
    narrow = communication.through_gram(512, 4, Structure("block", 1024))
    assert narrow == communication.through_gram(512, 4)


def test_weights_in_each_iteration_are_less_than_many_rows() -> None:
    """A layer of 5 outputs and 4 inputs with its bias on 2 processes: 3 rows of 5 numbers at most."""
    found = communication.by_iterations(5, 5, 3, 2, 8)
    whole = 2 * 3 * 5 * 8
    assert found == communication.Traffic(1, 4, 3, 3 * whole, scatters=2, scattered_bytes=whole)
    assert found.sent_bytes(2) == 4 + 3 * whole / 2 + whole
    few, many = (communication.by_rows(rows, 4, 2, 8).sent_bytes(2) for rows in (18, 19))
    assert few < found.sent_bytes(2) < many


def test_the_owner_of_a_matrix_receives_it_and_all_receive_their_rows() -> None:
    """The first process owns the large matrix, the second one the two others."""
    shapes = [(4, 4), (8, 8), (5, 4)]
    first, second = (communication.polar_factors(shapes, 2, rank, 8) for rank in (0, 1))
    own = {0: 2 * 4 + 4 * 8 + 3 * 4, 1: 2 * 4 + 4 * 8 + 2 * 4}
    assert first == communication.Traffic(exchanges=2, exchanged_bytes=8 * (64 + own[0]))
    assert second == communication.Traffic(exchanges=2, exchanged_bytes=8 * (36 + own[1]))
    assert first.sent_bytes(2) == 0.5 * first.exchanged_bytes


def test_many_matrices_go_in_several_exchanges() -> None:
    shapes = [(2, 2)] * (2 * MATRICES + 1)
    found = communication.polar_factors(shapes, 2, 1, 4)
    assert found.exchanges == 4
    assert found.exchanged_bytes == 4 * (4 * MATRICES + 2 * len(shapes))


def test_matrices_are_divided_by_their_work() -> None:
    assert owners([5, 9, 4, 6, 4], 2) == [1, 0, 0, 1, 1]  # 9 + 4 and 6 + 5 + 4
    assert owners([1, 1, 1], 4) == [0, 1, 2]
    assert owners([], 3) == []
    work = [polar_operations(d, n) for d, n in [(64, 64), (64, 64), (256, 64), (64, 256)] * 8]
    found = owners(work, 4)
    loads = [sum(w for w, owner in zip(work, found, strict=True) if owner == i) for i in range(4)]
    assert max(loads) == sum(work) / 4


def test_rows_are_divided_as_by_fully_shard() -> None:
    assert row_counts(8, 3) == [3, 3, 2]
    assert row_counts(2, 4) == [1, 1, 0, 0]
    assert row_counts(9, 4) == [3, 3, 3, 0]
