"""The kernels compile for a GPU, even on machines without one.

Triton's interpreter accepts programs that do not compile.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import itertools
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_locoprop.fast.triton import kernels
from torch_locoprop.fast.triton import matrix_products as products

INTEGERS = {"inner_units", "n_units", "row_units", "d", "right_stride", "entries"}
NUMBERS = {"mu", "rho", "eps", "rate", "row_weight", "row_count", "gamma"}
FACTORS = {"residual": ["left", "right", "delta"], "step": ["left", "right", "rounded"], "rmsprop": []}
PLACES = {"gamma_place": 0, "mu_place": 0, "rho_place": 0, "eps_place": 0}


def compiled(kernel, options, kind="*fp32", **constants):
    floats = NUMBERS | ({"eta"} if constants.get("eta_place") == 0 else set())
    kinds = {name: "*fp32" for name in kernel.arg_names}
    kinds |= {name: kind for name in FACTORS[kernel.__name__]}
    if constants.get("DESCRIPTORS"):
        rows = {"left": constants["HEIGHT"], "right": constants["WIDTH"]}
        depth = constants["DEPTH"]
        kinds |= {name: f"tensordesc<{kind[1:]}[{height},{depth}]>" for name, height in rows.items()}
    kinds |= {name: "*u8" for name in ("ok",)}
    kinds |= {name: "i32" for name in INTEGERS} | {name: "fp32" for name in floats}
    kinds |= {name: "constexpr" for name in constants}
    kinds = {name: kinds[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if "*" in kind}
    source = ASTSource(kernel, kinds, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def of_products(name, precision, unit, kind="*fp32", **constants):
    # Both operands come as much at a time as can be, and go through the matrix units of Hopper.
    tiles, kernel = getattr(products, name.upper())[precision], getattr(kernels, name)
    precision = "tf32" if precision == "bf16" else precision
    own = {"PRECISION": precision, "HEIGHT": tiles.height, "WIDTH": tiles.width, "DEPTH": tiles.depth}
    own |= {u: unit for u in ("INNER_UNIT", "N_UNIT", "ROW_UNIT") if u in kernel.arg_names}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers}
    ptx = compiled(kernel, options, kind, **own, **constants, DESCRIPTORS=True)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx, name
    ptx = compiled(kernel, options, kind, **own, **constants, DESCRIPTORS=False)
    assert "wgmma.mma_async" in ptx, name
    sizes = set(re.findall(r"cp\\.async\\.c.\\.shared\\.global [^;]*?, (0x\\w+)", ptx))
    assert sizes == {hex(min(unit * (4 if kind == "*fp32" else 2), 16))}, (name, sizes)


for eta_place, first in itertools.product((0, 1, 2), (False, True)):
    own = {"FROM_ZERO": first, "BLOCK": 1024}
    assert compiled(kernels.rmsprop, {}, eta_place=eta_place, **PLACES, **own)
for has, unit in itertools.product((False, True), (1, 4)):
    for eta_place, gram in enumerate((False, True)):
        own = {"BY_GRAM": gram, "HAS_BIAS": has, "ROUNDS": False, "LAST": unit == 4}
        of_products("step", "tf32", unit, eta_place=eta_place, **PLACES, **own)
for transfer, precision in enumerate(("tf32", "tf32", "tf32x3", "tf32x3")):
    for encodes in (False, True):
        own = {"HAS_BIAS": True, "ENCODES": encodes}
        of_products("residual", precision, 4, TRANSFER=transfer, **own)
of_products("residual", "tf32x3", 8, TRANSFER=0, HAS_BIAS=False, ENCODES=False)  # XᵀX
own = {"HAS_BIAS": True, "ENCODES": False}
of_products("residual", "bf16", 8, "*bf16", TRANSFER=1, **own)
for gram in (False, True):
    own = {"BY_GRAM": gram, "HAS_BIAS": True, "ROUNDS": True, "LAST": False}
    of_products("step", "bf16", 8, "*bf16", eta_place=1, **PLACES, **own)
print("all compiled")
"""


def test_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # read when a kernel is defined
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "all compiled\n", done.stderr
