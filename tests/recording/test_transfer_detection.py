"""The transfer after each layer, found in the autograd graph, as ``summary()`` prints it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import ACTIVATIONS, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.paper import transfers
from torch_locoprop.recording import row_gradients


class Net(nn.Module):
    def __init__(
        self, between: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (5, 4)
    ) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.between = between
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self.one(x)))


def transfer_of_first(between: Callable[[Tensor], Tensor], *shape: int) -> object:
    model = Net(between)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)
    model(batch(*(shape or (5, 4)))).square().sum().backward()
    opt.step()
    return opt._layers[0].transfer


NAMED = [name for name in ACTIVATIONS if name != "step"]

# Up to PyTorch 2.9, nothing tells whether reading softsign's constant would run a hook.
HOOKS_ARE_SEEN = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def found_here(transfer: transfers.Transfer) -> transfers.Transfer | None:
    """Return a transfer if this version of PyTorch tells enough to find it."""
    return transfer if HOOKS_ARE_SEEN or transfer != transfers.Softsign() else None


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
@pytest.mark.parametrize("name", NAMED)
def test_every_transfer_is_found(name: str, shape: tuple[int, ...]) -> None:
    assert transfer_of_first(ACTIVATIONS[name], *shape) == found_here(transfers.get(name))


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "leaky_relu": F.leaky_relu_,
    "elu": F.elu_,
    "selu": F.selu_,
    "celu": F.celu_,
    "hardtanh": F.hardtanh_,
    "relu6": lambda a: F.relu6(a, inplace=True),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "arctan": torch.arctan_,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_transfers_in_place_are_found(name: str) -> None:
    assert transfer_of_first(IN_PLACE[name]) == transfers.get(name)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: F.leaky_relu(a, 0.3), transfers.LeakyReLU(0.3)),
        (lambda a: F.elu(a, 0.5), transfers.ELU(0.5)),
        (lambda a: F.celu(a, 0.5), transfers.CELU(0.5)),
        (lambda a: F.softplus(a, beta=2.0), transfers.Softplus(2.0)),
        (lambda a: F.hardtanh(a, -2.0, 3.0), transfers.Hardtanh(-2.0, 3.0)),
        (lambda a: a.clamp(0, 6), transfers.ReLU6()),
        (lambda a: a.clamp(min=0), transfers.ReLU()),
        (lambda a: a.clamp_min(0), transfers.ReLU()),
        (lambda a: F.relu(a) ** 2, transfers.SquaredReLU()),
        (lambda a: torch.softmax(a, dim=1), transfers.Softmax()),
        (lambda a: a / (1 + a.abs()), transfers.Softsign()),
        (lambda a: a / a.abs().add(1.0), transfers.Softsign()),
        (lambda a: a / (torch.ones(4) + a.abs()), transfers.Softsign()),
        (lambda a: F.softplus(a, threshold=30.0), transfers.Softplus()),
    ],
)
def test_parameters_of_transfers(
    function: Callable[[Tensor], Tensor], expected: transfers.Transfer
) -> None:
    assert transfer_of_first(function) == found_here(expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: torch.tanh(a).reshape(-1, 4),
        lambda a: torch.tanh(a[None])[0],
        lambda a: torch.tanh(a).clone(),
        lambda a: torch.tanh(a.float().double()),
        lambda a: F.dropout(torch.tanh(a), 0.5),
        lambda a: F.layer_norm(torch.tanh(a), (4,)),
        lambda a: torch.tanh(a) * 2 + 1,
        lambda a: sum(torch.tanh(a) for _ in range(1)) + torch.tanh(a.detach()),
    ],
)
def test_what_comes_after_the_transfer_does_not_matter(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert transfer_of_first(function) == transfers.Tanh()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (F.gelu, "gelu is not monotone"),
        (F.silu, "silu is not monotone"),
        (F.mish, "mish is not monotone"),
        (F.hardswish, "hardswish is not monotone"),
        (lambda a: torch.tanh(a + 1), "followed by Add"),
        (lambda a: torch.tanh(F.layer_norm(a, (4,))), "followed by NativeLayerNorm"),
        (lambda a: a + torch.tanh(a), "feeds several operations"),
        (lambda a: torch.tanh(a) + torch.relu(a), "feeds several operations"),
        (lambda a: torch.softmax(a, dim=0), "followed by Softmax"),
        (torch.sin, "followed by Sin"),
        (lambda a: F.leaky_relu(a, -0.1), "followed by LeakyRelu"),
        (lambda a: F.elu(a, -0.5), "followed by Elu"),
        (lambda a: a.clamp(max=1), "followed by Clamp"),
        (lambda a: a.clamp_min(1), "followed by ClampMin"),
        (lambda a: a / (2 + a.abs() * a), "feeds several operations"),
        (lambda a: a / 3, "followed by Div"),
        (lambda a: a / (a.square() + 1), "feeds several operations"),
        (lambda a: a / (4 + a.abs()), "feeds several operations"),
        (lambda a: a / torch.add(a.abs(), 1, alpha=2), "feeds several operations"),
        (lambda a: a / torch.add(torch.ones(4), a.abs(), alpha=2), "feeds several operations"),
        (lambda a: a / torch.sub(a.abs(), -4), "feeds several operations"),
        (lambda a: a / (a.abs() + torch.ones(4).requires_grad_()), "feeds several operations"),
        (lambda a: F.softplus(a, threshold=0.5), "softplus with a threshold below 20"),
        (lambda a: F.softplus(a, threshold=10.0), "softplus with a threshold below 20"),
        (lambda a: F.softplus(a, beta=-1.0), "softplus with beta=-1.0 has no known matching loss"),
    ],
)
def test_no_elementwise_transfer_means_locoprop_s_and_says_why(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    model = Net(function)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)
    model(batch(5, 4)).square().sum().backward()
    opt.step()
    row = opt.summary().splitlines()[2]
    assert row.split()[3:5] == ["none", "locoprop-s"]
    assert reason in row


# Every activation of torch.nn that takes and returns one tensor, with unusual parameters.
UNUSUAL: list[nn.Module] = [
    *(nn.CELU(0.3), nn.CELU(2.0), nn.ELU(0.3), nn.ELU(2.0), nn.GELU(), nn.GELU("tanh"), nn.SELU()),
    *(nn.Hardshrink(0.2), nn.Hardsigmoid(), nn.Hardswish(), nn.Hardtanh(-0.3, 0.4), nn.ReLU6()),
    *(nn.LeakyReLU(0.0), nn.LeakyReLU(0.7), nn.LeakyReLU(1.5), nn.LogSigmoid(), nn.Mish()),
    *(nn.PReLU(init=0.3), nn.RReLU(0.2, 0.3), nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.Tanh()),
    *(nn.Softplus(0.5), nn.Softplus(3.0, 1.0), nn.Softplus(3.0, 40.0), nn.Softplus(1.0, 0.0)),
    *(nn.Softshrink(0.2), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.0, 0.0)),
    *(nn.Threshold(0.1, 20.0), nn.Threshold(0.0, -1.0), nn.Softmax(-1), nn.Softmax(0)),
    *(nn.LogSoftmax(-1), nn.Softmin(-1), nn.Identity()),
]


@pytest.mark.parametrize("activation", UNUSUAL, ids=str)
def test_a_detected_transfer_is_the_function_itself(activation: nn.Module) -> None:
    """At ordinary values, at the kinks, and where exponentials round or overflow."""
    activation = activation.double().eval()
    found = transfer_of_first(lambda a: activation(a))  # its parameters are not those of the model
    a = torch.cat(
        [8 * batch(30, 4) - 4, 40 * batch(30, 4, seed=2) - 20, torch.zeros(1, 4).double()]
    )
    if isinstance(found, transfers.Transfer):
        torch.testing.assert_close(found.f(a), activation(a), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.softsign, "softsign"),
        (lambda a: a / (1 + a.abs()), "softsign"),
        (lambda a: a / (a.abs() + 4), "none"),
        (lambda a: a / torch.add(a.abs(), 1, alpha=4), "none"),
        (lambda a: a / torch.add(torch.ones(4), a.abs(), alpha=4), "none"),
        (lambda a: F.softplus(a, beta=2.0), "softplus"),
        (lambda a: F.softplus(a, threshold=0.5), "none"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_constants_are_read_in_a_compiled_graph(
    function: Callable[[Tensor], Tensor], expected: str
) -> None:
    torch.compiler.reset()
    model = Net(function)
    opt = LocoProp(model, variant="locoprop-m", lr=1e-4)
    torch.compile(model, backend="eager", fullgraph=True)(batch(5, 4)).square().sum().backward()
    opt.step()
    assert opt.summary().splitlines()[2].split()[3] == expected


def test_softsign_in_a_checkpointed_block_has_to_be_named() -> None:
    """Its constant is recomputed in the backward pass, after the search."""
    model = Net(torch.relu)

    def block(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.softsign(model.one(x)), x, use_reentrant=False)

    for named, expected in ((None, "none"), ({"one": "softsign"}, "softsign")):
        opt = LocoProp(model, variant="locoprop-m", lr=1e-4, transfers=named)
        model.two(block(batch(5, 4))).square().sum().backward()
        opt.step()
        assert opt.summary().splitlines()[2].split()[3] == expected


def output_row(opt: LocoProp) -> list[str]:
    return opt.summary().splitlines()[3].split(maxsplit=5)


def test_the_output_transfer_is_asked_for_when_unknown() -> None:
    model = Net(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)
    F.mse_loss(model(batch(5, 4)), batch(5, 4)).backward()
    opt.step()
    assert output_row(opt)[4:] == [
        "locoprop-s",
        "its transfer is inside the loss: pass output_transfer= or loss_fn=",
    ]


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "linear"])
def test_output_transfer_by_name(name: str) -> None:
    model = Net(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4, output_transfer=name)
    F.mse_loss(model(batch(5, 4)), batch(5, 4)).backward()
    opt.step()
    assert output_row(opt)[3:5] == [name, "locoprop-m"]


LOSSES = [
    (nn.BCEWithLogitsLoss(), "sigmoid"),
    (nn.CrossEntropyLoss(), "softmax"),
    (nn.MSELoss(), "linear"),
    (F.binary_cross_entropy_with_logits, "sigmoid"),
    (F.cross_entropy, "softmax"),
    (F.mse_loss, "linear"),
]


@pytest.mark.parametrize(("loss_fn", "name"), LOSSES)
def test_output_transfer_from_the_loss(loss_fn: Callable[..., Tensor], name: str) -> None:
    model = Net(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4, loss_fn=loss_fn)
    loss_fn(model(batch(5, 4)), batch(5, 4)).backward()
    opt.step()
    assert output_row(opt)[3:5] == [name, "locoprop-m"]


@pytest.mark.parametrize(("loss_fn", "name"), LOSSES)
def test_output_transfer_from_the_closure(loss_fn: Callable[..., Tensor], name: str) -> None:
    model = Net(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)

    def closure() -> Tensor:
        loss = loss_fn(model(batch(5, 4)), batch(5, 4))
        loss.backward()
        return loss

    opt.step(closure)
    assert output_row(opt)[3:5] == [name, "locoprop-m"]


def test_a_softsign_inside_the_loss_of_a_closure_is_not_known() -> None:
    """After the closure's backward pass, the constant in its denominator is gone."""
    model = Net(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)

    def closure() -> Tensor:
        loss = F.mse_loss(F.softsign(model(batch(5, 4))), batch(5, 4))
        loss.backward()
        return loss

    opt.step(closure)
    assert output_row(opt)[3:5] == ["none", "locoprop-s"]


