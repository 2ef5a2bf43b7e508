"""nn.Bilinear is nn.Linear on the products of its two inputs: every step moves both alike."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from cases import BACKPROP_VARIANTS, FIRST_ORDER, assert_close, batch, cross_entropy, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.layers import bilinear, layer_kind
from torch_locoprop.layers.bilinear import BilinearLayer, BilinearMap
from torch_locoprop.paper.gram import Gram
from torch_locoprop.solvers import Exact

N1, N2, D = 3, 4, 5


def products(x1: Tensor, x2: Tensor) -> Tensor:
    """The rows of the local problem, written out."""
    return torch.stack([x1[..., i] * x2[..., j] for i in range(N1) for j in range(N2)], -1)


# Products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 130, 2**22], ids=["one row", "some rows", "all rows"])
@pytest.mark.parametrize("shape", [(7,), (2, 3), ()], ids=["batch", "sequences", "one sample"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_operators(
    shape: tuple[int, ...], bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward is the module's, the weight gradient is autograd's, and both are products with X."""
    monkeypatch.setattr(bilinear, "AT_ONCE", at_once)
    module = nn.Bilinear(N1, N2, D, bias=bias).double()
    x1, x2 = batch(*shape, N1), batch(*shape, N2, seed=2)
    kind = layer_kind(module)
    assert isinstance(kind, BilinearLayer)
    out = module(x1, x2)
    collected = kind.collect([torch.cat([x1, x2], -1)], [out.shape], module.weight)
    tensors = {name: kind.matrix(name, p.detach()) for name, p in module.named_parameters()}
    assert tensors["weight"].shape == (D, N1 * N2)
    a = kind.linear_map.forward(collected, **tensors)
    assert_close([a], [kind.rows(out.detach())])
    g = torch.randn_like(out)
    found = kind.linear_map.weight_grad(collected, kind.rows(g))
    expected = torch.autograd.grad(out, list(module.parameters()), g)
    for (name, p), gradient in zip(module.named_parameters(), expected, strict=True):
        assert_close([kind.restored(name, found[name], p)], [gradient])
        assert torch.equal(kind.restored(name, tensors[name], p), p)
    X = kind.rows(products(x1, x2))
    assert_close([kind.linear_map.inputs(collected, weight=True, bias=False)], [X])
    ones = torch.ones_like(X[:, :1])
    assert_close([kind.linear_map.inputs(collected, True, True)], [torch.cat([X, ones], 1)])
    assert_close([kind.linear_map.inputs(collected, False, True)], [ones])
    blocks = list(kind.linear_map.row_blocks(collected))
    assert len(blocks) > 1 or at_once > 1 or len(X) == 1
    total = sum(map(Gram.of, blocks[1:]), Gram.of(blocks[0]))
    assert_close([total.square, total.total], [X.mT @ X, X.sum(0)])
    assert total.rows == len(X)


def test_leading_dimensions_are_independent_problems() -> None:
    own, x = BilinearMap(N1, N2), batch(2, 6, N1 + N2)
    weight, bias, delta = batch(2, D, N1 * N2), batch(2, D), batch(2, 6, D)
    each = [own.forward(*parts) for parts in zip(x, weight, bias, strict=True)]
    assert_close(list(own.forward(x, weight, bias)), each)
    found = own.weight_grad(x, delta)
    for i in range(2):
        expected = own.weight_grad(x[i], delta[i])
        assert_close([found[name][i] for name in expected], list(expected.values()))


def test_no_rows() -> None:
    module = nn.Bilinear(N1, N2, D).double()
    kind = layer_kind(module)
    assert kind is not None
    x = kind.collect([], [], module.weight)
    weight = kind.matrix("weight", module.weight.detach())
    assert kind.linear_map.forward(x, weight).shape == (0, D)
    found = kind.linear_map.weight_grad(x, x.new_empty(0, D))
    assert torch.equal(found["weight"], torch.zeros(D, N1 * N2, dtype=torch.float64))


