"""Users' hooks on the same modules, and copies of the model, keep working and see the same tensors."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cases import assert_close, batch, network, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_locoprop import LocoProp

SHAPE = (2, 4, 6)


@pytest.mark.parametrize("change", [lambda out: out.transpose(0, 1), lambda out: out[:, :2]])
@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_changes_the_output_is_respected(change, first: bool) -> None:  # type: ignore[no-untyped-def]
    x = batch(*SHAPE)
    expected = change(network()[0](x))
    model = nn.Sequential(network()[0])

    def hook(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return change(out)

    if first:
        model[0].register_forward_hook(hook)
    opt = LocoProp(model, lr=1e-2)
    if not first:
        model[0].register_forward_hook(hook)
    out = model(x)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    before = weights(model)
    opt.step()
    assert not torch.equal(before[0], weights(model)[0])


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_hook_on_the_output_fires(first: bool) -> None:
    model, seen = network(), []

    def hook(module: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(lambda g: seen.append(g.shape))

    if first:
        model[0].register_forward_hook(hook)
    opt = LocoProp(model, lr=1e-2)
    if not first:
        model[0].register_forward_hook(hook)
    model(batch(*SHAPE)).square().sum().backward()
    opt.step()
    assert seen == [torch.Size([2, 4, 5])]


def test_outputs_are_the_same_bits_with_and_without() -> None:
    model, other = network(), network()
    opt = LocoProp(model)
    for shape in ((8, 6), SHAPE, (6,)):
        assert torch.equal(model(batch(*shape)), other(batch(*shape)))
    assert not opt.state


def test_a_shallow_copy_of_a_layer_is_ignored() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-2)
    copy.copy(model[0])(batch(8, 6)).sum().backward()
    assert all(not layer.calls for layer in opt._layers)


def test_the_optimizer_can_be_removed_for_good() -> None:
    """A model whose optimizer was deleted trains as if it never had one."""
    model, other = network(), network()
    opt = LocoProp(model, lr=1e-2)
    del opt
    for net in (model, other):
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch(8, 6)).square().sum().backward()
        sgd.step()
    assert_close(weights(model), weights(other), 0.0)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def hooks_of(model: nn.Module) -> int:
    """Return how many forward hooks of any kind the modules of a model have."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_deep_copies_have_nothing_of_ours(tmp_path: Path) -> None:
    """They can be scripted, and load where this package is not installed; users' hooks stay."""
    model = network()
    calls = []
    model[2].register_forward_hook(lambda module, args, out: calls.append(module))
    opt = LocoProp(model, variant="locoprop-m", lr=1e-2)
    model(batch(*SHAPE)).square().sum().backward()
    opt.step()
    before = hooks_of(model)
    copies = [
        copy.deepcopy(model),
        copy.deepcopy({"best": [model]})["best"][0],
        AveragedModel(model).module,
        copy.deepcopy(copy.deepcopy(model)),
    ]
    for each in copies:
        assert hooks_of(each) == 1
        calls.clear()
        each(batch(*SHAPE))
        assert calls == [each[2]]
    assert hooks_of(model) == before
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    kept = LocoProp(plain, variant="locoprop-m", lr=1e-2)
    torch.jit.script(copy.deepcopy(plain))
    torch.save(copy.deepcopy(plain), tmp_path / "best.pt")
    code = (
        "import sys, torch; sys.modules['torch_locoprop'] = None; "
        f"torch.load({str(tmp_path / 'best.pt')!r}, weights_only=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert kept.summary()


def test_a_model_saved_whole_loads_where_this_package_is_not_installed(tmp_path: Path) -> None:
    """Also while its optimizer exists; what is loaded runs, compiles, and takes a new optimizer."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    opt = LocoProp(model)
    model(batch(*SHAPE).float()).square().sum().backward()
    opt.step()
    torch.save(model, tmp_path / "model.pt")
    torch.save(model(torch.ones(1, 6)).detach(), tmp_path / "output.pt")
    code = (
        "import sys, torch; sys.modules['torch_locoprop'] = None; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        f"expected = torch.load({str(tmp_path / 'output.pt')!r}); "
        "compiled = torch.compile(model, backend='eager', fullgraph=True); "
        "x = torch.ones(1, 6); assert torch.equal(model(x), expected); "
        "assert torch.equal(compiled(x), expected)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    before, own = weights(loaded), LocoProp(loaded)
    assert hooks_of(loaded) == hooks_of(model)
    loaded(batch(*SHAPE).float()).square().sum().backward()
    own.step()
    assert not torch.equal(before[0], weights(loaded)[0])


def test_a_deep_copy_of_model_and_optimizer_has_the_hooks_of_its_optimizer() -> None:
    model = network()
    opt = LocoProp(model, variant="locoprop-m", lr=1e-2)
    twin, other = copy.deepcopy((model, opt))
    assert hooks_of(twin) == hooks_of(model)
    twin(batch(*SHAPE)).square().sum().backward()
    before = weights(twin)
    other.step()
    assert not torch.equal(before[0], weights(twin)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_has_nothing_of_ours() -> None:
    model, x = network(), batch(*SHAPE)
    opt = LocoProp(model, lr=1e-2)
    traced = torch.jit.trace(model, (x,))
    assert "unsafe_view" not in str(traced.inlined_graph)
    assert all(not layer.calls for layer in opt._layers)
    model(x).square().sum().backward()
    opt.step()
    assert_close([traced(x)], [model(x)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_is_scripted_before_the_optimizer_is_made_or_after_it_is_gone() -> None:
    model, x = network(), batch(*SHAPE)
    opt = LocoProp(model)
    with pytest.raises(AttributeError, match="delete the optimizer first"):
        torch.jit.script(model)
    del opt
    gc.collect()
    assert_close([torch.jit.script(model)(x)], [model(x)])


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-m"])
def test_pocoprop_tells_that_it_does_not_see_hooks_on_parameters(variant: str) -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, variant=variant)
    model[2].weight.register_hook(lambda gradient: 0.5 * gradient)
    model(batch(8, 6)).square().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    told = [str(warning.message) for warning in caught]
    assert len(told) == (variant == "pocoprop-m")
    assert all(message.startswith("The parameters of '2' have hooks") for message in told)
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_made_before_a_step_has_neither_gradients_nor_rows(copied) -> None:  # type: ignore[no-untyped-def]
    """PyTorch copies parameters without gradients, and recorded rows belong to gradients."""
    model, x = network(), batch(8, 6)
    opt = LocoProp(model, lr=1e-3, output_transfer="sigmoid")
    model(x).square().sum().backward()
    other, own = copied((model, opt))
    assert other[0].weight.grad is None
    results = []
    for each, stepping in ((other, own), (model, opt)):
        if each is model:
            stepping.zero_grad()
        each(x).sum().backward()
        stepping.step()
        results.append(weights(each))
    assert_close(*results, 0.0)


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-s", "natural-s", "proxprop"])
def test_full_backward_hooks_change_nothing(variant: str) -> None:
    results = []
    for hooked in (False, True):
        model, seen = network(), list[nn.Module]()
        opt = LocoProp(model, lr=1e-2, variant=variant, output_transfer="sigmoid")
        for module in model if hooked else ():
            module.register_full_backward_hook(
                lambda m, inputs, outputs, seen=seen: seen.append(m)  # type: ignore[misc]
            )
        for seed in range(3):
            opt.zero_grad()
            model(batch(*SHAPE, seed=seed).requires_grad_()).square().sum().backward()
            opt.step()
        results.append((weights(model), opt.summary()))
        assert bool(seen) == hooked
    assert_close(results[0][0], results[1][0], 0.0)
    assert results[0][1] == results[1][1]
