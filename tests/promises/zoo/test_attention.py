"""``nn.MultiheadAttention``, which does not call its projections, and shared weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, batch, weights
from promises.zoo.test_uses import RATE, loco
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_locoprop import LocoProp

UNCALLED = "nn.MultiheadAttention does not call its projections"
X = batch(3, 4, 6)

KINDS: dict[str, dict[str, Any]] = {
    "rows first": {"batch_first": True},
    "places first": {"batch_first": False},
    "other keys and values": {"kdim": 5, "vdim": 7},
    "without biases": {"bias": False, "batch_first": True},
    "biases of keys and values": {"add_bias_kv": True, "batch_first": True},
}


class Attentive(nn.Module):
    """Attention between two layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, **options)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.tanh(self.first(x))
        k = q if self.attention.kdim == 6 else q[..., :1].expand(*q.shape[:-1], 5)
        v = q if self.attention.vdim == 6 else q[..., :1].expand(*q.shape[:-1], 7)
        mixed: Tensor = self.attention(q, k, v, need_weights=False)[0]
        return self.last(mixed)


def notes(opt: LocoProp) -> dict[str, str]:
    """Return the row of the summary of each module."""
    return {line.split()[0]: line for line in opt.summary().splitlines() if line}


def assert_all_are_trained(model: nn.Module, opt: LocoProp, loss: Callable[[], Tensor]) -> None:
    """Check that each parameter moves by one plain step."""
    before = weights(model)
    loss().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and bool(g.any()) for g in gradients)
    expected = [p - RATE * g for p, g in zip(before, gradients, strict=True) if g is not None]
    opt.step()
    opt.zero_grad()
    assert_close(weights(model), expected)


def fallen_back(opt: LocoProp) -> set[nn.Parameter]:
    return {p for group in opt.param_groups if group["fallback"] for p in group["params"]}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_falls_back_and_says_why(kind: str) -> None:
    model = Attentive(**KINDS[kind]).double()
    opt = loco(model, output_transfer="linear")
    for _ in range(2):
        assert_all_are_trained(model, opt, lambda: model(X).square().sum())
    assert fallen_back(opt) == set(model.attention.parameters())
    rows = notes(opt)
    for name in ("attention", "attention.out_proj"):
        assert rows[name].endswith(UNCALLED)
        assert " SGD " in rows[name]
    assert "locoprop-m" in rows["last"]


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_the_fast_path_in_evaluation_leaves_nothing_behind() -> None:
    model = Attentive(batch_first=True).double()
    alone = Attentive(batch_first=True).double().eval()
    opt = loco(model, output_transfer="linear")
    assert_all_are_trained(model, opt, lambda: model(X).square().sum())
    alone.load_state_dict(model.state_dict())
    model.eval()
    with torch.no_grad(), Operations() as ran:
        assert_close([model(X)], [alone(X)], 0.0)
    assert "aten::_native_multi_head_attention" in ran.names
    assert not any(layer.calls for layer in opt._layers)
    model.train()
    assert_all_are_trained(model, opt, lambda: model(X).square().sum())


def test_a_transformer_layer_gives_the_same_in_evaluation() -> None:
    """With or without PyTorch's fast path, which hooks on layers may disable."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double().eval()
    with torch.no_grad():
        before = model(X)
        opt = loco(model)
        assert_close([model(X)], [before], 1e-12)
    assert {n.partition(" ")[0] for n in notes(opt)} >= {"self_attn", "linear1", "norm1"}


# Weights that several modules share ---------------------------------------------------------------


class Tied(nn.Module):
    """Two layers around a third one, to share weights between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.between, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.between(torch.tanh(self.one(x)))))


def tie_weights(model: Tied) -> None:
    model.two.weight = model.one.weight


def tie_biases(model: Tied) -> None:
    model.two.bias = model.one.bias


def tie_to_the_model(model: Tied) -> None:
    """Share a parameter with the model itself."""
    model.register_parameter("own", model.one.weight)
    model.two.weight = model.one.weight


@pytest.mark.parametrize(
    ("tie", "names"),
    [
        (tie_weights, "'one', 'two'"),
        (tie_biases, "'one', 'two'"),
        (tie_to_the_model, "'(model)', 'one', 'two'"),
    ],
)
def test_tied_layers_fall_back_whole_and_name_each_other(
    tie: Callable[[Tied], None], names: str
) -> None:
    model = Tied().double()
    tie(model)
    opt = loco(model, output_transfer="linear")
    for _ in range(2):
        assert_all_are_trained(model, opt, lambda: model(X).square().sum())
    assert fallen_back(opt) == {*model.one.parameters(), *model.two.parameters()}
    rows = notes(opt)
    for name in ("one", "two"):
        assert rows[name].endswith(f"tied: a parameter is shared by {names}")
        assert " SGD " in rows[name]
    assert "locoprop-m" in rows["between"]


def test_two_parameters_in_one_memory_are_tied() -> None:
    """The local solution of one layer would be written over that of the other."""
    model = Tied().double()
    model.two.weight.data = model.one.weight.data.t()
    rows = notes(loco(model, output_transfer="linear"))
    for name in ("one", "two"):
        assert rows[name].endswith("tied: a parameter is shared by 'one', 'two'")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = torch.split(flat, [p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.data = part.view_as(p)  # one buffer for all, as some trainers have it
    assert not any("tied" in note for note in notes(loco(model)).values())


def test_one_module_in_two_places_is_one_layer() -> None:
    model = Tied().double()
    model.two = model.one
    opt = loco(model, output_transfer="linear")
    assert_all_are_trained(model, opt, lambda: model(X).square().sum())
    assert not fallen_back(opt)
    assert opt.summary().count("locoprop") == 2