# Training ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer between two others, as nn.Bilinear or as nn.Linear on the products of its inputs."""

    def __init__(self, explicit: bool, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, N1), nn.Linear(D, 3)
        self.pair: nn.Module = nn.Bilinear(N1, N2, D, bias=bias)
        if explicit:
            own = self.pair
            self.pair = nn.Linear(N1 * N2, D, bias=bias)
            self.pair.load_state_dict(
                {n: t.flatten(1) if n == "weight" else t for n, t in own.state_dict().items()}
            )
        self.explicit = explicit
        self.transfer: nn.Module = nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = torch.tanh(self.first(x)), x[..., :N2]
        a = self.pair(products(x1, x2)) if self.explicit else self.pair(x1, input2=x2)
        return self.last(self.transfer(a))


def pairs(bias: bool = True) -> tuple[Net, Net]:
    return Net(explicit=True, bias=bias), Net(explicit=False, bias=bias)


def locoprop(model: nn.Module, **options: Any) -> LocoProp:
    return LocoProp(model, **{"lr": 1e-3, "momentum": 0.9, "output_transfer": "sigmoid", **options})


def backward(model: nn.Module, seed: int, shape: tuple[int, ...] = (8,)) -> None:
    x = batch(*shape, 6, seed=seed)
    cross_entropy(model(x).reshape(-1, 3), x[..., :3].reshape(-1, 3)).backward()


def train(model: nn.Module, opt: LocoProp, steps: range = range(3), **data: Any) -> list[Tensor]:
    """The weights after these steps, as matrices."""
    for seed in steps:
        backward(model, seed, **data)
        opt.step()
        opt.zero_grad()
    return [t.flatten(1) if t.dim() > 1 else t for t in weights(model)]


OPTIONS: list[dict[str, Any]] = [
    *({"variant": variant} for variant in (*BACKPROP_VARIANTS, "natural-s")),
    *({"solver": solver} for solver in FIRST_ORDER),
    {"variant": "locoprop-s", "solver": "exact"},
    {"variant": "locoprop-m", "solver": "exact"},
    {"variant": "locoprop-s", "solver": Exact(decay=0.9, every=2, damping=0.1)},
    {"variant": "locoprop-m", "regularizer": "fisher", "solver": "sgd"},
    {"regularizer": "l2", "weight_decay": 0.1},
    {"local_reduction": "mean", "variant": "locoprop-s"},
    {"max_rows": 5, "variant": "locoprop-m"},
    {"preset": "general", "variant": "locoprop-s"},
    {"max_rows": 5, "variant": "locoprop-s"},
    {"cap": 0.01, "gate": True},
    {"apply": "gradient", "outer": lambda params: torch.optim.AdamW(params, lr=1e-2)},
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda own: ", ".join(own))
def test_a_step_is_that_of_the_linear_layer(options: dict[str, Any], bias: bool) -> None:
    explicit, model = pairs(bias)
    opt = locoprop(model, **options)
    assert_close(train(model, opt), train(explicit, locoprop(explicit, **options)), 1e-10)
    row = next(line.split() for line in opt.summary().splitlines() if line.startswith("pair"))
    variant = options.get("variant", "locoprop-m")
    assert row[1:] == ["Bilinear", "5×3×4", "relu", variant]  # all was detected, nothing noted


@pytest.mark.parametrize("shape", [(2, 4), ()], ids=["sequences", "one sample"])
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-m"])
def test_inputs_of_other_ranks(variant: str, shape: tuple[int, ...]) -> None:
    explicit, model = pairs()
    found = train(model, locoprop(model, variant=variant), shape=shape)
    expected = train(explicit, locoprop(explicit, variant=variant), shape=shape)
    assert_close(found, expected, 1e-11)


@pytest.mark.parametrize("solver", ["sgd", "exact"])
def test_products_of_many_rows_are_kept_instead_of_the_rows(solver: str) -> None:
    """XᵀX has (n₁·n₂)² numbers and [x₁ x₂] has n₁ + n₂ in each row: 20.6 rows are as many."""
    explicit, model = pairs()
    options = {"variant": "locoprop-s", "solver": solver, "local_steps": 4}
    expected = train(explicit, locoprop(explicit, **options), shape=(40,))
    opt = locoprop(model, **options)
    assert_close(train(model, opt, shape=(40,)), expected, 1e-10)
    kept = []
    for rows in (20, 40):
        backward(model, 9, shape=(rows,))
        (call,) = next(layer for layer in opt._layers if layer.name == "pair").calls
        kept.append(call.x.shape)
        opt.zero_grad()
    assert kept == [(20, N1 + N2), (0,)]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
