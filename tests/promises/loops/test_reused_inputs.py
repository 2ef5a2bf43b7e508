"""Inputs that are overwritten after the backward pass: static buffers, batches read ahead."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import assert_close, cross_entropy, network, weights
from promises.loops.plain import data, distance, loco
from torch import Tensor, nn

from torch_locoprop import LocoProp


def accumulated(model: nn.Module, opt: torch.optim.Optimizer, buffer: Tensor | None) -> None:
    """Take a step on two micro-batches, each as it is or copied to the buffer."""
    for seed in (1, 2):
        x, y = data(seed=seed)
        if buffer is not None:
            x = buffer.copy_(x)
        cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-m"])
def test_a_buffer_for_all_micro_batches(variant: str) -> None:
    model, other, buffer = network(), network(), torch.empty_like(data()[0])
    opt, plain = loco(model, variant), loco(other, variant)
    with pytest.warns(UserWarning, match=r"input of '0' was written to .* one BackProp step"):
        accumulated(model, opt, buffer)
    other.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # from now on, inputs are copied
            accumulated(model, opt, buffer)
            accumulated(other, plain, None)
    assert_close(weights(model), weights(other), 1e-12)


def test_what_was_condensed_in_time_is_right() -> None:
    model, other = network(), network()
    accumulated(model, loco(model, "locoprop-s"), torch.empty_like(data()[0]))
    accumulated(other, loco(other, "locoprop-s"), None)
    assert_close(weights(model), weights(other), 1e-12)


@pytest.mark.parametrize("hidden", [False, True])
def test_only_that_layer_takes_a_backprop_step(hidden: bool) -> None:
    """The next batch is read before ``step()``, or an activation is used as scratch memory."""
    model, other, once = network(), network(), network()
    for net, solver in ((model, {}), (other, {}), (once, {"local_steps": 1})):
        opt = loco(net, "locoprop-m", **solver)
        x, y = data()
        h = net[1](net[0](x))
        loss = cross_entropy(net[2:](h), y)
        loss.backward()
        if net is model:
            with torch.no_grad():
                (h if hidden else x).zero_()
            with pytest.warns(UserWarning, match=f"input of '{2 if hidden else 0}' was written to"):
                opt.step()
        else:
            opt.step()
    at = 2 if hidden else 0
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            same, another = (once, other) if name == str(at) else (other, once)
            found, exact = layer.weight.detach(), same.get_submodule(name).weight
            assert_close([found], [exact], 1e-12)
            assert distance([found], [another.get_submodule(name).weight.detach()]) > 1e-6


def test_inputs_that_stay_are_not_copied() -> None:
    model = network()
    opt = loco(model, "locoprop-m")
    x, y = data()
    cross_entropy(model(x), y).backward()
    assert opt._layers[0].calls[0].x.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("how", ["numpy", "data"])
@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-m"])
def test_buffers_that_are_written_to_past_autograd(variant: str, how: str) -> None:
    """``torch.from_numpy(buffer)`` and ``x.data`` have a version that writing leaves as it is."""
    model, other = network(), network()
    opt, plain = loco(model, variant), loco(other, variant)
    buffer = torch.empty_like(data()[0])

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, reused: bool) -> None:
        for seed in (1, 2):
            x, y = data(seed=seed)
            if reused and how == "numpy":
                buffer.numpy()[:] = x.numpy()
            elif reused:
                buffer.data.copy_(x)
            cross_entropy(net(buffer if reused else x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"input of '0' was written to .* one BackProp step"):
        step(model, opt, True)
    other.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(2):  # from now on, inputs are copied
        step(model, opt, True)
        step(other, plain, False)
    assert_close(weights(model), weights(other), 1e-12)


def test_inputs_with_nan_are_not_taken_for_overwritten() -> None:
    model = network()
    opt = loco(model, "locoprop-m")
    x, y = data()
    x[0, 0] = torch.nan
    cross_entropy(model(x)[1:], y[1:]).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert not any("written to" in str(w.message) for w in caught)


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (3, 4, 4)])
def test_images_in_any_memory_format(shape: tuple[int, ...]) -> None:
    """Batches with ``channels_last``, single images, transposed and expanded ones."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 2, 3).double()
    opt = LocoProp(model, variant="locoprop-m", lr=1e-3, gamma=1.0, output_transfer="sigmoid")
    whole = torch.rand(shape).double()
    inputs = [whole.transpose(-1, -2), whole[..., :1].expand(shape), whole]
    if len(shape) == 4:
        inputs.append(whole.to(memory_format=torch.channels_last))
    for x in inputs:
        model(x).square().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
        opt.zero_grad()
    model(x).square().sum().backward()
    x.data.zero_()
    with pytest.warns(UserWarning, match="was written to"):
        opt.step()
