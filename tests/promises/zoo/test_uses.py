"""Layers used in unusual ways: each step is a BackProp step, or the summary gives the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BACKPROP_VARIANTS, assert_close, batch, network, weights
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

from torch_locoprop import LocoProp

RATE = 0.03


def of_the_compiler(test: Any) -> Any:
    """Ignore the compiler's own warnings, and those about tensors between two compiled graphs."""
    for message in ("The .grad attribute of a Tensor that is not a leaf", ".*is deprecated"):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given: dict[str, Any] = {"lr": RATE / 3, "gamma": 3.0, "solver": "sgd", "local_steps": 1}
    return LocoProp(model, fallback=sgd, **{**given, **options})


# Losses around one network, which is called in unusual ways -------------------------------------


def through_functional_call(model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, dict(model.named_parameters()), (x,)).square().sum()


def after_an_inner_step(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss after one step, differentiated through that step, as in MAML."""
    own = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(x).square().sum(), list(own.values()), create_graph=True)
    moved = {n: p - 0.01 * g for (n, p), g in zip(own.items(), gradients, strict=True)}
    return functional_call(model, moved, (x,)).square().sum()


def with_gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum() + model(x).square().sum()


def towards_its_own_view(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        other = model(x + 0.1)
    return F.mse_loss(model(x), other + 1)


def also_as_a_function(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum() + F.linear(x, model[0].weight).square().sum()


def of_sparse_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model((x * (x > 0.5)).to_sparse()).square().sum()


def nested(x: Tensor, layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([x[:3], x[3:]], layout=layout)


def of_nested_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model(nested(x)).values().square().sum()


def of_a_part(model: Any, x: Tensor) -> Tensor:
    return model[:3](x).square().sum()


def with_an_empty_batch(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[:0]).square().sum() + model(x).square().sum()


LOSSES = [
    through_functional_call,
    after_an_inner_step,
    with_gradient_penalty,
    towards_its_own_view,
    also_as_a_function,
    of_sparse_rows,
    of_nested_rows,
    of_a_part,
    with_an_empty_batch,
]


@pytest.mark.parametrize("variant", BACKPROP_VARIANTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore:.* by functional_call with weights that are computed")
def test_one_local_step_is_backprop(loss: Callable[..., Tensor], variant: str) -> None:
    model, x = network(), batch(8, 6)
    plain = copy.deepcopy(model)
    loss(plain, x).backward()
    sgd(list(plain.parameters())).step()
    opt = loco(model, variant=variant)
    loss(model, x).backward()
    opt.step()
    assert_close(weights(model), weights(plain))


def test_sparse_rows_are_the_same_rows() -> None:
    results = []
    for form in (lambda t: t, lambda t: t.to_sparse()):
        model, x = network(), batch(8, 6)
        opt = loco(model, local_steps=4, output_transfer="linear")
        model(form(x * (x > 0.5))).square().sum().backward()
        opt.step()
        results.append(weights(model))
    assert_close(*results)


NESTED = "its inputs are nested tensors: it takes BackProp steps"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("variant", [*BACKPROP_VARIANTS, "natural-s"])
def test_nested_rows_take_backprop_steps(layout: torch.layout, variant: str) -> None:
    """Also together with calls on plain rows."""
    model, x = network("relu"), batch(8, 6)
    plain = copy.deepcopy(model)
    opt = loco(model, variant=variant, local_steps=4, output_transfer="linear")
    for each, optimizer in ((model, opt), (plain, sgd(list(plain.parameters())))):
        for _ in range(2):
            out = each(nested(x, layout)).to_padded_tensor(0.0)
            (out.square().sum() + each(x).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), weights(plain))
    assert opt.summary().count(NESTED) == 3


@of_the_compiler
def test_nested_rows_in_a_compiled_graph() -> None:
    results = []
    for compiled in (True, False):
        torch.compiler.reset()
        model = network()
        opt = loco(model, local_steps=4)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        of_nested_rows(call, batch(8, 6)).backward()
        opt.step()
        results.append(weights(model))
        assert opt.summary().count(NESTED) == 3
    assert_close(*results)


# Weights that are used outside of their layers --------------------------------------------------


class Tied(nn.Module):
    """An autoencoder whose decoder uses its encoder's weight, in several ways."""

    def __init__(self, end: Callable[[Tensor, Tensor], Any], tied: str = "weight") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.middle = nn.Linear(6, 4).double(), nn.Linear(4, 4).double()
        self.end, self.tied = end, tied

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.middle(torch.tanh(self.encoder(x))))
        return self.end(hidden, getattr(self.encoder, self.tied))


def total(output: Any) -> Tensor:
    return sum(t.square().sum() for t in (output if isinstance(output, tuple) else (output,)))  # type: ignore[return-value]


def with_its_loss(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    out = h @ weight
    return out.square().mean(), out


TIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "transposed": lambda h, weight: F.linear(h, weight.t()),
    "computed": lambda h, weight: h @ (2 * weight),
    "beside a loss": with_its_loss,
}
PENALTIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda h, weight: h,
    "in a loss": lambda h, weight: h.square().mean() + weight.square().sum(),
    "beside the output": lambda h, weight: (h, weight.norm()),
}
ELSEWHERE = "its weight or bias is used outside of its forward too: it takes BackProp steps"


