"""What hooks record for many kinds of models and loops, compared with a plain run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from torch_locoprop import LocoProp


def train(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return the weights after three steps of LocoProp-M."""
    opt = LocoProp(model, lr=1e-2, momentum=0.9, output_transfer="sigmoid")
    for seed in range(3):
        x = batch(8, 6, seed=seed)
        cross_entropy((forward or model)(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


class Net(nn.Module):
    """Two layers with a given function between them."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.activation(self.one(x)))


@pytest.mark.parametrize(
    "activation",
    [F.relu_, lambda a: F.relu(a, inplace=True), lambda a: a.clamp_(min=0), nn.ReLU(inplace=True)],
)
def test_in_place_activations(activation: Callable[[Tensor], Tensor]) -> None:
    assert_close(train(Net(activation)), train(Net(F.relu)))


@pytest.mark.parametrize("shape", [(8, 6), (2, 4, 6), (2, 2, 2, 6)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_number_of_dimensions(
    shape: tuple[int, ...], in_place: bool, bias: bool
) -> None:
    """The rows are the same for all shapes, so the weights are equal."""
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias)).double()
    torch.manual_seed(0)
    deep = nn.Sequential(
        nn.Linear(6, 5, bias=bias), nn.ReLU(inplace=in_place), nn.Linear(5, 3, bias=bias)
    ).double()
    expected = train(flat)
    opt = LocoProp(deep, lr=1e-2, momentum=0.9, output_transfer="sigmoid")
    for seed in range(3):
        x = batch(8, 6, seed=seed)
        out = deep(x.reshape(shape))
        assert out.shape == (*shape[:-1], 3)
        cross_entropy(out.reshape(8, 3), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    assert_close(weights(deep), expected)
    assert "relu" in opt.summary()


@pytest.mark.parametrize("bias", [True, False])
def test_a_single_vector(bias: bool) -> None:
    results = []
    for x in (batch(6), batch(6)[None]):
        torch.manual_seed(0)
        model = nn.Linear(6, 3, bias=bias).double()
        opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
        F.binary_cross_entropy_with_logits(model(x), x[..., :3], reduction="sum").backward()
        opt.step()
        results.append(weights(model))
    assert_close(*results)


def test_a_module_called_several_times() -> None:
    """A layer called on two halves of the rows solves one problem over all of them."""

    def halves(model: Net) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat([model(x[:3]), model(x[3:])])

    one, two = Net(torch.tanh), Net(torch.tanh)
    assert_close(train(two, halves(two)), train(one), 1e-11)


def test_different_transfers_behind_one_module() -> None:
    model = nn.Linear(4, 4).double()
    opt = LocoProp(model, preset="paper-m", lr=1e-2)
    x = batch(5, 4)
    F.mse_loss(model(torch.tanh(model(torch.relu(model(x))))), x).backward()
    opt.step()
    assert "called with different transfers" in opt.summary()
    assert "locoprop-s" in opt.summary()


def test_keyword_arguments() -> None:
    class Keywords(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(input=torch.tanh(self.one(input=x)))

    assert_close(train(Keywords(torch.tanh)), train(Net(torch.tanh)))


def test_nested_modules_and_containers() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = Net(torch.tanh)
            self.parts = nn.ModuleDict({"first": nn.ModuleList([nn.Sequential(net.one)])})
            self.rest = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sequential(net.two)))

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            return {"out": [self.rest(self.parts["first"][0](x))]}

    model = Outer()
    found = train(model, lambda x: model(x)["out"][0])
    assert_close(found, train(Net(torch.tanh)))


def test_a_model_called_by_its_parts() -> None:
    model = Net(torch.tanh)
    found = train(model, lambda x: model.two(torch.tanh(model.one(x))))
    assert_close(found, train(Net(torch.tanh)))


def test_a_functional_use_of_a_weight_takes_a_backprop_step() -> None:
    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.one(x)), self.two.weight, self.two.bias)

    model = Functional(torch.tanh)
    opt = LocoProp(model, lr=1e-2, solver="sgd", gamma=2.0)
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    expected = model.two.weight.detach() - 1e-2 * 2.0 * model.two.weight.grad
    with pytest.warns(
        UserWarning, match=r"'two' has a gradient, but its forward was not called"
    ) as warned:
        opt.step()
    assert warned[0].filename == __file__  # where step() is called
    assert_close([model.two.weight.detach()], [expected])


def test_a_layer_whose_derivative_alone_is_used_is_told_apart() -> None:
    """Force matching: the loss depends on ∂E/∂x, and not on the last layer's output."""
    model = Net(torch.tanh)
    opt = LocoProp(model, variant="locoprop-m", lr=1e-2, solver="sgd", gamma=2.0, momentum=0.0)
    x = batch(8, 6).requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (force - 1).square().mean().backward()
    expected = model.two.weight.detach() - 1e-2 * 2.0 * model.two.weight.grad
    with pytest.warns(UserWarning, match="'two' was called .* no backward pass went through its"):
        opt.step()
    assert_close([model.two.weight.detach()], [expected])
    assert "no backward pass goes through its output: it takes BackProp steps" in opt.summary()
    opt.zero_grad()
    model(x).square().sum().backward()
    opt.step()
    assert "no backward pass" not in opt.summary()


def test_a_penalty_on_the_weights_is_part_of_the_problem() -> None:
    """The problem uses ``p.grad``, not only the gradient that flows through the layer."""
    model = Net(torch.tanh)
    opt = LocoProp(model, lr=1e-2, solver="sgd", local_steps=1, gamma=1.0)
    x = batch(8, 6)
    before = weights(model)
    (cross_entropy(model(x), x[:, :3]) + model.one.weight.square().sum()).backward()
    expected = before[0] - 1e-2 * model.one.weight.grad
    opt.step()
    assert_close([weights(model)[0]], [expected])


class Refused(nn.Module):
    """One module of each kind without a local problem, and one layer with a local problem."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.parametrized = parametrizations.weight_norm(nn.Linear(6, 6))
        self.served = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x)[0])
        x = torch.tanh(self.served(torch.tanh(self.parametrized(x)))) * self.scale
        return self.tied(x)


def test_every_parameter_is_served_or_falls_back_with_a_reason() -> None:
    torch.manual_seed(0)
    model = Refused()
    opt = LocoProp(model, lr=1e-3, fallback=lambda p: torch.optim.AdamW(p, lr=1e-3))
    before = weights(model)
    tokens = torch.arange(8).reshape(2, 4)
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
        opt.zero_grad()
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    summary = opt.summary()
    for reason in (
        "no local problem for this kind of module",
        "nn.MultiheadAttention does not call its projections",
        "tied: a parameter is shared by 'embedding', 'tied'",
        "its weight is computed (parametrized), not a parameter",
    ):
        assert reason in summary, reason
    grouped = [p for group in opt.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))


def test_a_subclass_with_its_own_forward_falls_back() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4, 4), nn.Tanh(), nn.Linear(4, 4))
    opt = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    assert "Doubled has a forward of its own" in opt.summary()


def test_a_patched_forward_falls_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)  # type: ignore[method-assign]
    opt = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    assert "Linear has a forward of its own" in opt.summary()


def test_a_forward_that_was_patched_in_the_class_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the function has the name and the module of PyTorch's own."""
    own = nn.Linear.forward

    @wraps(own)
    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return own(self, 2 * x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(4, 4, 1))
    monkeypatch.setattr(nn.Linear, "forward", doubled)
    summary = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1)).summary()
    assert "Linear has a forward of its own" in summary
    monkeypatch.undo()
    assert "of its own" not in LocoProp(model).summary()
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", lambda self, *args: 2 * args[0])
    summary = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1)).summary()
    assert "Conv1d has a _conv_forward of its own" in summary


