"""Runs the kernels on a GPU, or by Triton's interpreter if there is none."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from torch_locoprop.fast.triton import availability, local_iterations, matrix_products


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    if torch.cuda.is_available():
        yield "cuda"
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is defined
    monkeypatch.setattr(availability, "INTERPRETED", True)
    small = dict.fromkeys(matrix_products.STEP, matrix_products.TileSizes(16, 16, 16, 4, 3))
    monkeypatch.setattr(local_iterations, "ROUNDED", torch.float16)  # its products know no bfloat16
    monkeypatch.setattr(matrix_products, "RESIDUAL", small)  # the interpreter is slow
    monkeypatch.setattr(matrix_products, "STEP", small)
    _count_with_new_numpy(monkeypatch)
    yield "cpu"


def _count_with_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``range`` take the interpreter's numbers, arrays of one entry that NumPy 2.4 refuses."""
    interpreter = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        index = lambda self: int(self.handle.data.item())  # noqa: E731
        monkeypatch.setattr(tensor, "__index__", index, raising=False)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
