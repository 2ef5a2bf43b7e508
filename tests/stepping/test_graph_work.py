"""The key of a CUDA graph contains every setting, so that no change replays stale work."""

import pytest
import torch
from cases import batch, network
from changed_settings import CHANGED

from torch_locoprop import LocoProp
from torch_locoprop.config.settings import SETTINGS
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.stepping.graph_work import work_of


def key_of(opt: LocoProp) -> list[object]:
    trained = {layer: layer.with_gradient for layer in opt._layers}
    groups, components = opt.param_groups, opt._components
    work = work_of(trained, opt._plan, groups, components, opt.state, 1.0)
    assert work is not None
    return work.key


def before_a_step() -> tuple[LocoProp, graphs.DeviceRates]:
    model = network()
    opt = LocoProp(model, preset="paper-m", output_transfer="sigmoid")
    for step in range(2):  # after the first, there are states
        model(batch(8, 6, seed=step)).sum().backward()
        if step == 0:
            opt.step()
            opt.zero_grad()
    return opt, graphs.DeviceRates()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_another_key_or_is_read_from_the_device(name: str) -> None:
    opt, rates = before_a_step()
    device = torch.device("cpu")
    with rates.of(opt.param_groups, device):
        before, rate = key_of(opt), opt.param_groups[0]["lr"]
        assert key_of(opt) == before
    opt.param_groups[0][name] = CHANGED[name]
    with rates.of(opt.param_groups, device):
        if name == "lr":
            assert key_of(opt) == before
            assert opt.param_groups[0]["lr"] is rate
            assert rate == CHANGED["lr"]
        else:
            assert key_of(opt) != before


def test_groups_whose_rates_part_are_another_key() -> None:
    """Groups with equal rates read them from one tensor, otherwise from two."""
    model = network()
    *most, last = model.parameters()
    opt = LocoProp(
        model,
        preset="paper-m",
        output_transfer="sigmoid",
        param_groups=[{"params": most}, {"params": [last]}],
    )
    model(batch(8, 6)).sum().backward()
    rates, keys = graphs.DeviceRates(), []
    for second in (1e-5, 2e-5, 1e-5):
        opt.param_groups[1]["lr"] = second
        with rates.of(opt.param_groups, torch.device("cpu")):
            keys.append(key_of(opt))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
