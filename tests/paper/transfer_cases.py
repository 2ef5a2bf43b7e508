"""The transfers under test with torch's own functions, and helpers shared by the test files."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.nn import functional

from torch_locoprop.paper.transfers import (
    CELU,
    ELU,
    SELU,
    Arctan,
    Hardtanh,
    LeakyReLU,
    Linear,
    LogSigmoid,
    ReLU,
    ReLU6,
    Sigmoid,
    Softplus,
    Softsign,
    SquaredReLU,
    Step,
    Tanh,
)


def exact_softplus(a, beta=1.0):
    return torch.logaddexp(beta * a, torch.zeros_like(a)) / beta


# The transfer, torch's own version of f, and the points where f is not smooth.
# CELU by way of ELU: the gradient of torch's celu rounds 1 / alpha to float32.
CASES = [
    (Step(), lambda a: torch.heaviside(a, torch.tensor(0.5, dtype=a.dtype)), [0.0]),
    (Linear(), lambda a: a, []),
    (ReLU(), torch.relu, [0.0]),
    (LeakyReLU(), functional.leaky_relu, [0.0]),
    (LeakyReLU(0.3), lambda a: functional.leaky_relu(a, 0.3), [0.0]),
    (LeakyReLU(0), torch.relu, [0.0]),
    (LeakyReLU(2.0), lambda a: functional.leaky_relu(a, 2.0), [0.0]),
    (Sigmoid(), torch.sigmoid, []),
    (Tanh(), torch.tanh, []),
    (Arctan(), torch.atan, []),
    (Softplus(), exact_softplus, []),
    (Softplus(2.5), lambda a: exact_softplus(a, 2.5), []),
    (ELU(), functional.elu, [0.0]),
    (ELU(0.5, 2.0, 1.5), lambda a: torch.ops.aten.elu(a, 0.5, 2.0, 1.5), [0.0]),
    (ELU(alpha=0.0), torch.relu, [0.0]),
    (SELU(), functional.selu, [0.0]),
    (CELU(), functional.celu, [0.0]),
    (CELU(0.4), lambda a: 0.4 * functional.elu(a / 0.4), [0.0]),
    (Hardtanh(), functional.hardtanh, [-1.0, 1.0]),
    (Hardtanh(0.5, 2.0), lambda a: functional.hardtanh(a, 0.5, 2.0), [0.5, 2.0]),
    (ReLU6(), functional.relu6, [0.0, 6.0]),
    (Softsign(), functional.softsign, [0.0]),
    (LogSigmoid(), functional.logsigmoid, []),
    (SquaredReLU(), lambda a: torch.relu(a) ** 2, [0.0]),
]
SMOOTH_AT_ZERO = [Sigmoid(), Tanh(), Arctan(), Softplus(2.5), ELU(), CELU(0.4), LogSigmoid()]

each_case = pytest.mark.parametrize(
    ("transfer", "torch_f", "kinks"), CASES, ids=[repr(case[0]) for case in CASES]
)
each_transfer = pytest.mark.parametrize("transfer", [case[0] for case in CASES], ids=repr)
each_strict = pytest.mark.parametrize(
    "transfer", [case[0] for case in CASES if case[0].strictly_increasing], ids=repr
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
quick = settings(deadline=None, max_examples=30)
numbers = st.floats(-12, 12)
vectors = st.lists(numbers, min_size=4, max_size=4)


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def away_from(kinks, a):
    return a[torch.tensor([all(abs(x - kink) > 1e-3 for kink in kinks) for x in a.tolist()])]


def within(transfer, low=-4.0, high=4.0, count=33):
    """Points strictly inside the domain."""
    low, high = max(low, transfer.domain[0]), min(high, transfer.domain[1])
    return torch.linspace(low, high, count, dtype=torch.float64)[1:-1]


def supremum(transfer, y, reach):
    """``sup_z y z − F(z)`` over ``|z| ≤ reach``, on a grid that closes in on the maximum."""
    center, radius = 0.0, reach
    while radius > 1e-9:
        z = torch.linspace(center - radius, center + radius, 2001, dtype=torch.float64)
        z = z.clamp(-reach, reach)
        values = y * z - transfer.integral(z)
        center, radius = z[values.argmax()].item(), radius / 500
    return values.max().item()
