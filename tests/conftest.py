"""What every test starts from: settings that torch reads when it loads, and a seed."""

import os

# Some processors announce bfloat16 instructions that then fail; oneDNN reads this when torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# As in the Makefile: on a core shared with other programs, a long busy wait makes products crawl.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
