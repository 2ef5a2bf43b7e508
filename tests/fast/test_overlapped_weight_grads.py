"""Overlapped weight gradients equal those of autograd, here on one stream."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import cuda_streams, overlapped_weight_grads
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.study import methods
from torch_locoprop.study.models.autoencoder import deep_autoencoder, reconstruction_loss
from torch_locoprop.training_step import TrainingStep


class Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(x).tanh()).tanh())


def mlp(transfer: Callable[[], nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8, bias=bias), transfer(), nn.Linear(8, 5), transfer(), nn.Linear(5, 3)
    )


def frozen() -> nn.Sequential:
    model = mlp()
    model[2].weight.requires_grad_(False)
    return model


def trained(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, on: bool, **settings: Any
) -> tuple[nn.Module, list[str]]:
    """Return the model after four steps, and the layers with overlapped weight gradients."""
    taken = []
    output = overlapped_weight_grads.output

    def noted(layer: LayerRecord, *args: Any) -> Tensor:
        taken.append(layer.name)
        return output(layer, *args)

    monkeypatch.setattr(overlapped_weight_grads, "output", noted)
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: on)
    torch.manual_seed(0)
    own = model().double()
    backward_passes = settings.pop("backward_passes", 1)
    opt = LocoProp(own, **{"lr": 1e-3, "gamma": 5.0, "weight_decay": 0.3, **settings})
    for _ in range(4):
        x, y = torch.randn(12, 6).double(), torch.randn(12, 3).double()
        with cuda_streams.overlapping_backward():
            loss = nn.functional.mse_loss(own(x), y, reduction="sum")
            for left in reversed(range(backward_passes)):
                loss.backward(retain_graph=left > 0)
            opt.step()
        opt.zero_grad()
    monkeypatch.setattr(overlapped_weight_grads, "output", output)
    return own, taken


@pytest.mark.parametrize(
    ("model", "settings", "layers"),
    [
        pytest.param(mlp, {}, ["0", "2", "4"], id="LocoProp-M"),
        pytest.param(mlp, {"local_steps": 1}, ["0", "2", "4"], id="BackProp"),
        pytest.param(mlp, {"variant": "locoprop-s"}, ["0", "2", "4"], id="LocoProp-S"),
        pytest.param(mlp, {"variant": "pocoprop-m"}, [], id="PocoProp-M"),
        pytest.param(mlp, {"gate": True, "cap": 0.01}, ["0", "2", "4"], id="gate and cap"),
        pytest.param(mlp, {"max_rows": 5}, ["0", "2", "4"], id="some rows"),
        pytest.param(mlp, {"local_reduction": "mean"}, ["0", "2", "4"], id="mean"),
        pytest.param(mlp, {"backward_passes": 2}, ["0", "2", "4"], id="two passes"),
        pytest.param(lambda: mlp(nn.ReLU), {}, ["0", "2", "4"], id="ReLU"),
        pytest.param(
            lambda: mlp(lambda: nn.ReLU(inplace=True)), {}, ["0", "2", "4"], id="in place"
        ),
        pytest.param(lambda: mlp(bias=False), {}, ["2", "4"], id="no bias"),
        pytest.param(frozen, {}, ["0", "4"], id="frozen"),
        pytest.param(Twice, {}, ["again", "again", "last"], id="called twice"),
    ],
)
def test_the_same_training(
    model: Callable[[], nn.Module],
    settings: dict[str, Any],
    layers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, none = trained(model, monkeypatch, on=False, **settings)
    other, taken = trained(model, monkeypatch, on=True, **settings)
    assert (none, taken) == ([], 4 * layers)
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(same, one, rtol=1e-12, atol=1e-14)


def test_the_output_is_taken_for_the_preactivations_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This saves one matrix product in each step."""
    forward, calls = Dense.forward, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Dense, "forward", counted)
    counts = []
    for on in (False, True):
        calls.clear()
        trained(mlp, monkeypatch, on, local_steps=3)
        counts.append(len(calls))
    hidden, steps = 2, 4
    assert counts[0] - counts[1] == hidden * steps


def test_an_output_that_was_written_over_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    outputs = LayerRecord.outputs

    def noted(self: LayerRecord) -> Tensor | None:
        found.append((self.name, outputs(self) is None))
        return outputs(self)

    monkeypatch.setattr(LayerRecord, "outputs", noted)
    trained(lambda: mlp(lambda: nn.ReLU(inplace=True)), monkeypatch, on=True)
    assert ("0", True) in found
    assert ("0", False) not in found