def test_a_transfer_inside_the_model_needs_no_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    opt = LocoProp(model, preset="paper-m", lr=1e-4)
    F.binary_cross_entropy(model(batch(5, 4).float()), batch(5, 4).float()).backward()
    opt.step()
    assert output_row(opt)[3:5] == ["sigmoid", "locoprop-m"]


def test_a_loss_computed_inside_the_model_is_seen() -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), x)

    model = WithLoss(torch.tanh)
    opt = LocoProp(model, preset="paper-m", lr=1e-4)
    model(batch(5, 4)).backward()
    opt.step()
    assert output_row(opt)[3:5] == ["softmax", "locoprop-m"]


def test_explicit_transfers_win() -> None:
    model = Net(torch.tanh)
    opt = LocoProp(
        model,
        preset="paper-m",
        lr=1e-4,
        transfers={"one": "linear", "two": transfers.Softplus(2.0)},
        output_transfer="sigmoid",
    )
    assert [row.split()[3] for row in opt.summary().splitlines()[2:4]] == ["linear", "softplus"]
    model(batch(5, 4)).square().sum().backward()
    opt.step()
    assert [row.split()[3] for row in opt.summary().splitlines()[2:4]] == ["linear", "softplus"]
    assert opt._layers[1].is_output


@pytest.mark.parametrize("name", ["gelu", "SiLU"])
def test_an_explicit_non_monotone_transfer_is_served_by_locoprop_s(name: str) -> None:
    opt = LocoProp(Net(torch.tanh), preset="paper-m", transfers={"one": name})
    row = opt.summary().splitlines()[2]
    assert "locoprop-s" in row
    assert f"{name} is not monotone" in row


