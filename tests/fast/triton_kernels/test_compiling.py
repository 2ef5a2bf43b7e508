"""The kernels compile for a GPU, even where there is none: the interpreter takes more than that."""

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

INTEGERS = {"units", "n_units", "row_units", "d", "right_rows", "each"}
NUMBERS = {"mu", "rho", "eps", "rate", "scale", "count", "gamma"}
FACTORS = {"residual": ["left", "right", "delta"], "step": ["left", "right", "rounded"], "rmsprop": []}
PLACES = {"gamma_at": 0, "mu_at": 0, "rho_at": 0, "eps_at": 0}


def compiled(kernel, options, kind="*fp32", **constants):
    floats = NUMBERS | ({"eta"} if constants.get("eta_at") == 0 else set())
    kinds = {name: "*fp32" for name in kernel.arg_names}
    kinds |= {name: kind for name in FACTORS[kernel.__name__]}
    if constants.get("IN_BLOCKS"):
        rows = {"left": constants["TALL"], "right": constants["BROAD"]}
        deep = constants["DEEP"]
        kinds |= {name: f"tensordesc<{kind[1:]}[{tall},{deep}]>" for name, tall in rows.items()}
    kinds |= {name: "*u8" for name in ("ok",)}
    kinds |= {name: "i32" for name in INTEGERS} | {name: "fp32" for name in floats}
    kinds |= {name: "constexpr" for name in constants}
    kinds = {name: kinds[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if "*" in kind}
    source = ASTSource(kernel, kinds, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def of_products(name, precision, unit, kind="*fp32", **constants):
    # Both operands come as much at a time as can be, and go through the matrix units of Hopper.
    parts, kernel = getattr(products, name.upper())[precision], getattr(kernels, name)
    precision = "tf32" if precision == "bf16" else precision
    own = {"PRECISION": precision, "TALL": parts.tall, "BROAD": parts.broad, "DEEP": parts.deep}
    own |= {u: unit for u in ("UNIT", "N_UNIT", "ROW_UNIT") if u in kernel.arg_names}
    options = {"num_warps": parts.warps, "num_stages": parts.stages, "maxnreg": parts.registers}
    ptx = compiled(kernel, options, kind, **own, **constants, IN_BLOCKS=True)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx, name
    ptx = compiled(kernel, options, kind, **own, **constants, IN_BLOCKS=False)
    assert "wgmma.mma_async" in ptx, name
    sizes = set(re.findall(r"cp\\.async\\.c.\\.shared\\.global [^;]*?, (0x\\w+)", ptx))
    assert sizes == {hex(min(unit * (4 if kind == "*fp32" else 2), 16))}, (name, sizes)


for eta_at, first in itertools.product((0, 1, 2), (False, True)):
    own = {"FROM_ZERO": first, "BLOCK": 1024}
    assert compiled(kernels.rmsprop, {}, eta_at=eta_at, **PLACES, **own)
for has, unit in itertools.product((False, True), (1, 4)):
    for eta_at, gram in enumerate((False, True)):
        own = {"BY_GRAM": gram, "HAS_BIAS": has, "ROUNDS": False, "LAST": unit == 4}
        of_products("step", "tf32", unit, eta_at=eta_at, **PLACES, **own)
for transfer, precision in enumerate(("tf32", "tf32", "tf32x3", "tf32x3")):
    own = {"HAS_BIAS": True}
    of_products("residual", precision, 4, TRANSFER=transfer, **own)
of_products("residual", "tf32x3", 8, TRANSFER=0, HAS_BIAS=False)  # XᵀX
own = {"HAS_BIAS": True}
of_products("residual", "bf16", 8, "*bf16", TRANSFER=1, **own)
for gram in (False, True):
    own = {"BY_GRAM": gram, "HAS_BIAS": True, "ROUNDS": True, "LAST": False}
    of_products("step", "bf16", 8, "*bf16", eta_at=1, **PLACES, **own)
print("all compiled")
"""


def test_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # read when a kernel is defined
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "all compiled\n", done.stderr
