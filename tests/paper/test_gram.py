"""The gradient of a squared loss through XᵀX equals the one by rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop.fast import cpu_gram
from torch_locoprop.layers import layer_kind
from torch_locoprop.paper.gram import Gram, saves_work
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching, Squared
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.transfers import Linear, Tanh, Transfer


def problem(
    trained: tuple[str, ...], leading: tuple[int, ...] = (), rows: int = 40
) -> LocalProblem:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*leading, *shape, generator=g, dtype=torch.float64)  # noqa: E731
    tensors = {"weight": draw(5, 7), "bias": draw(5)}
    return LocalProblem(
        linear_map=Dense(),
        x=draw(rows, 7),
        start={name: tensors[name] for name in trained},
        fixed={name: t for name, t in tensors.items() if name not in trained},
        backprop={name: draw(*tensors[name].shape[len(leading) :]) for name in trained},
        target=GradientDescent(),
        loss=Squared(),
        transfer=Tanh(),
        gamma=3.0,
        eta=0.1,
        regularizer=REGULARIZERS["none"],
        row_weight=0.25,
    )


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)])
def test_equals_the_gradient_by_rows(trained: tuple[str, ...], leading: tuple[int, ...]) -> None:
    own = problem(trained, leading)
    at = {name: t + torch.randn_like(t) for name, t in own.start.items()}
    by_rows, by_gram = own.gradient(at), own.gradient(at, Gram.of(own.x))
    assert by_rows.keys() == by_gram.keys()
    for name in trained:
        torch.testing.assert_close(by_gram[name], by_rows[name], rtol=1e-12, atol=1e-12)


def test_the_first_gradient_is_left_as_it_was() -> None:
    own = problem(("weight", "bias"))
    before = {name: t.clone() for name, t in own.first_gradient.items()}
    own.gradient({name: t + 1 for name, t in own.start.items()}, Gram.of(own.x))
    for name, t in before.items():
        torch.testing.assert_close(own.first_gradient[name], t, rtol=0, atol=0)


def test_products_that_are_not_known_make_sums_unknown() -> None:
    x = torch.ones(3, 2)
    known, unknown = Gram.of(x), Gram.unknown(x, 4)
    assert known.is_known
    assert Gram.of(x[:, :1]).is_known
    assert not unknown.is_known
    assert (known + known).square.tolist() == [[6.0, 6.0], [6.0, 6.0]]
    for both in (known + unknown, unknown + known, unknown + unknown):
        assert not both.is_known
        assert both.square.shape == (0, 0)
        assert both.total.shape == (0,)
    assert (known + unknown).rows == 7


def flops(rows: int, d: int, n: int, gradients: int) -> tuple[int, int]:
    """Multiplications by rows and by Gram matrix, counted product by product."""
    by_rows = sum(rows * n * d + d * rows * n for _ in range(gradients))
    by_gram = n * rows * n + sum(d * n * n for _ in range(gradients))
    return by_rows, by_gram


@pytest.mark.parametrize("rows", [1, 10, 100, 1000])
@pytest.mark.parametrize(("d", "n"), [(30, 250), (250, 30), (1000, 784)])
@pytest.mark.parametrize("gradients", [1, 9])
def test_is_taken_where_it_multiplies_less(rows: int, d: int, n: int, gradients: int) -> None:
    by_rows, by_gram = flops(rows, d, n, gradients)
    assert saves_work(rows, d, n, gradients) == (by_gram < by_rows)


class Doubled(Squared):
    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return 2 * (a - target)


def test_only_for_losses_that_are_quadratic() -> None:
    assert Squared().is_quadratic(Tanh())
    assert not Doubled().is_quadratic(Tanh())  # a residual of its own
    assert Matching().is_quadratic(Linear())
    assert not Matching().is_quadratic(Tanh())


def test_one_iteration_needs_none() -> None:
    assert problem(("weight",)).through_gram(1) is None
    assert problem(("weight",)).through_gram(10) is not None
    assert problem(("weight",), rows=1).through_gram(10) is None


def test_a_mirror_descent_target_at_a_linear_layer_is_the_same_problem() -> None:
    own = replace(problem(("weight", "bias")), transfer=Linear())
    mirror = replace(own, target=MirrorDescent(), loss=Matching())
    at = {name: t + 1 for name, t in own.start.items()}
    assert mirror.through_gram(10) is not None
    for name, value in mirror.gradient(at, mirror.through_gram(10)).items():
        torch.testing.assert_close(value, own.gradient(at)[name], rtol=1e-12, atol=1e-12)


class Alone:
    """Other processes without rows, one of which keeps XᵀX."""

    rows, some_have_gram = 0, True

    def add_up(self, tensors: Any) -> None: ...


@pytest.mark.parametrize("groups", [1, 2])
def test_drawn_images_of_one_process_count_as_often_as_they_stand_for(groups: int) -> None:
    """Where another has products already, these must be made of the same kind."""
    kind = cast(Any, layer_kind(nn.Conv1d(2, 4, 3, groups=groups)))
    images = torch.randn(5, 2, 6, dtype=torch.float64)
    weight = torch.randn(4, 2 // groups, 3, dtype=torch.float64)
    matrix = kind.matrix("weight", weight)
    own = replace(
        problem(("weight",)),
        linear_map=kind.linear_map,
        x=kind.collect([images], [(5, 4, 4)], weight),
        start={"weight": matrix},
        row_weight=torch.tensor([[2.0]] * 12 + [[3.0]] * 8, dtype=torch.float64),
        others=cast(Any, Alone()),
    )
    gram = own.through_gram(5)
    again = images[[0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4]]  # each as often
    patches = kind.linear_map.inputs(kind.collect([again], [(12, 4, 4)], weight), True, False)
    expected = Gram.of(patches)
    assert gram is not None
    assert float(gram.rows) == expected.rows
    torch.testing.assert_close(gram.square, expected.square)
    torch.testing.assert_close(gram.total, expected.total)


@pytest.mark.parametrize("n", [cpu_gram.STRIP - 1, cpu_gram.STRIP, 2 * cpu_gram.STRIP + 5])
def test_xtx_in_strips(n: int) -> None:
    x = torch.randn(30, n, dtype=torch.float64, generator=torch.manual_seed(0))
    torch.testing.assert_close(
        cpu_gram.square(x), torch.einsum("ri,rj->ij", x, x), rtol=1e-12, atol=1e-12
    )


Precision = Callable[[str], None]


@pytest.fixture
def precision() -> Iterator[Precision]:
    """Sets that of products on a GPU, for this test."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda allowed: setattr(matmul, "fp32_precision", allowed)
    matmul.fp32_precision = before


class OnGpu(Tensor):
    """Says that it is there, and notes the precision of the products in which it takes part."""

    is_cuda, is_cpu = True, False
    precisions: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.matmul or function is Tensor.__matmul__:
            cls.precisions.append(torch.backends.cuda.matmul.fp32_precision)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("allowed", ["tf32", "ieee"])
def test_has_all_digits_whatever_other_products_have(
    weighted: bool, allowed: str, precision: Precision
) -> None:
    precision(allowed)
    OnGpu.precisions.clear()
    x = torch.randn(6, 4).as_subclass(OnGpu)
    Gram.of(x, torch.ones(6, 1) if weighted else None)
    assert OnGpu.precisions == ["ieee"]
    assert torch.backends.cuda.matmul.fp32_precision == allowed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_has_all_digits_on_a_gpu(precision: Precision) -> None:
    precision("tf32")
    x = torch.randn(1000, 300, device="cuda")
    exact = x.double().mT @ x.double()
    torch.testing.assert_close(Gram.of(x).square.double(), exact, rtol=1e-5, atol=1e-3)
