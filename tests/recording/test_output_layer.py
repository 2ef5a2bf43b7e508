"""Which layer is the output, and that only it gets the transfer inside the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper import transfers
from torch_locoprop.recording import row_gradients


def transfers_of(opt: LocoProp) -> dict[str, str | None]:
    return {layer.name: layer.transfer and layer.transfer.name for layer in opt._layers}


def step(model: nn.Module, opt: LocoProp, x: Tensor) -> None:
    out = model(x)
    out.square().sum().backward()
    opt.step()
    opt.zero_grad()


def test_a_layer_in_front_of_one_that_is_not_given() -> None:
    model = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    given = [*model[0].parameters(), *model[2].parameters()]
    opt = LocoProp(
        model, preset="paper-m", output_transfer="softmax", param_groups=[{"params": given}]
    )
    step(model, opt, batch(8, 6))
    assert transfers_of(opt) == {"0": "relu", "2": "tanh"}


class TiedHead(nn.Module):
    """A residual block before a head that shares the embedding's weight."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.functional = functional

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + self.fc2(torch.relu(self.fc1(h)))
        return F.linear(h, self.embedding.weight) if self.functional else self.head(h)


@pytest.mark.parametrize("functional", [False, True])
def test_a_layer_in_front_of_a_tied_head(functional: bool) -> None:
    torch.manual_seed(0)
    model = TiedHead(functional)
    opt = LocoProp(
        model,
        preset="paper-m",
        output_transfer="softmax",
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    step(model, opt, torch.arange(7))
    assert transfers_of(opt) == {"fc1": "relu", "fc2": None}
    assert not opt._layers[1].is_output


def test_labels_are_drawn_at_a_head_that_falls_back() -> None:
    """Sampled gradients start at the tied head, not at the last layer with a local problem."""
    torch.manual_seed(0)
    model = TiedHead(functional=False)
    opt = LocoProp(
        model,
        variant="natural-s",
        output_transfer="softmax",
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    model(torch.arange(7)).square().sum().backward()
    sampled = row_gradients.sampled(opt._layers[1])
    assert sampled.shape == (7, 6)
    # what reaches fc2 is (softmax − one-hot) @ E: its rows lie in the span of the embedding's rows,
    # and no row is a difference of probabilities over fc2's own six features, which sum to zero
    assert (sampled.sum(-1).abs() > 1e-6).any()


def test_labels_need_an_output_layer() -> None:
    model = TiedHead(functional=True)
    opt = LocoProp(
        model,
        variant="natural-s",
        output_transfer="softmax",
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    with pytest.raises(RuntimeError, match="the model ends in another operation"):
        model(torch.arange(7))
    assert not opt.state


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.policy(h), self.value(h)


def test_softmax_over_one_feature_is_refused() -> None:
    model = TwoHeads()
    opt = LocoProp(model, preset="paper-m", output_transfer="softmax")
    policy, value = model(batch(8, 4).float())
    (policy.logsumexp(-1).sum() + value.square().sum()).backward()
    opt.step()
    assert transfers_of(opt) == {"body": "tanh", "policy": "softmax", "value": None}
    assert "softmax over one feature is constant" in opt.summary()


@dataclass
class Output:
    logits: Tensor


def test_a_dataclass_as_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Output:
            return Output(torch.sigmoid(self.one(x)))

    model = Model()
    opt = LocoProp(model, preset="paper-m")
    model(batch(8, 4).float()).logits.sum().backward()
    opt.step()
    assert transfers_of(opt) == {"one": "sigmoid"}


@dataclass(slots=True)
class Slotted:
    logits: Tensor


def in_itself(logits: Tensor) -> dict[str, Any]:
    output: dict[str, Any] = {"logits": logits}
    output["self"] = output
    return output


@pytest.mark.parametrize("wrap", [Slotted, in_itself, lambda logits: (Slotted, [logits] * 2)])
def test_a_transfer_is_found_in_unusual_containers(wrap: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.logits = torch.empty(0)

        def forward(self, x: Tensor) -> Any:
            self.logits = torch.sigmoid(self.one(x))
            return wrap(self.logits)

    model = Model()
    opt = LocoProp(model, preset="paper-m")
    model(batch(8, 4).float())
    model.logits.sum().backward()
    opt.step()
    assert transfers_of(opt) == {"one": "sigmoid"}


@pytest.mark.parametrize(
    ("width", "after"),
    [
        (1, lambda a: a.squeeze(-1).softmax(-1)),  # attention pooling over the rows
        (6, lambda a: a.view(-1, 2, 3).softmax(-1).flatten(1)),  # two distributions of three
    ],
)
def test_a_softmax_over_something_else_than_the_features(
    width: int, after: Callable[[Tensor], Tensor]
) -> None:
    model = nn.Linear(4, width)
    opt = LocoProp(model, preset="paper-m")
    after(model(batch(8, 4).float())).square().sum().backward()
    opt._hooks.search.from_loss(torch.zeros(()))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = after(model(batch(8, 4).float())).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert transfers_of(opt) == {"": None}
    assert "its softmax is not over the layer's features" in opt.summary()


def test_an_explicit_transfer_does_not_make_an_output() -> None:
    """Also in later steps, when the autograd graph is no longer searched."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    opt = LocoProp(model, variant="proxprop", transfers={"0": "tanh"})
    for _ in range(3):
        step(model, opt, batch(8, 4))
        assert [layer.is_output for layer in opt._layers] == [False, True]


@pytest.mark.parametrize("variant", ["pocoprop-s", "pocoprop-m"])
def test_post_gradients_of_reshaped_activations(variant: str) -> None:
    """A model that changes the shapes of its activations trains like one that does not."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.gate = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.one(x)) * torch.sigmoid(self.gate(x))

    class Reshaped(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.one(x).view(-1, 2, 2)).reshape(-1, 4)
            return h * torch.sigmoid(self.gate(x).squeeze(-1))[:, None]

    trained = []
    for model in (Reshaped(), Plain()):
        opt = LocoProp(model, lr=1e-2, gamma=1.0, variant=variant, solver="sgd")
        x = batch(8, 4)
        for _ in range(3):
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        assert transfers_of(opt) == {"one": "tanh", "gate": "sigmoid"}
        trained.append(weights(model))
    assert_close(*trained)


def tanh_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
    ).double()


EXPECTED = {"0": "tanh", "2": "tanh", "4": "softmax"}


def test_two_optimizers_on_one_model_see_the_same() -> None:
    model = tanh_net()
    opts = [LocoProp(model, preset="paper-m", lr=1e-4, output_transfer="softmax") for _ in range(2)]
    model(batch(8, 4)).square().sum().backward()
    for opt in opts:
        opt.step()
        assert transfers_of(opt) == EXPECTED


def test_an_optimizer_made_anew_while_a_loss_is_kept() -> None:
    model = tanh_net()
    kept = []
    for _ in range(2):
        opt = LocoProp(model, preset="paper-m", lr=1e-4, output_transfer="softmax")
        loss = model(batch(8, 4)).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        kept.append(loss)
        assert transfers_of(opt) == EXPECTED
    assert len(model[0]._forward_hooks) == 1


@pytest.mark.parametrize("head", [lambda w: 2 * w, lambda w: F.normalize(w, dim=-1)])
def test_a_head_with_a_computed_weight(head: Callable[[Tensor], Tensor]) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.one(x), head(self.weight))

    model = Computed()
    opt = LocoProp(
        model,
        preset="paper-m",
        output_transfer="softmax",
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    step(model, opt, batch(8, 4).float())
    assert transfers_of(opt) == {"one": None}
    assert not opt._layers[0].is_output


def test_a_log_softmax_between_layers_is_not_softmax() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(-1), nn.Linear(4, 4))
    opt = LocoProp(model, preset="paper-m")
    step(model, opt, batch(8, 4).float())
    assert transfers_of(opt) == {"0": None, "2": None}
    assert "followed by LogSoftmax" in opt.summary()


@pytest.mark.parametrize("how", ["replaced", "parametrized"])
def test_parameters_that_are_no_longer_the_layers_own(how: str) -> None:
    model = tanh_net()
    opt = LocoProp(model, preset="paper-m", output_transfer="softmax")
    if how == "replaced":
        model[2].weight = nn.Parameter(torch.eye(4).double())
    else:
        nn.utils.parametrizations.weight_norm(model[2])
    model(batch(8, 4)).square().sum().backward()
    with pytest.raises(
        RuntimeError, match=r"Layer '2' no longer has the parameters.*Make a new optimizer"
    ):
        opt.step()
    assert "make a new optimizer" in opt.summary()


class Followed(nn.Module):
    """A model that ends in operations without parameters after a transfer."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 5).double(), nn.Linear(5, 5).double()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.relu(self.two(torch.tanh(self.one(x)))))


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "prototypes": lambda h: h @ batch(3, 5).t(),
    "unit length": lambda h: F.normalize(h, dim=-1),
    "nothing": lambda h: h,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "given", [{"output_transfer": "softmax"}, {"loss_fn": nn.CrossEntropyLoss()}]
)
def test_a_transfer_that_was_found_is_not_the_one_inside_the_loss(
    end: str, given: dict[str, Any]
) -> None:
    model = Followed(ENDS[end])
    opt = LocoProp(model, preset="paper-m", **given)
    z = model(batch(8, 4))
    F.cross_entropy(z @ z.t(), torch.arange(8)).backward()
    opt.step()
    assert transfers_of(opt) == {"one": "tanh", "two": "relu"}


def test_labels_are_not_drawn_in_front_of_further_operations() -> None:
    model = Followed(ENDS["prototypes"])
    opt = LocoProp(model, variant="natural-s", output_transfer="softmax")
    with pytest.raises(RuntimeError, match="the model ends in another operation"):
        model(batch(8, 4))
    assert not opt.state


def by_hand(a: Tensor) -> Tensor:
    return (F.softplus(a) - 0.3 * a).sum()


def of_probabilities(a: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(a), torch.full_like(a, 0.3), reduction="sum")


def of_the_difference(a: Tensor) -> Tensor:
    return (a - 0.3).square().sum()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("loss", [by_hand, of_probabilities, of_the_difference])
def test_what_a_loss_does_with_the_output_does_not_matter(
    loss: Callable[[Tensor], Tensor], closure: bool
) -> None:
    """output_transfer= is used whether or not the loss itself can be searched."""
    model = tanh_net()
    opt = LocoProp(model, preset="paper-m", lr=1e-4, output_transfer="sigmoid")

    def backward() -> Tensor:
        found = loss(model(batch(8, 4)))
        found.backward()
        return found

    if closure:
        opt.step(backward)
    else:
        backward()
        opt.step()
    assert transfers_of(opt) == {**EXPECTED, "4": "sigmoid"}
    assert [layer.is_output for layer in opt._layers] == [False, False, True]


@pytest.mark.parametrize(
    "end", [lambda p: p, torch.log, lambda p: p.clamp(1e-6, 1), lambda p: p.transpose(0, 1)]
)
def test_a_transfer_in_the_model_that_is_given_too(end: Callable[[Tensor], Tensor]) -> None:
    """The output layer gets the transfer, and labels are drawn from it."""

    class Probabilities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tanh_net()

        def forward(self, x: Tensor) -> Tensor:
            return end(torch.softmax(self.net(x), dim=-1))

    model = Probabilities()
    for options in ({}, {"variant": "natural-s"}):
        opt = LocoProp(model, preset="paper-m", lr=1e-4, output_transfer="softmax", **options)
        step(model, opt, batch(8, 4))
        assert list(transfers_of(opt).values()) == list(EXPECTED.values())
        assert opt._layers[-1].is_output


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda w: w,
    "normalized": F.normalize,
    "standardized": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
    "low rank": lambda w: w[:, :2] @ w[:2],
    "masked": lambda w: w * (w.detach() > 0),
}


class ByFunction(nn.Module):
    """An embedding, and logits by a product with a weight that a function computes."""

    def __init__(self, weight: Callable[[Tensor], Tensor], returns_embedding: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8).double()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.weight, self.returns_embedding = weight, returns_embedding

    def forward(self, x: Tensor) -> Any:
        embedding = self.fc(x)
        logits = F.linear(F.normalize(embedding), self.weight(self.w))
        return (logits, embedding) if self.returns_embedding else logits


@pytest.mark.parametrize("returns_embedding", [True, False])
@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_layer_before_a_computed_weight_is_not_the_output(
    weight: Callable[[Tensor], Tensor], backend: str | None, returns_embedding: bool
) -> None:
    torch.compiler.reset()
    model = ByFunction(weight, returns_embedding)
    opt = LocoProp(
        model,
        variant="locoprop-m",
        lr=1e-3,
        loss_fn=nn.CrossEntropyLoss(),
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    found = (model if backend is None else torch.compile(model, backend=backend))(batch(9, 6))
    logits = found[0] if returns_embedding else found
    F.cross_entropy(logits, torch.arange(9) % 8).backward()
    opt.step()
    assert not opt._layers[0].is_output
    assert opt._layers[0].transfer is None


# Logits from an embedding [rows, 8] and prototypes [8, 8], by other operations than products.
HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distances": lambda e, w: -torch.cdist(e, w),
    "differences": lambda e, w: -(e[:, None] - w[None]).square().sum(-1),
    "cosines": lambda e, w: F.cosine_similarity(e[:, None], w[None], dim=-1),
    "einsum": lambda e, w: torch.einsum("ri,ki->rk", e, w),
    "gains": lambda e, w: e * w.diagonal().exp(),
    "shifts": lambda e, w: e + w[0].tanh(),
}


@pytest.mark.parametrize("weight", [WEIGHTS["plain"], WEIGHTS["normalized"]], ids=["plain", "unit"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_an_embedding_returned_beside_logits_gets_no_softmax(
    head: Callable[[Tensor, Tensor], Tensor], weight: Callable[[Tensor], Tensor]
) -> None:
    class Prototypes(ByFunction):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            embedding = self.fc(x)
            return head(embedding, self.weight(self.w)), embedding

    model = Prototypes(weight, True)
    sgd = {"fallback": lambda p: torch.optim.SGD(p, lr=0.1)}
    opt = LocoProp(model, variant="locoprop-m", lr=1e-3, loss_fn=nn.CrossEntropyLoss(), **sgd)
    F.cross_entropy(model(batch(9, 6))[0], torch.arange(9) % 8).backward()
    opt.step()
    assert not opt._layers[0].is_output
    assert opt._layers[0].transfer is None


def test_an_input_with_gradients_is_no_parameter() -> None:
    """A PINN also uses its output times a function of its inputs, which is zero at the boundary."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tanh_net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.net(x)
            return out, out * (x * (1 - x)).prod(-1, keepdim=True)

    model = Bounded()
    opt = LocoProp(model, preset="paper-m", lr=1e-4, gamma=1e3, output_transfer="linear")
    sum(out.square().sum() for out in model(batch(8, 4).requires_grad_())).backward()
    opt.step()
    assert opt._layers[-1].is_output
    assert opt._layers[-1].transfer == transfers.Linear()
