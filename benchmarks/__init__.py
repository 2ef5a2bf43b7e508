"""Benchmarks: what a step costs beside its arithmetic and beside other optimizers, and how that grows.

    python -m benchmarks.steps      one training step: ours, others', and the matrix products alone
    python -m benchmarks.growth     LocoProp's step against batch, width, depth and T
    python -m benchmarks.steady     whether step 300 is as fast, and the process as small, as step 1

`results/` has what they gave. `results_table.py` makes tables of whole training runs.
"""
