"""Benchmarks of LocoProp: time and memory of a step, on a CPU and on a GPU.

    python -m benchmarks.steps         one training step of LocoProp, of other optimizers, and of the
                                       matrix products alone
    python -m benchmarks.growth        LocoProp's step over batch size, width, depth and T
    python -m benchmarks.steady        is step 300 as fast as step 1, and does memory stay constant?
    python -m benchmarks.population    one step of many models that train together
    python -m benchmarks.matrix_populations  the same with Muon, SOAP, K-FAC and others
    python -m benchmarks.kernels       the Triton kernels of a local iteration alone
    python -m benchmarks.parts         the Triton kernels with other tile sizes
    python -m benchmarks.timeline      when each kernel of a step runs on the GPU
    python -m benchmarks.rounding      the loss of LocoProp-S with products in TF32
    python -m benchmarks.equal_budgets whole training runs, each method tuned with equal budgets
    python -m benchmarks.more_seeds    the seeds that runs in results/ have not, as populations
    python -m benchmarks.early_roots   does Shampoo gain from early inverse roots?
    python -m benchmarks.defaults      LocoProp without settings on many small tasks
    python -m benchmarks.mutation      which small changes of the mathematics does no test notice?
    python -m benchmarks.soak          killed and resumed runs, memory over many steps and optimizers
    python -m benchmarks.matrix        the core tests on several versions of PyTorch
    python -m benchmarks.fingerprints  are the results of two versions bit-identical?

`results/` contains measurements. `results_table.py` makes tables of whole training runs.
"""
