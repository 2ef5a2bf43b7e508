"""The kernels compile for a GPU, even where there is none: the interpreter takes more than that."""

import subprocess
import sys

import pytest

PROGRAM = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_locoprop.kernels import _triton as kernels

INTEGERS = {"rows", "d", "n", "each", "width"}
NUMBERS = {"mu", "rho", "eps", "rate", "scale", "count"}
PLACES = {"mu_at": 0, "rho_at": 0, "eps_at": 0}


def compiled(kernel, **constants):
    floats = NUMBERS | ({"eta"} if constants.get("eta_at") == 0 else set())
    kinds = {name: "*fp32" for name in kernel.arg_names}
    kinds |= {name: "i32" for name in INTEGERS} | {name: "fp32" for name in floats}
    kinds |= {name: "constexpr" for name in constants}
    kinds = {name: kinds[name] for name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, kinds, constants), target=GPUTarget("cuda", 90, 32))
    assert made.asm["ptx"]


for eta_at, first in itertools.product((0, 1, 2), (False, True)):
    own = {"HAS_FIRST": first, "BLOCK": 1024}
    compiled(kernels.rmsprop, eta_at=eta_at, **PLACES, **own)
    compiled(kernels.by_gram, eta_at=eta_at, **PLACES, HAS_BIAS=first, BLOCK=1024)
for transfer in range(4):
    for has, moves in ((False, False), (True, False), (True, True)):
        own = {"HAS_START": has, "HAS_BIAS": has, "MOVES_BIAS": moves}
        own |= {"BLOCKS": 1 + transfer, "BLOCK": 1024}
        compiled(kernels.residual, eta_at=transfer % 3, **PLACES, TRANSFER=transfer, **own)
print("all compiled")
"""


def test_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # read when a kernel is defined
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "all compiled\n", done.stderr