class Cubed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x**3, self.weight, self.bias)


def patch(layer: nn.Linear) -> None:
    layer.forward = lambda x: F.linear(x**3, layer.weight, layer.bias)  # type: ignore[method-assign]


def change_class(layer: nn.Linear) -> None:
    layer.__class__ = Cubed


@pytest.mark.parametrize("replace", [patch, change_class])
@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_forward_that_is_replaced_later_takes_backprop_steps(
    replace: Callable[[nn.Linear], None], backend: str | None, steps_before: int
) -> None:
    torch.compiler.reset()
    model = network()
    opt = LocoProp(
        model, variant="locoprop-m", solver="sgd", lr=1e-2, gamma=2.0, momentum=0.0, local_steps=7
    )
    call = model if backend is None else torch.compile(model, backend=backend)
    for _ in range(steps_before):
        call(batch(8, 6)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    replace(model[2])
    before = weights(model)
    call(batch(8, 6)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    opt.step()
    plain = [w - 2e-2 * g for w, g in zip(before, gradients, strict=True)]
    after = weights(model)
    assert_close(after[2:4], plain[2:4])
    assert all(not torch.allclose(after[i], plain[i]) for i in (0, 1, 4, 5))
    rows = opt.summary().splitlines()
    assert "its forward was replaced after the optimizer was made" in rows[3]
    assert rows[2].split()[3:5] == ["tanh", "locoprop-m"]


class ByKeyword(nn.Linear):
    def forward(self, *, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return scale * super().forward(hidden)


class OfPairs(nn.Linear):
    def forward(self, pair: dict[str, list[Tensor]]) -> Tensor:
        return super().forward(pair["both"][0] + pair["both"][1])


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ByKeyword, lambda layer, h: layer(hidden=h, scale=2.0)),
        (OfPairs, lambda layer, h: layer({"both": [h, h]})),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_subclass_may_take_arguments_of_its_own(
    kind: type[nn.Linear], call: Callable[[nn.Linear, Tensor], Tensor], backend: str | None
) -> None:
    """The layer before it has its transfer, and is not the model's output."""

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return call(self.odd, torch.tanh(self.one(x)))

    torch.compiler.reset()
    model = Model(torch.tanh)
    model.odd = kind(5, 3).double().requires_grad_(False)
    del model.two
    opt = LocoProp(
        model,
        variant="locoprop-m",
        lr=1e-3,
        output_transfer="sigmoid",
        fallback=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    used = model if backend is None else torch.compile(model, backend=backend)
    used(batch(8, 6)).square().sum().backward()
    opt.step()
    rows = opt.summary().splitlines()
    assert rows[2].split()[3:5] == ["tanh", "locoprop-m"]
    assert not opt._layers[0].is_output


def test_flattened_weights_and_unusual_biases_fall_back() -> None:
    """Shards of FSDP with ``use_orig_params=True`` are vectors, of which some are empty."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].weight = nn.Parameter(torch.zeros(8))
    model[1].weight = nn.Parameter(torch.zeros(0))
    model[2].bias = nn.Parameter(torch.zeros(1, 4))
    opt = LocoProp(model, variant="locoprop-s", fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    assert [layer.name for layer in opt._layers] == ["3"]
    assert opt.summary().count("its weight or bias is flattened, as shards of FSDP are") == 3


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "proxprop"])
def test_a_layer_that_is_not_called_is_told_of_until_it_is(variant: str) -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, variant=variant, output_transfer="sigmoid")

    def row(first: Callable[[Tensor], Tensor]) -> str:
        opt.zero_grad()
        model[1:](first(batch(8, 6))).square().sum().backward()
        opt.step()
        return opt.summary().splitlines()[2]

    by_hand = partial(F.linear, weight=model[0].weight, bias=model[0].bias)
    assert "is not called" not in row(model[0])
    with pytest.warns(UserWarning, match="forward was not called"):
        assert "its forward is not called: it takes BackProp steps" in row(by_hand)
    assert "is not called" not in row(model[0])


def test_once_transfers_are_known_the_graph_is_the_users_own() -> None:
    """In-place activations on views take the same steps as others, bit for bit."""
    results = []
    for act in (F.relu_, F.relu):
        torch.manual_seed(0)
        first, second = nn.Linear(6, 5), nn.Linear(5, 3)
        model = nn.Sequential(first, second).double()
        opt = LocoProp(model, lr=1e-2, local_steps=3, output_transfer="linear")
        for seed in range(4):
            opt.zero_grad()
            x = batch(2, 4, 6, seed=seed)
            a, own = first(x), F.linear(x, first.weight, first.bias)
            assert a._is_view() == (seed > 0 and own._is_view())  # as PyTorch has it
            second(act(a)).square().sum().backward()
            opt.step()
        assert "relu" in opt.summary()
        results.append(weights(model))
    assert_close(*results, 0.0)


def test_an_optimizer_may_be_made_while_a_model_is_searched() -> None:
    """Another thread may do so at any point; here the search itself does."""
    made = []

    class Leaves(set[int]):
        def __ior__(self, other: object) -> Leaves:  # type: ignore[override, misc]
            made.append(LocoProp(nn.Linear(2, 2)))
            return self

    model = Net(torch.tanh)
    opts = [LocoProp(model) for _ in range(2)]
    for opt in opts:
        opt._hooks.search.leaves = Leaves()
    model(batch(8, 6)).sum().backward()
    assert made


@pytest.mark.parametrize("preset", ["general", "paper-m", "paper-s"])
def test_states_are_plain_tensors_for_inputs_of_a_subclass(preset: Any) -> None:
    class Image(Tensor):
        pass

    results = []
    for kind in (Tensor, Image):
        model = Net(torch.tanh)
        opt = LocoProp(model, preset=preset)
        for seed in range(2):
            x = batch(7, 6, seed=seed).as_subclass(kind)
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()
        entries = [entry for state in opt.state.values() for entry in state.values()]
        assert {type(entry) for entry in entries} == {Tensor}
        results.append([*weights(model), *entries])
    assert_close(*results, 0.0)