def test_one_iteration_is_backprop(variant: str) -> None:
    model = Net(explicit=False)
    plain = copy.deepcopy(model)
    opt = locoprop(model, lr=0.01, gamma=3.0, variant=variant, solver="sgd", local_steps=1)
    train(model, opt, range(1))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.03)
    backward(plain, 0)
    sgd.step()
    assert_close(weights(model), weights(plain))


def test_transfers_before_and_behind() -> None:
    """A layer that feeds a bilinear one is no output, and each input is searched."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, N1), nn.Linear(6, N2)
            self.pair = nn.Bilinear(N1, N2, D)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.pair(input2=self.right(x), input1=self.left(x).tanh()))

    model = Two().double()
    opt = LocoProp(model, lr=1e-3)
    model(batch(8, 6)).square().sum().backward()
    opt.step()
    found = [(layer.name, layer.transfer.name, layer.is_output) for layer in opt._layers]  # type: ignore[union-attr]
    assert found == [
        ("left", "tanh", False),
        ("right", "linear", False),
        ("pair", "sigmoid", True),
    ]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s"])
def test_accumulated_gradients(variant: str) -> None:
    explicit, model = pairs()
    for each in (explicit, model):
        opt = locoprop(each, variant=variant)
        for step in range(3):
            for part in range(2):
                backward(each, 10 * step + part, shape=(5 + part,))
            opt.step()
            opt.zero_grad()
    assert_close([t.flatten(1) if t.dim() > 1 else t for t in weights(model)], weights(explicit))


def test_inputs_that_are_written_to_after_the_backward_pass() -> None:
    """The record is a copy of both inputs: no step has to do without it."""
    stepped = []
    for overwrite in (False, True):
        torch.manual_seed(0)
        model = nn.Bilinear(N1, N2, D).double()
        opt = LocoProp(model, lr=1e-3, output_transfer="linear")
        x1, x2 = batch(8, N1), batch(8, N2, seed=2)
        model(x1, x2).square().sum().backward()
        if overwrite:
            x1.zero_(), x2.zero_()
        opt.step()
        stepped.append(weights(model))
    assert_close(stepped[1], stepped[0], 0.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("first", ["compile", "optimizer"])
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s"])
def test_torch_compile(variant: str, first: str) -> None:
    torch.compiler.reset()
    model, eager = Net(explicit=False), Net(explicit=False)
    # A compiled graph shows ∂L/∂a alone, and where a ReLU is flat that is zero whatever ∂L/∂y is.
    model.transfer = eager.transfer = nn.Tanh()
    opt = None if first == "compile" else locoprop(model, variant=variant)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt = opt or locoprop(model, variant=variant)
    for seed in range(3):
        backward(compiled, seed)
        opt.step()
        opt.zero_grad()
    expected = train(eager, plain := locoprop(eager, variant=variant))
    assert_close([t.flatten(1) if t.dim() > 1 else t for t in weights(model)], expected, 1e-11)
    assert opt.summary() == plain.summary()
    torch.compiler.reset()


@pytest.mark.parametrize("solver", ["rmsprop", "adam", Exact(decay=0.9, every=3, damping=0.1)])
def test_a_resumed_run_is_bit_identical(solver: Any) -> None:
    options = {"solver": solver, "variant": "locoprop-s"}
    model = Net(explicit=False)
    opt = locoprop(model, **options)
    train(model, opt, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    expected = train(model, opt, range(4, 8))
    file.seek(0)
    saved = torch.load(file)
    resumed = Net(explicit=False)
    other = locoprop(resumed, **options)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    for one, two in zip(train(resumed, other, range(4, 8)), expected, strict=True):
        assert torch.equal(one, two)


def test_products_of_inputs_in_bfloat16_are_not_rounded() -> None:
    """Under autocast on a GPU the inputs are in bfloat16, whose 8 digits are too few for products."""
    x = batch(9, N1 + N2).bfloat16()
    [rows] = BilinearMap(N1, N2).row_blocks(x)
    [expected] = BilinearMap(N1, N2).row_blocks(x.double())
    assert torch.equal(rows.double(), expected)


def test_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Bilinear):
        def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
            return 2 * super().forward(input1, input2)

    kind = layer_kind(module := Doubled(N1, N2, D))
    assert kind is not None
    assert kind.refuses(module) == "Doubled has a forward of its own"
    assert kind.refuses(nn.Bilinear(N1, N2, D)) is None
