"""Matrices of attention and recurrent modules take spectral steps where no fallback is given."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import threads
import torch
import torch.nn.functional as F
from cases import assert_close, batch, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_locoprop import LocoProp, functional
from torch_locoprop.distributed.divided_matrices import applied
from torch_locoprop.distributed.fully_shard import full
from torch_locoprop.distributed.placements import row_shards
from torch_locoprop.stepping import spectral_adamw
from torch_locoprop.stepping.spectral_adamw import SpectralAdamW


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.view(-1, 2, 3))[0][:, -1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x.view(-1, 2, 6)).mean(1).repeat_interleave(2, 0))


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "GRU": (Recurrent, 2),
    "LSTMCell": (Cell, 2),
    "attention": (Attentive, 2),
}


def made(name: str, **settings: Any) -> tuple[nn.Module, LocoProp]:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no fallback=
        return model, LocoProp(model, **settings)


def step(
    model: nn.Module,
    opt: LocoProp,
    seed: int,
    after_backward: Callable[[], None] = lambda: None,
    factor: float = 1.0,
) -> None:
    x = batch(8, 6, seed=seed)
    (factor * F.mse_loss(model(x), x[:, :3])).backward()
    after_backward()
    opt.step()
    opt.zero_grad()


def matrices(opt: LocoProp) -> list[nn.Parameter]:
    return [p for group in opt.param_groups if group.get("spectral") for p in group["params"]]


@pytest.mark.parametrize("preset", ["general", "spectral"])
@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_take_the_spectral_step_of_their_gradients(name: str, preset: str) -> None:
    """They follow ``functional.spectral`` without C, at the rate of the layers."""
    model, opt = made(name, preset=preset)
    own = matrices(opt)
    assert len(own) == MODELS[name][1]
    assert all(p.dim() == 2 for p in own)
    lr = opt.param_groups[0]["lr"]
    expected = [p.detach().clone() for p in own]
    states: list[Any] = [None] * len(own)

    def follow() -> None:
        for i, p in enumerate(own):
            assert p.grad is not None
            moved, states[i] = functional.spectral(
                p.grad, None, states[i], lr=lr, agreement=float(preset == "general")
            )
            expected[i] += moved

    for seed in range(12):
        step(model, opt, seed, follow)
    assert_close([p.detach() for p in own], expected, 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_other_parameters_get_adamw_at_a_third_of_the_rate(name: str) -> None:
    model, opt = made(name)
    groups = [group for group in opt.param_groups if group["fallback"]]
    for group in groups:
        assert group["lr"] == pytest.approx(0.04 if group["spectral"] else 0.04 / 3)
    others = [p for group in groups if not group["spectral"] for p in group["params"]]
    alone = [p.detach().clone().requires_grad_() for p in others]
    adamw = torch.optim.AdamW(alone, lr=0.04 / 3, eps=1e-15) if alone else None

    def follow() -> None:
        for mine, theirs in zip(alone, others, strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
        if adamw is not None:
            adamw.step()

    for seed in range(4):
        step(model, opt, seed, follow)
    assert_close([p.detach() for p in others], [p.detach() for p in alone], 0.0)


@pytest.mark.parametrize("settings", [{"preset": "paper-m"}, {"variant": "locoprop-s"}])
def test_local_iterations_leave_matrices_to_adamw(settings: dict[str, Any]) -> None:
    _, opt = made("GRU", **settings)
    assert not matrices(opt)
    assert type(opt._fallback) is torch.optim.AdamW


def test_a_fallback_of_the_user_trains_all_it_is_given() -> None:
    model, opt = made("GRU", fallback=lambda params: torch.optim.SGD(params, lr=0.1))
    assert set(opt.param_groups[1]["params"]) == set(model.gru.parameters())


def test_the_warning_and_the_summary_name_it() -> None:
    with pytest.warns(UserWarning, match=r"4 parameters .* 2 of them are matrices"):
        opt = LocoProp(Recurrent())
    assert "SpectralAdamW" in opt.summary()


@pytest.mark.parametrize("name", MODELS)
def test_the_scale_of_the_loss_and_schedules(name: str) -> None:
    """No number of the step has a unit, and a scheduler reaches the matrices.

    Outputs are compared: no output depends on the biases of attention's keys, whose gradients are
    rounding errors.
    """
    (model, opt), (other, scaled) = made(name), made(name)
    for seed in range(6):
        step(model, opt, seed)
        step(other, scaled, seed, factor=1024.0)
    x = batch(8, 6)
    assert_close([model(x).detach()], [other(x).detach()], 1e-8)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = weights(model)
    step(model, opt, 6)
    assert_close(weights(model), before, 0.0)


@pytest.mark.parametrize("way", ["state dict", "pickle", "deepcopy"])
def test_a_run_goes_on_bit_for_bit(way: str) -> None:
    model, opt = made("GRU")
    for seed in range(3):
        step(model, opt, seed)
    if way == "state dict":
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        other, resumed = made("GRU")
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["opt"])
    elif way == "pickle":
        other, resumed = pickle.loads(pickle.dumps((model, opt)))
    else:
        other, resumed = copy.deepcopy((model, opt))
    for seed in range(3, 6):
        step(model, opt, seed)
        step(other, resumed, seed)
    assert_close(weights(model), weights(other), 0.0)


def test_a_state_dict_with_adamw_for_all_is_refused() -> None:
    _, before = made("GRU", fallback=lambda params: torch.optim.AdamW(params))
    _, opt = made("GRU")
    with pytest.raises(ValueError, match="groups of parameters"):
        opt.load_state_dict(before.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_shortens_the_matrices_before_the_step(name: str) -> None:
    model, opt = made(name, weight_decay=0.1)
    own, lr = matrices(opt), opt.param_groups[0]["lr"]
    expected = [p.detach().clone() for p in own]
    states: list[Any] = [None] * len(own)

    def follow() -> None:
        for i, p in enumerate(own):
            moved, states[i] = functional.spectral(p.grad, None, states[i], lr=lr, agreement=1.0)
            expected[i] = (1 - 0.1 * lr) * expected[i] + moved

    for seed in range(3):
        step(model, opt, seed, follow)
    assert_close([p.detach() for p in own], expected, 1e-12)


def test_a_step_inside_autocast_has_all_digits_of_the_weights() -> None:
    model, opt = made("GRU")
    model.float()
    F.mse_loss(model(batch(8, 6).float()), batch(8, 3).float()).backward()
    own, lr = matrices(opt), opt.param_groups[0]["lr"]
    expected = [
        p.detach() + functional.spectral(p.grad, None, None, lr=lr, agreement=1.0)[0] for p in own
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt.step()
    assert_close([p.detach() for p in own], expected, 1e-6)


def test_a_group_of_one_matrix() -> None:
    _, opt = made("GRU")
    (numbers,) = [group for group in opt.param_groups if group.get("spectral")]
    p = nn.Parameter(batch(4, 3))
    p.grad = batch(4, 3, seed=2)
    moved, _ = functional.spectral(p.grad, None, None, lr=numbers["lr"], agreement=1.0)
    expected = p.detach() + moved
    SpectralAdamW([{**numbers, "params": [p]}], lr=0.1, eps=1e-15).step()
    assert_close([p.detach()], [expected], 1e-12)


# ---- several processes ------------------------------------------------------------------------------


class Cells(nn.Module):
    """Four matrices: of 16 and of 12 rows, each with 6 or fewer columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(6, 4), nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)[0]))


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.* have no local problem")
@pytest.mark.parametrize(
    ("world", "of_round", "rounds"), [(3, 1, [1, 3]), (2, 2, [4]), (3, 4, [4])]
)
def test_processes_divide_the_matrices_in_rounds(
    world: int, of_round: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of one process, in rounds of some matrices for each process."""
    found: list[int] = []

    def noted(factor: Any, rows: list[Tensor], *given: Any) -> list[Tensor]:
        found.append(len(rows))
        return applied(factor, rows, *given)

    monkeypatch.setattr(spectral_adamw, "MATRICES", of_round)
    monkeypatch.setattr(spectral_adamw, "applied", noted)
    steps, rows = 3, 12

    def train(model: nn.Module, opt: LocoProp, part: slice, processes: int) -> None:
        for seed in range(steps):
            x = batch(rows, 6, seed=seed)[part]
            (processes * F.mse_loss(model(x), x[:, :3], reduction="sum") / rows).backward()
            opt.step()
            opt.zero_grad()

    def cells() -> nn.Module:
        torch.manual_seed(0)
        return Cells().double()

    one, models = cells(), [cells() for _ in range(world)]
    whole = LocoProp(one, weight_decay=0.1)
    train(one, whole, slice(None), 1)
    assert len(matrices(whole)) == 4

    def trained(rank: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        model: Any = models[rank]
        fully_shard(model)
        opt, share = LocoProp(model, weight_decay=0.1), rows // world
        train(model, opt, slice(share * rank, share * (rank + 1)), world)
        own = matrices(opt)
        states = [{key: full(entry) for key, entry in opt.state[p].items()} for p in own]
        return [full(p) for p in own], states

    for tensors, states in threads.run(trained, world):
        assert_close(tensors, [p.detach() for p in matrices(whole)], 1e-10)
        for state, p in zip(states, matrices(whole), strict=True):
            assert state.keys() == whole.state[p].keys()
            assert_close(list(state.values()), [whole.state[p][key] for key in state], 1e-10)
    assert sorted(found) == sorted(world * steps * rounds)


@pytest.mark.distributed
def test_gradients_that_are_still_sums_over_the_processes_are_added_up() -> None:
    whole, parts = batch(4, 3), [batch(4, 3, seed=2), batch(4, 3, seed=3)]
    _, opt = made("GRU")
    (group,) = [group for group in opt.param_groups if group.get("spectral")]

    def taken(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        own = slice(2 * rank, 2 * rank + 2)
        matrix = nn.Parameter(DTensor.from_local(whole[own], mesh, [Shard(0)]))
        matrix.grad = DTensor.from_local(parts[rank], mesh, [Partial()])
        shards = row_shards(matrix)
        assert shards is not None
        return spectral_adamw._problem(matrix, shards, group).backprop["weight"]

    assert_close(threads.run(taken, 2), list(sum(parts).split(2)), 0.0)  # type: ignore[union-attr]
