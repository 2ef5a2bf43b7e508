"""Convolutions: their operators equal the unfolded matrix problem, and their steps autograd's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, weights
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from torch_locoprop import LocoProp
from torch_locoprop.layers import conv, layer_kind
from torch_locoprop.layers.conv import ConvLayer
from torch_locoprop.paper.gram import Gram

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

Conv = nn.modules.conv._ConvNd

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "everything": {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
}
PADDED: dict[str, dict[str, Any]] = {
    "same": {"padding": "same"},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "circular": {"padding": 2, "padding_mode": "circular"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "reflect, same": {"padding": "same", "padding_mode": "reflect"},
}
DIRECT = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def convolution(dimensions: int, transposed: bool, **settings: Any) -> Conv:
    torch.manual_seed(0)
    cls: Any = (TRANSPOSED if transposed else DIRECT)[dimensions]
    return cls(**{"in_channels": 4, "out_channels": 8, "kernel_size": 3, **settings}).double()


def images(dimensions: int, samples: int = 2, seed: int = 1, size: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, 4, *(size + i for i in range(dimensions)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


CASES = [
    *((d, t, s) for d in (1, 2, 3) for t in (False, True) for s in SETTINGS.values()),
    *((d, False, s) for d in (1, 2) for s in PADDED.values()),
    (2, True, {"stride": 2, "output_padding": 1}),
]


@pytest.mark.parametrize(("dimensions", "transposed", "settings"), CASES)
def test_operators(dimensions: int, transposed: bool, settings: dict[str, Any]) -> None:
    """Forward is the module's, the weight gradient is autograd's, and both are products with X."""
    module, x = convolution(dimensions, transposed, **settings), images(dimensions)
    kind = layer_kind(module)
    assert isinstance(kind, ConvLayer)
    out = module(x)
    collected = kind.collect([x], [out.shape], module.weight)
    tensors = {name: kind.matrix(name, p.detach()) for name, p in module.named_parameters()}
    a = kind.linear_map.forward(collected, **tensors)
    assert_close(a, kind.rows(out.detach()))
    assert sum(i.rows for i in collected) == out.numel() // out.shape[1] == a.shape[-2]
    g = torch.randn_like(out)
    found = kind.linear_map.weight_grad(collected, kind.rows(g))
    expected = torch.autograd.grad(out, list(module.parameters()), g)
    for (name, p), gradient in zip(module.named_parameters(), expected, strict=True):
        assert_close(kind.restored(name, found[name], p), gradient)
        assert torch.equal(kind.restored(name, tensors[name], p), p)
    X = kind.linear_map.inputs(collected, weight=True, bias="bias" in tensors)
    joint = torch.cat([tensors["weight"], *(t.unsqueeze(-1) for n, t in tensors.items() if n == "bias")], -1)  # fmt: skip # noqa: E501
    assert_close(X @ joint.mT, a)


@pytest.mark.parametrize("settings", [s for s in SETTINGS.values() if "groups" not in s])
def test_inputs_are_torchs_unfolding(settings: dict[str, Any]) -> None:
    module, x = convolution(2, False, **settings), images(2)
    kind = layer_kind(module)
    assert kind is not None
    collected = kind.collect([x], [module(x).shape], module.weight)
    own = {n: v for n, v in settings.items() if n != "bias"}
    unfolded = F.unfold(x, 3, **own).transpose(1, 2).flatten(0, 1)
    assert_close(kind.linear_map.inputs(collected, weight=True, bias=False), unfolded)


@pytest.mark.parametrize("at_once", [1, 700, 2**22])
@pytest.mark.parametrize(("dimensions", "transposed", "settings"), CASES)
def test_products_in_parts_are_those_of_all_patches(
    monkeypatch: pytest.MonkeyPatch,
    dimensions: int,
    transposed: bool,
    settings: dict[str, Any],
    at_once: int,
) -> None:
    """From calls of several sizes, some samples at a time."""
    monkeypatch.setattr(conv, "AT_ONCE", at_once)
    module = convolution(dimensions, transposed, **settings)
    kind = layer_kind(module)
    assert isinstance(kind, ConvLayer)
    calls = [images(dimensions, samples=5), images(dimensions, size=9)]
    collected = kind.collect(calls, [module(x).shape for x in calls], module.weight)
    X = kind.linear_map.inputs(collected, weight=True, bias=False)
    blocks = list(kind.linear_map.row_blocks(collected))
    found = sum(map(Gram.of, blocks[1:]), Gram.of(blocks[0]))
    assert_close([found.square, found.total], [X.mT @ X, X.sum(-2)])
    assert found.rows == X.shape[-2]


# The optimizer ----------------------------------------------------------------------------------


def model(dimensions: int = 2, transposed: bool = False, **settings: Any) -> nn.Sequential:
    first = convolution(dimensions, transposed, **settings)
    flat = nn.Flatten()
    width = flat(first(images(dimensions))).shape[1]
    return nn.Sequential(first, nn.Tanh(), flat, nn.Linear(width, 3)).double()


def loss_of(network: nn.Module, x: Tensor) -> Tensor:
    logits = network(x)
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits) * 0.3)


def sgd_by_autograd(
    network: nn.Module, x: Tensor, *, lr: float, gamma: float, steps: int, matching: bool
) -> list[Tensor]:
    """T iterations of the first layer's local problem, its loss written out and left to autograd."""
    layer = network[0]  # type: ignore[index]
    a0 = layer(x)
    y0 = torch.tanh(a0)
    g = torch.autograd.grad(loss_of(nn.Sequential(*list(network)[1:]), a0), a0)[0]  # type: ignore[call-overload]
    at = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    for t in range(steps):
        a = functional_call(layer, at, (x,))
        if matching:
            local = torch.log(torch.cosh(a)).sum() - ((y0 - gamma * g).detach() * a).sum()
        else:
            local = 0.5 * (a - (a0 - gamma * g).detach()).square().sum()
        gradients = torch.autograd.grad(local, list(at.values()))
        rate = lr * max(1 - t / steps, 0.25)
        at = {
            n: (p - rate * d).detach().requires_grad_()
            for (n, p), d in zip(at.items(), gradients, strict=True)
        }
    return [p.detach() for p in at.values()]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
