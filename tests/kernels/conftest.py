"""Kernels run on a GPU, or by Triton's interpreter where there is none."""

from collections.abc import Iterator

import pytest
import torch

from torch_locoprop.kernels import on_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    if torch.cuda.is_available():
        yield "cuda"
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is defined
    monkeypatch.setattr(on_device, "INTERPRETED", True)
    yield "cpu"
