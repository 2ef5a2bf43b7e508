"""The accuracy of the kernels' precisions, by arithmetic on the CPU."""

import os
import subprocess
import sys

import torch
from torch import Tensor


def tf32(x: Tensor) -> Tensor:
    """Return numbers rounded to TF32: the ten mantissa bits that a matrix unit reads."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def error(product: Tensor, a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float((product.double() - exact).norm() / exact.norm())


def test_three_products_in_tf32_are_as_exact_as_float32() -> None:
    """The error is below twice that of float32 in blocks, and below that of float32 term by term."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 1000, generator=generator) for _ in range(2))
    b = b.T.contiguous()
    high_a, high_b = tf32(a), tf32(b)
    low_a, low_b = tf32(a - high_a), tf32(b - high_b)
    three = error(low_a @ high_b + high_a @ low_b + high_a @ high_b, a, b)
    one_by_one = torch.zeros(128, 128)
    for k in range(1000):
        one_by_one += a[:, k, None] * b[k]
    assert three < 2 * error(a @ b, a, b)
    assert three < error(one_by_one, a, b) < 1e-3 * error(high_a @ high_b, a, b)


def test_the_kernels_can_be_switched_off() -> None:
    program = "from torch_locoprop.fast.triton import availability as d; print(d.SWITCHED_OFF)"
    for value, said in (("0", "True"), ("1", "False")):
        environment = {**os.environ, "TORCH_LOCOPROP_KERNELS": value}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        assert done.stdout.strip() == said
