"""InputGram: equal to the rows of explicit passes, counted once, and gone without a trace."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from functional_cases import random, structured
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from torch_locoprop.functional import InputGram, as_matrix, from_matrix


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


def square(x: Tensor) -> Tensor:
    x = x.flatten(0, -2).detach()
    return x.T @ x


def expected(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"0": square(with_ones(x)), "2": square(torch.tanh(model[0](x)))}


def assert_close(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_adds_up_micro_batches_and_begins_anew() -> None:
    model = network()
    recorder = InputGram(model)
    for seed in (0, 1):
        x = random(2, 6, 5, seed=seed)  # sequences, in two micro-batches
        for part in x:
            model(part).sum().backward()
        assert_close(recorder.take(), expected(model, x))


def test_mean_over_rows() -> None:
    model = network()
    recorder = InputGram(model, reduction="mean")
    x = random(8, 5)
    model(x[:3]).sum().backward()
    model(x[3:]).sum().backward()
    right = {name: gram / 8 for name, gram in expected(model, x).items()}
    assert_close(recorder.take(), right)


def test_structures() -> None:
    model = nn.Linear(5, 3).double()
    x = random(7, 5)
    dense = square(with_ones(x))
    for structure, size in (("diagonal", None), ("block", 2)):
        recorder = InputGram(model, structure=structure, block_size=size)
        model(x).sum().backward()
        (found,) = recorder.take().values()
        torch.testing.assert_close(found, structured(dense, structure)[0])
        recorder.remove()
    wide = InputGram(model, structure="block", block_size=100)
    model(x).sum().backward()
    torch.testing.assert_close(wide.take()[""], dense.unsqueeze(0))
    without = InputGram(model, ones=False)
    model(x).sum().backward()
    torch.testing.assert_close(without.take()[""], square(x))


def test_every_k_steps() -> None:
    model = network()
    recorder = InputGram(model, every=3)
    x = random(6, 5)
    right = expected(model, x)
    for step in range(7):
        assert recorder.is_due == (step % 3 == 0)
        model(x).sum().backward()
        assert_close(recorder.take(), right if step % 3 == 0 else {})
    assert recorder.steps == 7
    recorder.every = 1
    model(x).sum().backward()
    assert_close(recorder.take(), right)


def test_passes_without_gradients_do_not_count() -> None:
    model = network()
    recorder = InputGram(model)
    x = random(6, 5)
    right = expected(model, x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    recorder.enabled = False
    model(x)
    recorder.enabled = True
    model.eval()
    model(x).sum().backward()  # with a gradient, it counts in eval mode
    assert_close(recorder.take(), right)


def test_a_frozen_model_does_not_count() -> None:
    model = network()
    recorder = InputGram(model)
    model.requires_grad_(False)
    model(random(6, 5))
    with pytest.raises(RuntimeError, match="No inputs were recorded in this step"):
        recorder.take()


def test_layers_that_were_not_called_are_left_out() -> None:
    model = network()
    recorder = InputGram(model)
    model[0](random(6, 5)).sum().backward()
    assert set(recorder.take()) == {"0"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant: bool) -> None:
    model = network()
    recorder = InputGram(model)
    x = random(6, 5).requires_grad_()
    right = expected(model, x)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert_close(recorder.take(), right)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str) -> None:
    model = network()
    recorder = InputGram(model, every=2)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = random(6, 5).requires_grad_()
    right = expected(model, x)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    recorder.take()
    for step in range(1, 4):
        with torch.no_grad():
            compiled(x)
        found = torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()])
        torch.testing.assert_close(found, plain)
        assert_close(recorder.take(), right if step == 2 else {})
    recorder.every = 1
    for reentrant in (True, False):
        checkpoint(compiled, x, use_reentrant=reentrant).sum().backward()
        assert_close(recorder.take(), right)
    inside = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend=backend
    )
    inside(x).sum().backward()
    assert_close(recorder.take(), right)
    recorder.remove()
    compiled(x).sum().backward()  # the compiled graph runs on, without the recorder


@pytest.mark.usefixtures("fresh_compiler")
def test_a_recorder_made_after_the_first_compiled_call_says_so() -> None:
    model = network()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(random(6, 5)).sum().backward()
    recorder = InputGram(model)
    compiled(random(6, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="after the first call of a compiled model"):
        recorder.take()


CONVOLUTIONS: dict[str, Any] = {
    "plain": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv1d(4, 6, 2, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, bias=False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    """The Gram matrix is the Hessian of half the squared output, by autograd."""
    layer = CONVOLUTIONS[name]().double()
    recorder = InputGram({"conv": layer})
    channels = layer.in_channels
    x = random(2, channels, *[6] * (layer.weight.dim() - 2))
    layer(x).sum().backward()
    gram = recorder.take()["conv"]
    recorder.remove()
    tensors = [layer.weight.detach()] + ([] if layer.bias is None else [layer.bias.detach()])
    matrix = as_matrix(layer, *tensors)

    def energy(matrix: Tensor) -> Tensor:
        weight, bias = from_matrix(layer, matrix)
        given = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return torch.func.functional_call(layer, given, x).square().sum() / 2

    hessian = torch.autograd.functional.hessian(energy, matrix)
    d, n = matrix.shape[-2:]
    groups = matrix.shape[:-2].numel()
    blocks, gram = hessian.reshape(groups, d, n, groups, d, n), gram.reshape(groups, n, n)
    for group in range(groups):
        for row in range(d):
            torch.testing.assert_close(blocks[group, row, :, group, row, :], gram[group])


def test_autocast_and_half_precision_are_summed_in_float32() -> None:
    model = nn.Linear(5, 3)
    recorder = InputGram(model)
    x = random(300, 5).float()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    found = recorder.take()[""]
    torch.testing.assert_close(found, square(with_ones(x)))
    half = InputGram(model.bfloat16(), dtype=torch.float64)
    model(x.bfloat16()).sum().backward()
    torch.testing.assert_close(half.take()[""], square(with_ones(x.bfloat16().double())))
    assert recorder.take()[""].dtype == torch.float32


def test_keeps_no_inputs() -> None:
    model = network()
    recorder = InputGram(model)
    hidden: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out)))
    loss = checkpoint(model, random(6, 5), use_reentrant=False).sum()
    gc.collect()
    assert (
        hidden[0]() is None
    )  # the input of the last layer, which the backward pass computes again
    loss.backward()
    recorder.take()


def test_a_copy_of_the_model_has_no_hooks_and_does_not_count() -> None:
    model = network()
    recorder = InputGram(model)
    twin = copy.deepcopy(model)
    assert not any(module._forward_hooks for module in twin.modules())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    x = random(6, 5)
    for other in (twin, loaded):
        other(x).sum().backward()
    model(x).sum().backward()
    assert_close(recorder.take(), expected(model, x))


def test_a_deleted_recorder_leaves_nothing_behind() -> None:
    model = network()
    recorder = InputGram(model)
    gone = weakref.ref(recorder)
    del recorder
    assert gone() is None
    assert not any(module._forward_hooks for module in model.modules())


def test_a_removed_recorder_records_nothing() -> None:
    model = network()
    recorder = InputGram(model)
    recorder.remove()
    model(random(6, 5)).sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="the recorder was removed"):
        recorder.take()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def test_which_layers_are_recorded() -> None:
    model = nn.Sequential(nn.Linear(5, 4), Doubled(4, 4), spectral_norm(nn.Linear(4, 2)), nn.ReLU())
    recorder = InputGram(model)
    assert set(recorder.layers) == {"0", "2"}
    assert recorder.skipped == {"1": "Doubled has a forward of its own"}
    assert repr(recorder) == "InputGram(0, 2; dense, sum, every=1)"
    with pytest.raises(ValueError, match=r"layer 'own' cannot be recorded: Doubled has a forward"):
        InputGram({"own": model[1]})
    with pytest.raises(ValueError, match="ReLU has no local problem"):
        InputGram({"relu": model[3]})
    with pytest.raises(ValueError, match="There is no layer to record"):
        InputGram(nn.Sequential(nn.ReLU()))


def test_bad_options() -> None:
    model = network()
    options: list[tuple[dict[str, Any], str]] = [
        ({"structure": "full"}, "Unknown structure 'full'"),
        ({"reduction": "max"}, "Unknown reduction 'max'"),
        ({"every": 0}, "Invalid every=0. Must be an integer >= 1"),
        ({"structure": "block"}, "Invalid block_size=None"),
        ({"block_size": 2}, "Invalid block_size=2 with structure='dense'"),
        ({"dtype": torch.int64}, "Invalid dtype=torch.int64"),
    ]
    for given, message in options:
        with pytest.raises(ValueError, match=message):
            InputGram(model, **given)
    recorder = InputGram(model, structure="block", block_size=4)
    with pytest.raises(ValueError, match=r"layer '0', whose rows have 6 columns, one of them"):
        model(random(6, 5))
    recorder.remove()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_transforms_of_torch_func_are_refused() -> None:
    model = network()
    recorder = InputGram(model)
    x = random(6, 5)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, row).sum()

    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with pytest.raises(RuntimeError, match="Layer '0' was called inside a transform"):
        per_row(dict(model.named_parameters()), x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="with a dual tensor"):
            model(dual)
    recorder.enabled = False
    per_row(dict(model.named_parameters()), x)


def test_matrices_of_layers() -> None:
    layer = nn.Conv1d(4, 6, 2, groups=2)
    matrix = as_matrix(layer, layer.weight, layer.bias)
    assert matrix.shape == (2, 3, 5)
    weight, bias = from_matrix(layer, matrix)
    assert torch.equal(weight, layer.weight)
    assert bias is not None
    assert torch.equal(bias, layer.bias)
    weight, bias = from_matrix(layer, as_matrix(layer, layer.weight))
    assert torch.equal(weight, layer.weight)
    assert bias is None
    with pytest.raises(
        ValueError, match=r"\[6, 5\] is not that of this Conv1d. Expected \[2, 3, 4\]"
    ):
        from_matrix(layer, torch.ones(6, 5))