@of_the_compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", TIES)
def test_a_weight_that_is_used_elsewhere_takes_backprop_steps(name: str, compiled: bool) -> None:
    torch.compiler.reset()
    model, x = Tied(TIES[name]), batch(8, 6)
    opts = [loco(model, local_steps=4, output_transfer="linear") for _ in range(2)]  # both see it
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    total(call(x)).backward()
    expected = (model.encoder.weight - RATE * model.encoder.weight.grad).detach()
    for i, opt in enumerate(opts):
        opt.step()
        if i == 0:
            assert_close([model.encoder.weight.detach()], [expected])
        rows = {line.split()[0]: line for line in opt.summary().splitlines() if line}
        assert ELSEWHERE in rows["encoder"]
        assert "locoprop-m" in rows["middle"]


@of_the_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_that_is_used_elsewhere_takes_backprop_steps(compiled: bool) -> None:
    torch.compiler.reset()
    model = Tied(lambda h, bias: h * bias, tied="bias")
    opt = loco(model, local_steps=4)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    total(call(batch(8, 6))).backward()
    tensors = list(model.encoder.parameters())
    expected = [p.detach() - RATE * p.grad for p in tensors if p.grad is not None]
    opt.step()
    assert_close([p.detach() for p in tensors], expected)
    rows = {line.split()[0]: line for line in opt.summary().splitlines() if line}
    assert ELSEWHERE in rows["encoder"]
    assert ELSEWHERE not in rows["middle"]


@of_the_compiler
@pytest.mark.parametrize("shape", [(8, 6), (8, 3, 6), (3, 8, 6)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_in_its_own_layer_is_no_such_use(shape: tuple[int, ...], compiled: bool) -> None:
    torch.compiler.reset()
    model = network()
    opt = loco(model, local_steps=4)
    x = batch(*shape)
    x = x.transpose(0, 1) if shape[0] == 3 else x  # for strided inputs PyTorch adds the bias itself
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    call(x).square().sum().backward()
    opt.step()
    assert ELSEWHERE not in opt.summary()


class Fed(nn.Module):
    """A layer whose input is the weight of another layer, which is solved before it."""

    def __init__(self, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader, self.first = nn.Linear(6, 4).double(), nn.Linear(6, 5).double()
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.reader(self.given(self.first.weight)).mean()


@pytest.mark.parametrize("given", [lambda w: w, lambda w: w[1:], lambda w: w.view(5, 1, 6)])
def test_a_weight_that_is_the_input_of_a_layer(given: Callable[[Tensor], Tensor]) -> None:
    results = []
    for kept in (given, lambda w: given(w).clone()):
        model = Fed(kept)
        opt = loco(model, local_steps=4)
        for seed in range(2):
            opt.zero_grad()
            model(batch(8, 6, seed=seed)).square().sum().backward()
            opt.step()
        assert ELSEWHERE in opt.summary()
        results.append(weights(model))
    assert_close(*results)


@of_the_compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_a_weight_is_no_such_use(name: str, compiled: bool) -> None:
    torch.compiler.reset()
    model = Tied(PENALTIES[name])
    opt = loco(model, local_steps=4)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    total(call(batch(8, 6))).backward()
    opt.step()
    assert ELSEWHERE not in opt.summary()
    assert [layer.transfer and layer.transfer.name for layer in opt._layers] == ["tanh", "tanh"]


# Modules that are more than a weight and a bias ---------------------------------------------------


class Half(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 0.5 * tensor


class Scaled(nn.Linear):
    """A Linear with another parameter, which the model uses."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__(n, d)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_forward_hook(lambda module, _, out: out * module.scale)


def computed_bias() -> nn.Module:
    layer = nn.Linear(6, 5)
    parametrize.register_parametrization(layer, "bias", Half())
    return layer


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "computed bias": (computed_bias, "its bias is computed (parametrized), not a parameter"),
    "pruned weight": (
        lambda: prune.l1_unstructured(nn.Linear(6, 5), "weight", 0.5),
        "its weight is computed (parametrized), not a parameter",
    ),
    "pruned bias": (
        lambda: prune.l1_unstructured(nn.Linear(6, 5), "bias", 0.4),
        "its bias is computed (parametrized), not a parameter",
    ),
    "a parameter more": (
        lambda: Scaled(6, 5),
        "it has more parameters than weight and bias: scale",
    ),
    "LSTM": (
        lambda: nn.LSTM(6, 5),
        "no local problem for this kind of module",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_more_falls_back_whole(name: str) -> None:
    make, reason = MODULES[name]
    torch.manual_seed(0)
    first, last = make().double(), nn.Linear(5, 3).double()
    model = nn.ModuleList([first, last])
    opt = loco(model)
    before = weights(model)
    hidden = first(batch(8, 6))
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    last(torch.tanh(hidden)).square().sum().backward()
    expected = [p - RATE * p.grad for p in model.parameters() if p.grad is not None]
    opt.step()
    assert len(expected) == len(before)
    assert_close(weights(model), expected)
    rows = {line.split()[0]: line for line in opt.summary().splitlines() if line}
    assert reason in rows["0"]
    assert "locoprop" in rows["1"]


def test_complex_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="local problems are real, and its weight is complex"):
        LocoProp(nn.Linear(3, 2, dtype=torch.complex64))


def test_low_rank_adapters_train_beside_frozen_layers() -> None:
    class Adapted(nn.Module):
        def __init__(self, n: int, d: int) -> None:
            super().__init__()
            self.base = nn.Linear(n, d).requires_grad_(False)
            self.down, self.up = nn.Linear(n, 2, bias=False), nn.Linear(2, d, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(Adapted(6, 5), nn.Tanh(), Adapted(5, 3)).double()
    opt = LocoProp(model, preset="paper-m", lr=1e-3, momentum=0.9, output_transfer="linear")
    frozen, x = weights(model[0].base), batch(8, 6)
    losses = []
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert_close(weights(model[0].base), frozen, 0.0)
    assert opt.summary().count("frozen") == 2