def test_the_wrong_transfer_makes_a_difference() -> None:
    results = []
    for given in (None, {"one": "linear"}):
        torch.manual_seed(0)
        model = Net(torch.tanh)
        opt = LocoProp(model, preset="paper-m", lr=1e-2, transfers=given)
        model(4 * batch(5, 4)).square().sum().backward()
        opt.step()
        results.append(model.one.weight.detach())
    assert (results[0] - results[1]).abs().max() > 1e-6


@pytest.mark.parametrize("variant", ["pocoprop-s", "pocoprop-m"])
def test_an_explicit_transfer_that_is_not_the_graphs_own_still_starts_at_backprop(
    variant: str,
) -> None:
    """∂L/∂y is computed from ∂L/∂a through the given transfer."""
    torch.manual_seed(0)
    model = Net(torch.tanh)
    opt = LocoProp(model, lr=1e-2, variant=variant, solver="sgd", transfers={"one": "softplus"})
    model(batch(5, 4)).square().sum().backward()
    layer = opt._layers[0]
    assert row_gradients.post_gradients(layer) is None
    a = batch(5, 4) @ model.one.weight.mT + model.one.bias
    v = layer.transfer.pull_back(a, row_gradients.gradients(layer))
    torch.testing.assert_close(layer.transfer.vjp(a, v), row_gradients.gradients(layer))


def test_post_gradients_of_squared_relu_are_taken_behind_the_square() -> None:
    torch.manual_seed(0)
    model = Net(lambda a: torch.relu(a) ** 2)
    opt = LocoProp(model, lr=1e-3, variant="pocoprop-s", gamma=1.0)
    for _ in range(2):
        model(batch(5, 4)).square().sum().backward()
        layer = opt._layers[0]
        y = (torch.relu(batch(5, 4) @ model.one.weight.mT + model.one.bias) ** 2).detach()
        y.requires_grad_()
        (expected,) = torch.autograd.grad(
            torch.nn.functional.linear(y, model.two.weight, model.two.bias).square().sum(), y
        )
        if layer.transfer is not None:
            torch.testing.assert_close(row_gradients.post_gradients(layer), expected)
        opt.step()
        opt.zero_grad()
    assert layer.transfer == transfers.SquaredReLU()
