"""LocoProp under Hugging Face's Trainer: equal to the plain loop, with accumulation and resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import assert_close, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp

pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'frameworks'")


Main = Callable[..., Any]
QUIET = {"disable_tqdm": True}


@pytest.fixture
def module(example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example with its model in float64."""
    loaded = example("transformers_language_model")
    make = loaded.make

    def doubled() -> Any:
        model, opt = make()
        model.double()
        return model, opt

    monkeypatch.setattr(loaded, "make", doubled)
    return loaded


@pytest.fixture
def main(module: ModuleType, tmp_path: Path) -> Main:
    """Run the example on 80 sentences and return the trainer."""

    def run(*arguments: Any, **settings: Any) -> Any:
        given = [str(a) for a in ("--sentences", 80, "--folder", tmp_path, *arguments)]
        return module.main(given, **QUIET, **settings)

    return run


def test_the_same_weights_as_the_plain_loop(
    module: ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop uses the Trainer's batches, gradient clipping and warm-up."""
    batches: list[dict[str, Tensor]] = []
    make = module.make

    def watched() -> Any:
        model, opt = make()
        model.register_forward_pre_hook(
            lambda _, args, kwargs: batches.append(dict(kwargs)), with_kwargs=True
        )
        return model, opt

    monkeypatch.setattr(module, "make", watched)
    found = weights(main("--epochs", 3, "--batch-size", 20).model)
    assert len(batches) == 12
    model, opt = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / 5))
    for batch in batches:
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
    assert_close(found, weights(model), 1e-14)


def test_accumulated_batches_are_one_large_batch(main: Main) -> None:
    large = weights(main("--epochs", 3, "--batch-size", 40).model)
    many = weights(main("--epochs", 3, "--batch-size", 10, "--accumulate", 4).model)
    assert_close(many, large, 1e-5)  # the model computes its loss in float32
    small = weights(main("--epochs", 3, "--batch-size", 10).model)
    assert not torch.allclose(small[-1], large[-1], atol=1e-4)


@pytest.mark.usefixtures("apply")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_is_bit_identical(main: Main, accumulate: int, tmp_path: Path) -> None:
    options = ("--batch-size", 20, "--accumulate", accumulate)
    straight = weights(main("--epochs", 4, *options, "--folder", tmp_path / "straight").model)
    half = weights(main("--epochs", 2, *options).model)
    assert not torch.equal(half[-1], straight[-1])
    assert_close(weights(main("--epochs", 4, *options, "--resume").model), straight, 0.0)


def test_resuming_goes_on_from_the_latest_run(main: Main, tmp_path: Path) -> None:
    """A longer, older run in the same folder must not be resumed, and is not deleted."""
    straight = main("--epochs", 3, "--batch-size", 20, "--folder", tmp_path / "straight")
    main("--epochs", 4, "--batch-size", 10)
    main("--epochs", 2, "--batch-size", 20)
    resumed = main("--epochs", 3, "--batch-size", 20, "--resume")
    assert_close(weights(resumed.model), weights(straight.model), 0.0)
    kept = {int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*")}
    assert kept == {4, 8, 12, 16, 24, 32}


def test_gradient_checkpointing_changes_nothing(main: Main) -> None:
    plain, thrifty = (
        weights(main("--epochs", 2, gradient_checkpointing=on).model) for on in (False, True)
    )
    assert_close(thrifty, plain, 0.0)


def test_the_loss_falls_and_every_layer_is_served(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    """The softmax is detected automatically, because the model computes the loss."""
    trainer = main("--epochs", 8, "--batch-size", 20)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["lm_head"][3:] == ["softmax", "locoprop-s"]
    assert rows["transformer.h.0.mlp.c_fc"][1:] == ["Conv1D", "32×128", "none", "locoprop-s"]
    assert rows["transformer.h.1.mlp.c_proj"][3:] == ["none", "locoprop-s"]
    assert rows["transformer.wte"][3:5] == ["–", "AdamW"]


MODELS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {"intermediate_size": 16},
    "BertForMaskedLM": {"intermediate_size": 16},
    "LlamaForCausalLM": {"intermediate_size": 16},
    "GPT2LMHeadModel": {},
}
SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_as_they_are_configured_by_default(name: str) -> None:
    """Default models have tied heads, GELU or dropout: one local step with SGD equals BackProp."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**SIZES, **MODELS[name])).double()
    plain = copy.deepcopy(model)
    opt = LocoProp(
        model,
        lr=0.01,
        gamma=3.0,
        solver="sgd",
        local_steps=1,
        fallback=lambda params: torch.optim.SGD(params, lr=0.03),
    )
    tokens = torch.arange(20).reshape(4, 5) % 10 + 1
    labels = tokens[:, 0] % 2 if "Sequence" in name else tokens
    for net, step in ((model, opt.step), (plain, torch.optim.SGD(plain.parameters(), 0.03).step)):
        torch.manual_seed(1)  # of the dropout
        net(input_ids=tokens, labels=labels).loss.backward()
        step()
    assert_close(weights(model), weights(plain), 1e-10)
    assert "softmax" in opt.summary() or "tied" in opt.summary()