def test_autograd_takes_the_gradients_over_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would run on another stream than the one that computes the gradients."""
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    multiplied, places = torch.mv, []

    def noted(*args: Tensor) -> Tensor:
        found = multiplied(*args)
        places.append(found.data_ptr())
        return found

    monkeypatch.setattr(torch, "mv", noted)
    model = mlp()
    opt = LocoProp(model, lr=1e-3)
    with cuda_streams.overlapping_backward():
        model(torch.randn(12, 6)).sum().backward()
        biases = [layer.bias.grad for layer in model if isinstance(layer, nn.Linear)]
        assert places == [bias.data_ptr() for bias in reversed(biases)]
        assert all(layer.weight.grad.is_contiguous() for layer in model[::2])
        opt.step()


@pytest.mark.parametrize(
    ("make", "opened"), [(mlp, ["4", "2"]), (Twice, ["last"])], ids=["each once", "one twice"]
)
def test_beside_only_where_there_is_no_sum_to_wait_for(
    make: Callable[[], nn.Module], opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer is not overlapped either: no layer below would wait."""
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    model, found = make(), []
    opt = LocoProp(model, lr=1e-3)
    names = {m.weight.shape: name for name, m in model.named_modules() if hasattr(m, "weight")}

    def noted(g: Tensor, x: Tensor) -> None:
        found.append(names[torch.Size((g.shape[1], x.shape[1]))])

    monkeypatch.setattr(cuda_streams, "enter_gradient_stream", noted)
    with cuda_streams.overlapping_backward():
        loss = model(torch.randn(12, 6)).sum()
        loss.backward(retain_graph=True)
        assert found == opened
        loss.backward()  # adds to what is there
        assert found == opened
        opt.step()
    opt.zero_grad()
    with cuda_streams.overlapping_backward():
        model(torch.randn(12, 6)).sum().backward()
    assert found == 2 * opened


def test_only_in_steps_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    model, x = mlp(), torch.randn(12, 6)
    opt = LocoProp(model, lr=1e-3)
    others = model(x)
    with cuda_streams.overlapping_backward():
        own = model(x)
    assert [out.grad_fn.name() for out in (others, own)] == ["AddmmBackward0", "_OutputBackward"]
    del opt


def test_two_optimizers_of_one_model_both_see_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    model = mlp()
    both = [LocoProp(model, lr=1e-3), LocoProp(model, lr=1e-3)]
    with cuda_streams.overlapping_backward():
        model(torch.randn(12, 6)).sum().backward()
        for opt in both:
            assert [len(layer.calls) for layer in opt._layers] == [1, 1, 1]


def test_outputs_are_kept_no_longer_than_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No outputs of linear layers, of layers called several times, or of steps without iterations."""
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)

    def kept(model: nn.Module, **settings: Any) -> list[bool]:
        opt, found = LocoProp(model, preset="paper-m", lr=1e-3, **settings), []
        for _ in range(2):
            with cuda_streams.overlapping_backward():
                model(torch.randn(12, 6)).sum().backward()
                found += [any(call.a is not None for call in each.calls) for each in opt._layers]
                opt.step()
            opt.zero_grad()
        return found

    assert kept(mlp()) == [True, True, True, True, True, False]
    assert kept(Twice()) == [False, True, False, False]
    assert not any(kept(mlp(), local_steps=1))
    assert not any(kept(mlp(), variant="locoprop-s"))
    assert kept(mlp(), every=2) == [True, True, True, False, False, False]


def small() -> nn.Sequential:
    """Return a model with a linear layer in the middle; four rows are smaller than XᵀX."""
    widths = (nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 70), nn.Linear(70, 60), nn.GELU())
    return nn.Sequential(*widths, nn.Linear(60, 3))


@pytest.mark.parametrize("solver", ["rmsprop", "sgd"])
@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
@pytest.mark.parametrize(("make", "rows"), [(mlp, 50), (small, 4)])
def test_a_resumed_training_has_the_same_bits(
    make: Callable[[], nn.Module],
    rows: int,
    variant: str,
    solver: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even though in its first step no layer's transfer is known."""
    monkeypatch.setattr(overlapped_weight_grads, "_is_worthwhile", lambda x: True)
    torch.manual_seed(0)
    batches = torch.rand(4, rows, 6)

    def steps(model: nn.Module, opt: LocoProp, batches: Tensor) -> None:
        for x in batches:
            with cuda_streams.overlapping_backward():
                nn.functional.mse_loss(model(x), x[:, :3], reduction="sum").backward()
                opt.step()
            opt.zero_grad()

    def begun() -> tuple[nn.Module, LocoProp]:
        torch.manual_seed(1)
        model = make()
        settings = {"variant": variant, "solver": solver, "weight_decay": 0.3}
        return model, LocoProp(model, lr=1e-4, gamma=5.0, **settings)

    whole, opt = begun()
    steps(whole, opt, batches)
    assert not any(opt.skipped_updates.values())
    first, opt = begun()
    steps(first, opt, batches[:2])
    rest, resumed = begun()
    rest.load_state_dict(first.state_dict())
    resumed.load_state_dict(opt.state_dict())
    steps(rest, resumed, batches[2:])
    for one, same in zip(whole.parameters(), rest.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
@pytest.mark.parametrize("method", ["locoprop-m", "locoprop-s", "pocoprop-m", "pocoprop-s"])
def test_a_captured_step_has_the_bits_of_one_on_one_stream(method: str) -> None:
    data = torch.rand(1000, 784, device="cuda")
    found = []
    for captures in (True, False):
        torch.manual_seed(0)
        model = deep_autoencoder((784, 1000, 500, 250, 30)).cuda()
        chosen = methods.get(method)
        opt = chosen.build(model, {**chosen.settings, "weight_decay": 1e-5})
        step = TrainingStep(model, reconstruction_loss, opt)
        for group in opt.param_groups:
            group["lr"] = 1e-6 if captures else torch.tensor(1e-6, device="cuda")
        for _ in range(20):
            step(data, data) if captures else step._take([data, data])
        found.append([p.detach().clone() for p in model.parameters()])
    rows_ask_for_gradients = "pocoprop" in method  # then libraries do more of the work
    for one, same in zip(*found, strict=True):
        if rows_ask_for_gradients:
            torch.testing.assert_close(same, one, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(one, same)
