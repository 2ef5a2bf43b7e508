"""Whether kernels solve a layer's problem is known before the step.

Side streams on which cuBLAS runs instead take memory, so there are fewer of them.
"""

from typing import Any

import pytest
import torch
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import cuda_graph, cuda_streams
from torch_locoprop.fast.triton import local_iterations
from torch_locoprop.stepping.local_steps import may_have_kernels


def linear(transfer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), transfer, nn.Linear(5, 4))


def convolutional(transfer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 3), transfer, nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "transfer", "settings", "by_kernels"),
    [
        pytest.param(linear, nn.Tanh(), {}, True, id="LocoProp-M"),
        pytest.param(linear, nn.ReLU(), {"variant": "locoprop-s"}, True, id="LocoProp-S"),
        pytest.param(linear, nn.ELU(), {"variant": "locoprop-s"}, True, id="LocoProp-S and ELU"),
        pytest.param(linear, nn.ELU(), {}, False, id="ELU"),
        pytest.param(linear, nn.Tanh(), {"variant": "pocoprop-m"}, False, id="PocoProp-M"),
        pytest.param(linear, nn.Tanh(), {"max_rows": 4}, False, id="some rows"),
        pytest.param(linear, nn.Tanh(), {"dtype": torch.float64}, False, id="float64"),
        pytest.param(linear, nn.Tanh(), {"solver": "adam"}, False, id="Adam"),
        pytest.param(linear, nn.Tanh(), {"regularizer": "l2"}, False, id="regularized"),
        pytest.param(convolutional, nn.Tanh(), {}, False, id="a convolution"),
    ],
)
def test_it_is_as_the_kernels_say_themselves(
    make: Any,
    transfer: nn.Module,
    settings: dict[str, Any],
    by_kernels: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dict(settings)
    dtype = settings.pop("dtype", torch.float32)
    model = make(transfer).to(device, dtype)
    opt = LocoProp(model, lr=1e-4, local_steps=2, **settings)
    fits, answers, asked_for = local_iterations.fits, [], []

    def noted(*args: Any) -> bool:
        answers.append(fits(*args))
        return answers[-1]

    monkeypatch.setattr(cuda_graph, "DEVICE_TYPES", ("cuda", "cpu"))
    side_streams = cuda_streams.side_streams
    monkeypatch.setattr(
        cuda_streams, "side_streams", lambda most: asked_for.append(most) or side_streams(most)
    )
    monkeypatch.setattr(local_iterations, "fits", noted)
    for _ in range(2):
        answers.clear()
        x = torch.randn(10, 1, 6, device=device, dtype=dtype)
        opt.zero_grad()
        model(x if make is convolutional else x[:, 0]).square().sum().backward()
        opt.step()
    told = [may_have_kernels(opt._plan, layer) for layer in opt._layers]
    assert all(told) is by_kernels
    assert asked_for[-1] == (cuda_streams.MANY_STREAMS if by_kernels else cuda_streams.FEW_STREAMS)
    if answers and make is linear:  # others never ask
        assert answers == told[::-1]
