"""XᵀX by the kernels: on a GPU, or by Triton's interpreter."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_locoprop.fast import cuda_streams, dispatch
from torch_locoprop.fast.triton import availability, matrix_products
from torch_locoprop.paper.gram import Gram, RowUse
from torch_locoprop.recording.row_reduction import gram_is_better


@pytest.mark.parametrize("members", [None, 1, 3])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (20, 17), (24, 16), (37, 33)])
def test_equals_the_plain_version(
    device: str, members: int | None, rows: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (rows, n) if members is None else (members, rows, n)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    assert matrix_products.square_fits(x)
    ours = dispatch.gram(x)
    monkeypatch.setattr(availability, "SWITCHED_OFF", True)
    theirs = dispatch.gram(x.double())
    torch.testing.assert_close(ours.square.double(), theirs.square, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(ours.total.double(), theirs.total, rtol=2e-6, atol=2e-5)
    assert ours.rows == theirs.rows == rows


def test_rows_that_all_members_have(device: str) -> None:
    x = torch.randn(1, 20, 9, device=device)
    ours = dispatch.gram(x.expand(3, -1, -1))
    assert ours.square.shape == (3, 9, 9)
    assert ours.square.stride(0) == 0
    torch.testing.assert_close(ours.square[2], (x[0].mT @ x[0]), rtol=1e-5, atol=1e-4)


def test_what_is_left_to_others(device: str) -> None:
    x = torch.randn(20, 9, device=device)
    assert matrix_products.square_fits(x)
    assert not matrix_products.square_fits(x.double())
    assert not matrix_products.square_fits(x[:, ::2])
    assert not matrix_products.square_fits(x.expand(2, 2, 20, 9))


def test_small_products_beside_a_backward_pass_are_those_of_torch(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_launched_alone", lambda x: not cuda_streams.overlapping)
    x = torch.randn(20, 9, device=device)
    calls: list[int] = []
    square = matrix_products.square
    monkeypatch.setattr(matrix_products, "square", lambda x: (calls.append(len(x)), square(x))[1])
    by_torch = dispatch.gram(x, apart=True)
    assert not calls
    for own in (dispatch.gram(x), _in_a_graph_of_the_step(x)):
        torch.testing.assert_close(own.square, by_torch.square, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(own.total, by_torch.total, rtol=1e-5, atol=1e-4)
    assert calls == [20, 20]
    monkeypatch.setattr(dispatch, "SMALL", 20 * 9 * 9 - 1)
    dispatch.gram(x, apart=True)
    assert calls == [20, 20, 20]


def _in_a_graph_of_the_step(x: torch.Tensor) -> Gram:
    with cuda_streams.overlapping_backward():
        return dispatch.gram(x, apart=True)


@pytest.mark.parametrize(("n", "condensed"), [(199, True), (784, False)])
def test_an_ordinary_loop_on_a_gpu_keeps_products_that_are_much_smaller(
    n: int, condensed: bool
) -> None:
    use = RowUse(gradients=9)
    with FakeTensorMode():
        x, weight = torch.empty(1000, n, device="cuda"), torch.empty(500, n, device="cuda")
        assert gram_is_better(use, x, weight, 1000) == condensed
        with cuda_streams.overlapping_backward():
            assert gram_is_better(use, x, weight, 1000)
    assert gram_is_better(use, torch.empty(1000, n), torch.empty(500, n), 1000)
