"""``gram="block"`` and ``"diagonal"``: steps as with zeros in place of other entries of ``XᵀX``."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.paper.spectral import polar
from torch_locoprop.paper.structured_gram import ReducedGram
from torch_locoprop.solvers import Exact

ROWS, N, D = 60, 7, 4
S = {"variant": "locoprop-s", "lr": 1e-3, "gamma": 3.0, "local_steps": 3, "solver": "sgd"}
STRUCTURES: list[dict[str, Any]] = [
    {"gram": "block", "block_size": 3},
    {"gram": "block", "block_size": 4},
    {"gram": "diagonal"},
]
named = pytest.mark.parametrize(
    "structure", STRUCTURES, ids=lambda s: "-".join(map(str, s.values()))
)


def mask(columns: int, structure: dict[str, Any]) -> Tensor:
    """Return ones where an entry of C is kept: column i is in block i // size."""
    if structure["gram"] == "diagonal":
        return torch.eye(columns).double()
    blocks = -(-columns // structure["block_size"])
    block = torch.arange(columns) // -(-columns // blocks)
    return (block[:, None] == block).double()


def layer_and_rows(bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(N, D, bias=bias).double()
    return layer, torch.randn(ROWS, N).double(), torch.randn(ROWS, D).double()


def steps(opt: LocoProp, layer: nn.Module, x: Tensor, y: Tensor, count: int = 1) -> Tensor:
    """Take some steps and return ``[W b]``."""
    for i in range(count):
        ((layer(x + i) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
    return joint(layer)


def joint(layer: Any) -> Tensor:
    columns = [layer.weight.detach().flatten(1)]
    if layer.bias is not None:
        columns.append(layer.bias.detach().unsqueeze(-1))
    return torch.cat(columns, -1)


def gradient_and_gram(
    layer: nn.Linear, x: Tensor, y: Tensor, structure: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return G of ``[W b]``, and C with zeros where an entry is left out."""
    ones = [torch.ones(len(x), 1).double()] if layer.bias is not None else []
    wide = torch.cat([x, *ones], -1)
    gradient = 2 / y.numel() * (wide @ joint(layer).T - y).T @ wide
    return gradient, wide.T @ wide * mask(wide.shape[-1], structure)


# ---- against dense matrices with zeros ------------------------------------------------------------


@named
@pytest.mark.parametrize("bias", [True, False])
def test_iterations_of_locoprop_s(structure: dict[str, Any], bias: bool) -> None:
    layer, x, y = layer_and_rows(bias)
    gradient, c = gradient_and_gram(layer, x, y, structure)
    start = at = joint(layer)
    for t in range(3):
        at = at - 1e-3 * max(1 - t / 3, 0.25) * (3.0 * gradient + (at - start) @ c)
    found = steps(LocoProp(layer, **S, **structure), layer, x, y)
    torch.testing.assert_close(found, at, rtol=0, atol=1e-13)


@named
@pytest.mark.parametrize("bias", [True, False])
def test_the_closed_form(structure: dict[str, Any], bias: bool) -> None:
    layer, x, y = layer_and_rows(bias)
    gradient, c = gradient_and_gram(layer, x, y, structure)
    expected = joint(layer) - 1e-3 * 3.0 * gradient @ torch.linalg.inv(
        torch.eye(len(c)).double() + 1e-3 * c
    )
    found = steps(LocoProp(layer, **{**S, "solver": "exact"}, **structure), layer, x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@named
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("damping", [0.1, None])
def test_the_running_closed_form(structure: dict[str, Any], every: int, damping: float) -> None:
    layer, x, y = layer_and_rows()
    opt = LocoProp(layer, **{**S, "solver": Exact(0.9, every, damping)}, **structure)
    model, running, inverse = copy.deepcopy(layer), None, torch.empty(0)
    for i in range(3):
        gradient, c = gradient_and_gram(model, x + i, y, structure)
        running = c if running is None else 0.9 * running + 0.1 * c
        eye = torch.eye(len(c)).double()
        if i % every == 0 and damping is not None:
            inverse = torch.linalg.inv(running + 0.1 * running.diagonal().mean() * eye)
        elif i % every == 0:
            inverse = torch.linalg.inv(eye + 1e-3 * running)
        new = joint(model) - 1e-3 * 3.0 * gradient @ inverse
        with torch.no_grad():
            model.weight.copy_(new[:, :-1])
            model.bias.copy_(new[:, -1])
    torch.testing.assert_close(steps(opt, layer, x, y, 3), joint(model), rtol=0, atol=1e-12)


@named
def test_the_spectral_step(structure: dict[str, Any]) -> None:
    layer, x, y = layer_and_rows()
    opt = LocoProp(layer, preset="spectral", local_products="full", **structure)
    model = copy.deepcopy(layer)
    average, squares, running = torch.zeros(D, N + 1).double(), torch.zeros(D, 1).double(), None
    of_biases = torch.zeros(D).double()
    for i in range(2):
        gradient, c = gradient_and_gram(model, x + i, y, structure)
        c = c / c.diagonal().mean()
        running = c if running is None else 0.8 * running + 0.2 * c
        average = 0.9 * average + 0.1 * gradient
        damped = running + max(1 / (1 + i / 50), 0.02) * torch.eye(N + 1).double()
        p = polar((0.9 * average + 0.1 * gradient) @ torch.linalg.inv(damped))
        squares = 0.95 * squares + 0.05 * p.square().mean(-1, keepdim=True)
        rows = p / squares.sqrt()
        new = joint(model) - 0.015 * 0.2 * (N + 1) ** 0.5 * rows * p.norm() / rows.norm()
        with torch.no_grad():
            model.weight.copy_(new[:, :-1])
            squares_of_biases = gradient[:, -1].square() + 1e-10 * gradient.square().mean(1)
            of_biases = 0.95 * of_biases + 0.05 * squares_of_biases
            model.bias.copy_(new[:, -1] - 0.015 * average[:, -1] / of_biases.sqrt())
    torch.testing.assert_close(steps(opt, layer, x, y, 2), joint(model), rtol=0, atol=1e-12)


# ---- ways to the same numbers ---------------------------------------------------------------------


SETTINGS: list[dict[str, Any]] = [
    S,
    {**S, "solver": "exact"},
    {**S, "solver": Exact(0.9, 2, 0.1)},
    {"preset": "general"},
]


@named
@pytest.mark.parametrize("settings", SETTINGS, ids=["S", "exact", "running", "general"])
def test_a_resumed_run_goes_on_to_the_bit(
    structure: dict[str, Any], settings: dict[str, Any]
) -> None:
    layer, x, y = layer_and_rows()
    opt = LocoProp(layer, **settings, **structure)
    steps(opt, layer, x, y, 3)
    file = io.BytesIO()
    torch.save((layer.state_dict(), opt.state_dict()), file)
    expected = steps(opt, layer, x, y, 3)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again, *_ = layer_and_rows()
    again.load_state_dict(weights)
    other = LocoProp(again, **settings, **structure)
    other.load_state_dict(state)
    assert torch.equal(steps(other, again, x, y, 3), expected)


@named
@pytest.mark.parametrize("settings", SETTINGS, ids=["S", "exact", "running", "general"])
def test_micro_batches_are_one_batch(structure: dict[str, Any], settings: dict[str, Any]) -> None:
    layer, x, y = layer_and_rows()
    other = copy.deepcopy(layer)
    one = LocoProp(layer, **settings, **structure)
    several = LocoProp(other, **settings, **structure)
    for part in (slice(0, 3), slice(3, ROWS)):  # of the first XᵀX is larger than the rows
        (((other(x[part]) - y[part]) ** 2).sum() / y.numel()).backward()
    several.step()
    torch.testing.assert_close(joint(other), steps(one, layer, x, y), rtol=0, atol=1e-12)


def test_rows_that_stand_for_others() -> None:
    layer, x, y = layer_and_rows()
    x, y = x[:1].expand(40, N), y[:1].expand(40, D)
    other, structure = copy.deepcopy(layer), STRUCTURES[0]
    all_rows = LocoProp(layer, **S, **structure)
    some = LocoProp(other, **S, **structure, max_rows=3)
    expected = steps(all_rows, layer, x, y)
    torch.testing.assert_close(steps(some, other, x, y), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", SETTINGS, ids=["S", "exact", "running", "general"])
def test_a_layer_within_one_block_is_served_in_full(settings: dict[str, Any]) -> None:
    layer, x, y = layer_and_rows()
    other = copy.deepcopy(layer)
    in_full = LocoProp(layer, **settings)
    in_blocks = LocoProp(other, **settings, gram="block", block_size=N + 1)
    assert torch.equal(steps(in_full, layer, x, y, 2), steps(in_blocks, other, x, y, 2))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids=["S", "exact", "running", "general"])
def test_convolutions(settings: dict[str, Any], groups: int) -> None:
    """A convolution of width 1 is a linear layer of its channels, for each group."""
    torch.manual_seed(0)
    settings = {**settings, "gram": "block", "block_size": 2}
    conv = nn.Conv1d(4 * groups, 2 * groups, 1, groups=groups).double()
    x, y = torch.randn(30, 4 * groups, 2).double(), torch.randn(30, 2 * groups, 2).double()
    start = joint(conv).split(2)
    opt = LocoProp(conv, **settings)
    ((conv(x) - y) ** 2).mean().backward()
    opt.step()
    of_groups = zip(x.split(4, 1), y.split(2, 1), start, joint(conv).split(2), strict=True)
    for own_x, own_y, before, after in of_groups:
        layer = nn.Linear(4, 2).double()
        with torch.no_grad():
            layer.weight.copy_(before[:, :-1])
            layer.bias.copy_(before[:, -1])
        other = LocoProp(layer, **settings)
        error = layer(own_x.mT.reshape(-1, 4)) - own_y.mT.reshape(-1, 2)
        (error.square().sum() / y.numel()).backward()
        other.step()
        torch.testing.assert_close(after, joint(layer), rtol=0, atol=1e-12)


@named
def test_a_frozen_bias_is_no_column(structure: dict[str, Any]) -> None:
    layer, x, y = layer_and_rows()
    layer.bias.requires_grad_(False)
    bare, *_ = layer_and_rows(bias=False)
    bare.weight.data.copy_(layer.weight)
    opt = LocoProp(layer, **{**S, "solver": "exact"}, **structure)
    other = LocoProp(bare, **{**S, "solver": "exact"}, **structure)
    steps(opt, layer, x, y)
    steps(other, bare, x, y - layer.bias.detach())
    torch.testing.assert_close(layer.weight, bare.weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", SETTINGS, ids=["S", "exact", "running", "general"])
def test_the_structure_may_change_between_steps(settings: dict[str, Any]) -> None:
    layer, x, y = layer_and_rows()
    opt = LocoProp(layer, **settings, block_size=3)
    for gram in ("full", "block", "diagonal", "full"):
        opt.param_groups[0]["gram"] = gram
        before = joint(layer)
        assert steps(opt, layer, x, y, 2).isfinite().all()
        assert not torch.equal(before, joint(layer))
        kept = [
            entry for state in opt.state.values() for key, entry in state.items() if key == "gram"
        ]
        shapes = {"full": (8, 8), "block": (3, 3, 3), "diagonal": (8,)}
        assert all(entry.shape == shapes[gram] for entry in kept)


def test_only_what_is_kept_is_recorded() -> None:
    """The hooks keep blocks in place of many rows."""
    layer, x, y = layer_and_rows()
    opt = LocoProp(layer, **S, gram="diagonal")
    ((layer(x) - y) ** 2).mean().backward()
    (call,) = opt._layers[0].calls
    assert isinstance(call.gram, ReducedGram)
    assert call.gram.square.shape == (N + 1,)
    assert call.x.numel() == 0


def test_wide_layers_of_the_spectral_step_have_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_locoprop.solvers.spectral.WIDEST", 4)
    for structure, shape in (({}, None), (STRUCTURES[0], (3, 3, 3)), (STRUCTURES[2], (N + 1,))):
        layer, x, y = layer_and_rows()
        opt = LocoProp(layer, **structure)
        steps(opt, layer, x, y)
        inverse = opt.state[layer.weight].get("inverse")
        assert (None if inverse is None else tuple(inverse.shape)) == shape


# ---- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"variant": "locoprop-m"},
        {"variant": "locoprop-m", "solver": "exact"},
        {"variant": "pocoprop-s"},
        {"variant": "locoprop-s", "solver": "preconditioned"},
        {"variant": "locoprop-s", "solver": "preconditioned-averaged"},
        {"variant": "locoprop-s", "regularizer": "fisher", "output_transfer": "softmax"},
    ],
)
def test_steps_that_need_rows_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="takes no more than XᵀX of the inputs"):
        LocoProp(nn.Linear(3, 2), gram="diagonal", **settings)


def test_values_are_checked() -> None:
    with pytest.raises(ValueError, match="Unknown gram 'dense'"):
        LocoProp(nn.Linear(3, 2), gram="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid block_size=0"):
        LocoProp(nn.Linear(3, 2), gram="block", block_size=0)


# ---- the structure itself -------------------------------------------------------------------------


def test_shapes() -> None:
    block = Structure("block", 4)
    assert (block.shape(4), block.shape(5), block.shape(9)) == ((4, 4), (2, 3, 3), (3, 3, 3))
    assert Structure("diagonal").shape(5) == (5,)
    assert FULL.shape(5) == (5, 5)
    assert not Structure("diagonal").reduces(1)
    for size in range(1, 12):
        for columns in range(size + 1, 40):
            blocks, own, _ = Structure("block", size).shape(columns)
            assert own <= size
            assert 0 <= blocks * own - columns < own
