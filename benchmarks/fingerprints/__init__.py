"""Fingerprints of training runs: show that a refactoring left every bit of the results in place.

    python -m benchmarks.fingerprints --out before.json
    ... change the code ...
    python -m benchmarks.fingerprints --out after.json
    python -m benchmarks.fingerprints --compare before.json after.json

Several hundred small models are trained for a few steps, each with other settings. For each run the
file has one SHA-256 digest of the weights, one of the optimizer's state and one of the losses.
Digests depend on the processor and on the version of torch: compare files of one machine.

`models.py` has the models, `cases.py` the list of runs, `training.py` the loops, `digests.py` the
hashing and `__main__.py` the command.
"""

import os

# Some processors announce bfloat16 instructions that fail when they are used. oneDNN reads this
# variable when torch loads, so it is set before any module of this package imports torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