@pytest.mark.parametrize(("dimensions", "transposed", "settings"), CASES)
def test_a_step_is_the_local_problem_by_autograd(
    variant: str, dimensions: int, transposed: bool, settings: dict[str, Any]
) -> None:
    network, x = model(dimensions, transposed, **settings), images(dimensions)
    own = {"lr": 1e-3, "gamma": 20.0}
    expected = sgd_by_autograd(network, x, steps=4, matching=variant == "locoprop-m", **own)
    opt = LocoProp(
        network, variant=variant, solver="sgd", local_steps=4, output_transfer="sigmoid", **own
    )
    loss_of(network, x).backward()
    opt.step()
    assert_close(weights(network[0]), expected)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@pytest.mark.parametrize(("dimensions", "transposed", "settings"), CASES)
def test_one_iteration_is_backprop(
    variant: str, dimensions: int, transposed: bool, settings: dict[str, Any]
) -> None:
    network, x = model(dimensions, transposed, **settings), images(dimensions)
    plain = copy.deepcopy(network)
    opt = LocoProp(
        network,
        lr=0.01,
        gamma=3.0,
        variant=variant,
        solver="sgd",
        local_steps=1,
        output_transfer="sigmoid",
    )
    loss_of(network, x).backward()
    opt.step()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.03)
    loss_of(plain, x).backward()
    sgd.step()
    assert_close(weights(network), weights(plain))


@pytest.mark.parametrize("settings", SETTINGS.values())
def test_the_exact_step_solves_the_unfolded_system(settings: dict[str, Any]) -> None:
    """Δ (I + η XᵀX) = −ηγ G, group by group, with X from torch's own unfolding."""
    network, x = model(2, False, **settings), images(2)
    own = {n: v for n, v in settings.items() if n not in ("bias", "groups")}
    groups, eta, gamma = settings.get("groups", 1), 0.05, 3.0
    layer = network[0]
    before = [p.detach().clone() for p in layer.parameters()]
    opt = LocoProp(
        network,
        lr=eta,
        gamma=gamma,
        variant="locoprop-s",
        solver="exact",
        output_transfer="sigmoid",
    )
    loss_of(network, x).backward()
    gradients = [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]
    opt.step()
    for group in range(groups):
        channels = slice(group * 4 // groups, (group + 1) * 4 // groups)
        features = slice(group * 8 // groups, (group + 1) * 8 // groups)
        X = F.unfold(x[:, channels], 3, **own).transpose(1, 2).flatten(0, 1)
        if layer.bias is not None:
            X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
        joint = [
            torch.cat(
                [t[features].flatten(1) if t.dim() > 1 else t[features, None] for t in own], 1
            )
            for own in (gradients, [p - b for p, b in zip(layer.parameters(), before, strict=True)])
        ]
        eye = torch.eye(X.shape[1], dtype=X.dtype)
        assert_close(joint[1] @ (eye + eta * X.T @ X), -eta * gamma * joint[0])


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
@pytest.mark.parametrize(("dimensions", "transposed", "settings"), CASES)
def test_iterations_are_convolutions(
    variant: str, dimensions: int, transposed: bool, settings: dict[str, Any]
) -> None:
    """One each way in every iteration after the first, and one where they start; no patches."""
    network, x = model(dimensions, transposed, **settings), images(dimensions)[:1]
    opt = LocoProp(network, variant=variant, solver="sgd", local_steps=4, output_transfer="sigmoid")
    opt._layers[0].use_of_rows = None  # keep the images, however few products they have
    loss_of(network, x).backward()
    with Operators() as ran:
        opt.step()
    assert ran.counts["convolution"] == 1 + 3
    assert ran.counts["convolution_backward"] == 3
    assert not {"unfold", "im2col", "as_strided"} & set(ran.counts)


def test_iterations_by_products_are_not() -> None:
    """Patches are unfolded once, when the backward pass comes through."""
    network, x = model(2), images(2, samples=40)
    opt = LocoProp(network, variant="locoprop-s", local_steps=4, output_transfer="sigmoid")
    with Operators() as ran:
        loss_of(network, x).backward()
    assert ran.counts["unfold"] == 2  # the two dimensions
    assert opt._layers[0].calls[0].x.numel() == 0
    with Operators() as ran:
        opt.step()
    assert not {"convolution", "convolution_backward", "unfold", "im2col"} & set(ran.counts)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "natural-s", "pocoprop-m"])
