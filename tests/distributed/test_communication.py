"""The formulas of what processes exchange; ``traffic.py`` compares them with counted collectives."""

from torch_locoprop.distributed import communication


def test_the_formulas_of_a_large_layer() -> None:
    """A layer of 4096 × 4096 on 8 processes with 8192 rows each, in float32."""
    mib = 2**20
    gram = communication.through_gram(4096, 4)
    rows = communication.by_rows(8192, 4096, 8, 4)
    step = communication.spectral(4096, 4097, 4096, 8, 4, renews=False, agreement=False)
    assert round(gram.reduced_bytes / mib) == 64
    assert round(rows.gathered_bytes / mib) == 1024
    assert round(step.gathered_bytes / mib) == 64
    assert gram.sent_bytes(8) == 7 / 8 * 2 * gram.reduced_bytes