def test_calls_on_images_of_several_sizes_are_one_problem(variant: str) -> None:
    """Two backward passes on different sizes move as the sum of their rows does."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)).double()
    opt = LocoProp(network, lr=1e-3, variant=variant, output_transfer="sigmoid", solver="sgd")
    before = weights(network)
    for size in (7, 9):
        out = network(images(2, size=size))
        F.binary_cross_entropy_with_logits(out, torch.zeros_like(out)).backward()
    layer = opt._layers[0]
    assert layer.row_count == 2 * (5 * 6 + 7 * 8)
    opt.step()
    for old, new in zip(before, weights(network), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


def test_channels_last_and_single_images_are_the_same_rows() -> None:
    steps = []
    for form in (
        lambda t: t,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t[0],
    ):
        network, x = model(2), images(2, samples=1)
        network[2] = nn.Flatten(start_dim=-3)
        opt = LocoProp(network, lr=1e-3, output_transfer="sigmoid")
        loss_of(network, form(x)).backward()
        opt.step()
        steps.append(weights(network))
    assert_close(steps[1], steps[0])
    assert_close(steps[2], steps[0])


def test_an_output_size_given_in_the_call_is_seen() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 8, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x, output_size=(16, 18))).mean()

    torch.manual_seed(0)
    network, x = Up().double(), images(2)
    opt = LocoProp(network, lr=1e-3, variant="locoprop-m")
    network(x).backward()
    layer = opt._layers[0]
    assert layer.kind.linear_map.forward(layer.inputs(), layer.kind.matrix("weight", layer.module.weight)).shape == (2 * 16 * 18, 8)  # fmt: skip # noqa: E501
    opt.step()


def test_softmax_over_positions_is_not_a_transfer() -> None:
    """The last dimension of an image has as many entries as there are features, by chance."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.softmax(self.conv(x), -1))

    network = Net().double()
    opt = LocoProp(network, variant="locoprop-m", output_transfer="sigmoid")
    x = images(2, size=7)
    assert x.shape[-1] == 8
    loss_of(network, x).backward()
    opt.step()
    assert "softmax is not over" in opt.summary()


def test_a_convolution_with_a_forward_of_its_own_falls_back() -> None:
    class Odd(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    network = nn.Sequential(Odd(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    loss_of(network, images(2))
    with pytest.warns(UserWarning, match="AdamW"):
        opt = LocoProp(network)
    assert "forward of its own" in opt.summary()


@pytest.mark.parametrize("patched", [False, True])
def test_a_convolution_with_a_conv_forward_of_its_own_falls_back(patched: bool) -> None:
    """As weight standardization has it."""

    class Standardized(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    first = nn.Conv2d(4, 8, 3) if patched else Standardized(4, 8, 3)
    if patched:
        first._conv_forward = lambda x, w, b: F.conv2d(x, w - w.mean(), b)  # type: ignore[method-assign]
    network = nn.Sequential(first, nn.Tanh(), nn.Conv2d(8, 2, 1)).double()
    opt = LocoProp(network, lr=1e-3, fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    assert "forward of its own" in opt.summary()
    assert [layer.name for layer in opt._layers] == ["2"]


def test_making_an_optimizer_leaves_a_spectral_norm_as_it_is() -> None:
    """In training, each look at such a weight is another power iteration."""
    network = model(2)
    network[0] = parametrizations.spectral_norm(network[0])
    before = {n: t.clone() for n, t in network.state_dict().items()}
    opt = LocoProp(network, fallback=lambda ps: torch.optim.SGD(ps, lr=0.1))
    opt.summary()
    for n, t in network.state_dict().items():
        assert torch.equal(t, before[n]), n


@pytest.mark.parametrize("solver", ["rmsprop", "adam", "exact"])
def test_training_lowers_the_loss(solver: str) -> None:
    """From 0.73 in 30 steps; SGD at its best of five rates gets to 0.611 in as many."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 1 * 1, 3),
    ).double()  # fmt: skip
    x = images(2, samples=16, size=7)
    lr = 0.1 if solver == "exact" else 1e-3
    opt = LocoProp(network, lr=lr, momentum=0.9, solver=solver, output_transfer="sigmoid")
    assert loss_of(network, x).item() > 0.725
    for _ in range(30):
        loss_of(network, x).backward()
        opt.step()
        opt.zero_grad()
    assert loss_of(network, x).item() < 0.622
    opt.load_state_dict(opt.state_dict())
