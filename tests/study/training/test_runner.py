"""The folder of a run: its files, bit-identical repeats and resumes, and errors."""

import errno
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torch_locoprop import LocoProp, baselines
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.solvers.first_order import RmsProp
from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import matmul_precision
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training import runner, schedules
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.population_run import method_of, train_together
from torch_locoprop.study.training.run_folder import Checkpoint, Metrics, RunFolder
from torch_locoprop.study.training.run_result import result_of
from torch_locoprop.study.training.runner import run
from torch_locoprop.training_step import TrainingStep

DATA = tiny.data()


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(row.train_loss, row.test_loss) for row in result_of(folder).metrics]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RunFolder(folder).trained_model().state_dict()


def check_same_bits(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


class StopError(Exception):
    pass


def stopping_after(epoch: int, kind: type[BaseException] = StopError) -> Callable[[Metrics], None]:
    def on_epoch(row: Metrics) -> None:
        if row.epoch == epoch:
            raise kind

    return on_epoch


# Schedules ------------------------------------------------------------------------------------


def test_the_papers_schedule() -> None:
    factor = schedules.paper(epochs=100, warmup_epochs=5)
    assert [factor(e) for e in range(5)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert factor(5) == pytest.approx(1 - 1 / 95)
    assert factor(50) == pytest.approx(1 - 46 / 95)
    assert factor(98) == pytest.approx(1 / 95)
    assert factor(99) == pytest.approx(0.5 / 95)


@given(st.sampled_from(schedules.NAMES), st.integers(1, 40), st.integers(0, 10), st.integers(1, 7))
def test_a_schedule_never_ends_at_zero(name: str, epochs: int, warmup: int, steps: int) -> None:
    rate = schedules.rate(name, epochs=epochs, warmup_epochs=warmup, steps=steps)
    factors = [rate(epoch, step) for epoch in range(epochs) for step in range(steps)]
    zeros = [index for index, factor in enumerate(factors) if factor == 0]
    assert zeros == (list(range(steps)) if name == "paper" and min(warmup, epochs // 2) else [])
    assert 0 < factors[-1] <= 1 == max([*factors, 1])


# Configurations -------------------------------------------------------------------------------


def test_a_configuration_has_all_settings_and_goes_through_json() -> None:
    config = tiny.config("kfac@05", settings={"lr": 1}, transfer="ReLU")
    assert config.method == "kfac@5"
    assert config.transfer == "relu"
    assert config.settings == {**methods.get("kfac@5").settings, "lr": 1.0}
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_equal_runs_have_equal_names_and_others_do_not() -> None:
    config, usual = tiny.config("adam"), {"lr": methods.get("adam").settings["lr"]}
    assert config.name("data").startswith("curves-12-8-3-adam-")
    assert config.name("data") == tiny.config("adam", settings=usual).name("data")
    others = [
        config.name("other data"),
        replace(config, seed=1).name("data"),
        tiny.config("adam", settings={"lr": 1e-3}).name("data"),
    ]
    assert len({config.name("data"), *others}) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "Invalid epochs=0. Must be an integer >= 1"),
        ({"batch_size": 2.5}, "Invalid batch_size=2.5"),
        ({"seed": True}, "Invalid seed=True"),
        ({"weight_decay": -1}, "Invalid weight_decay=-1"),
        ({"schedule": "papr"}, "Unknown schedule 'papr'. Did you mean 'paper'"),
        ({"precision": "fp8"}, "Unknown precision"),
        ({"precision": "tf32"}, "needs a GPU"),
        ({"precision": "bf16"}, "precision='bf16' needs a GPU"),
        ({"precision": "bf16", "device": "cuda", "method": "adam"}, "and adam has none"),
        ({"device": "tpu"}, "Unknown device"),
        ({"model": "12"}, "Invalid model='12'"),
        ({"transfer": "softmax"}, "couples the units"),
        ({"method": "nothing"}, "Unknown method"),
        ({"epoch": 3}, "Did you mean 'epochs'"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.from_dict(values)


# Runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "products"), [("tf32", "full"), ("bf16", "bf16")])
def test_local_products_are_as_exact_as_the_precision_says(
    precision: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(precision=precision, device="cuda")
    with matmul_precision(precision):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    method = method_of(config)
    assert method is not None
    assert method.local_products == config.local_products == products
    monkeypatch.setattr(RunConfig, "local_products", products)  # without a GPU
    asked, solve = set(), RmsProp.solve

    def noting(self: RmsProp, problem: LocalProblem, *more: Any) -> Any:
        asked.add(problem.products)
        return solve(self, problem, *more)

    monkeypatch.setattr(RmsProp, "solve", noting)
    run(tiny.config(), tmp_path / "alone", data=DATA)
    train_together([tiny.config()], DATA)
    assert asked == {products}


def test_seconds_are_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def later(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return work(*given)

        return later

    monkeypatch.setattr(runner.time, "perf_counter", lambda: now)
    monkeypatch.setattr(runner, "_loss", slow(100.0, runner._loss))
    monkeypatch.setattr(runner, "TrainingStep", slow(10.0, runner.TrainingStep))
    monkeypatch.setattr(RmsProp, "solve", slow(1.0, RmsProp.solve))
    rows = run(tiny.config(), tmp_path, data=DATA).metrics
    solved = 4 * math.ceil(len(DATA.train) / 15)  # of four layers, in every step
    assert [row.seconds for row in rows] == [solved * epoch for epoch in range(5)]


class Asked(TorchDispatchMode):
    """Counts how often the host asks for a number, for which it would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "waits"),
    [(name, False) for name in ("sgd", "momentum", "adagrad", "rmsprop", "adam", "muon")]
    + [("kfac", True)],
)
def test_the_host_asks_for_no_number_in_a_step(method: str, waits: bool) -> None:
    """A step in a CUDA graph must not wait; K-FAC waits, which shows that the check works."""
    model = architectures.build("12-8-3")
    own = methods.get(method)
    optimizer = own.build(model, {**own.settings, "weight_decay": 1e-5})
    step, images = TrainingStep(model, reconstruction_loss, optimizer), DATA.train[:10]
    step(images, images)
    with Asked() as asked:
        step(images, images)
    assert (asked.times > 0) is waits


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    seen: list[Metrics] = []
    result = run(tiny.config(), folder, data=DATA, on_epoch=seen.append)
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "metrics.jsonl", "checkpoint.pt", "lock"}
    description = json.loads((folder / "config.json").read_text())
    assert description["config"] == result.config.to_dict()
    assert description["data"] == DATA.metadata
    assert description["environment"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert all(row["memory_mib"] > 1 for row in rows)
    assert tuple(seen) == result.metrics == result_of(folder).metrics
    assert result.finished
    assert not result.diverged
    assert result.origin == "reference"
    assert result.to_dict()["epoch"] == 4
    assert not (tmp_path / "runs").exists()


def test_the_run_is_the_plain_loop(tmp_path: Path) -> None:
    """The losses equal those of a loop written out with the formula of the schedule."""
    config = tiny.config(settings={"lr": 1e-3}, warmup_epochs=2, seed=5)
    run(config, tmp_path, data=DATA)
    model = architectures.build("12-8-3", seed=5)
    optimizer = LocoProp(
        model, variant="locoprop-m", lr=1e-3, output_transfer="sigmoid", weight_decay=1e-5
    )
    expected = [(float("nan"), 0.0), (0.0, 0), (0.5, 1), (0.5, 2), (0.25, 3)]
    for row, (rate, epoch) in zip(losses(tmp_path), expected, strict=True):
        if not math.isnan(rate):
            optimizer.param_groups[0]["lr"] = 1e-3 * rate
            order = torch.randperm(
                40, generator=torch.Generator().manual_seed(runner.epoch_seed(5, int(epoch)))
            )
            for rows in order.split(15):
                x = DATA.train[rows]
                reconstruction_loss(model(x), x).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            train, test = (reconstruction_loss(model(x), x).item() for x in (DATA.train, DATA.test))
        assert row == pytest.approx((train, test), rel=1e-6)


def test_a_seed_repeats_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        run(tiny.config(seed=seed), tmp_path / name, data=DATA)
    check_same_bits(tmp_path / "one", tmp_path / "again")
    assert losses(tmp_path / "one") != losses(tmp_path / "other")
    assert runner.epoch_seed(0, 1) != runner.epoch_seed(1, 0)


@pytest.mark.parametrize("name", methods.names())
def test_every_method_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    if name in ("soap", "psgd"):
        pytest.importorskip("pytorch_optimizer")
        pytest.importorskip("opt_einsum")
    config = tiny.config(name, schedule="linear", warmup_epochs=1)
    run(config, tmp_path / "whole", data=DATA)
    for epoch in (0, 1, 3):
        with pytest.raises(StopError):
            run(
                config,
                tmp_path / "parts",
                resume=epoch > 0,
                data=DATA,
                on_epoch=stopping_after(epoch),
                checkpoint_seconds=0.0,
            )
    run(config, tmp_path / "parts", resume=True, data=DATA)
    check_same_bits(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.usefixtures("_random_method")
def test_methods_that_draw_random_numbers_resume_too(tmp_path: Path) -> None:
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    config = tiny.config("noisy")
    run(config, tmp_path / "whole", data=DATA)
    with pytest.raises(StopError):
        run(
            config,
            tmp_path / "parts",
            data=DATA,
            on_epoch=stopping_after(2),
            checkpoint_seconds=0.0,
        )
    run(config, tmp_path / "parts", resume=True, data=DATA)
    check_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert np.array_equal(np.random.get_state()[1], numpy_state), "the caller's are left alone"
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.fixture
def _random_method(own_methods: None) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad += torch.randn_like(parameter) * np.random.random()
            super().step()

    methods.register(
        methods.Method("noisy", lambda m, s: Noisy(m.parameters(), **s), {"lr": 1e-3}, "untuned")
    )


def test_checkpoints_are_apart_but_metrics_are_not(tmp_path: Path) -> None:
    """A resumed run drops the lines after its checkpoint: none is doubled and none is missing."""
    config = tiny.config()
    with pytest.raises(StopError):
        run(config, tmp_path, data=DATA, on_epoch=stopping_after(3))
    assert len(result_of(tmp_path).metrics) == 4
    checkpoint = RunFolder(tmp_path).checkpoint()
    assert checkpoint is not None
    assert len(checkpoint.metrics) == 1
    with pytest.raises(KeyboardInterrupt):
        run(
            config,
            tmp_path,
            resume=True,
            data=DATA,
            on_epoch=stopping_after(1, KeyboardInterrupt),
        )
    assert len(result_of(tmp_path).metrics) == 2
    result = run(config, tmp_path, resume=True, data=DATA)
    assert [row.epoch for row in result.metrics] == [0, 1, 2, 3, 4]
    assert result.metrics == result_of(tmp_path).metrics


def test_a_finished_run_is_returned_as_it_is(tmp_path: Path) -> None:
    first = run(tiny.config(), tmp_path, data=DATA)
    stamp = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    again = run(tiny.config(), tmp_path, data=DATA, resume=True, on_epoch=stopping_after(0))
    assert again == first
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("lr", [1e6, 1e38])
def test_a_diverged_run_ends_early_and_says_so(lr: float, tmp_path: Path) -> None:
    config = tiny.config("sgd", settings={"lr": lr}, warmup_epochs=0, epochs=50)
    result = run(config, tmp_path, data=DATA)
    assert result.diverged
    assert result.finished
    assert len(result.metrics) < 50
    last = json.loads(
        (tmp_path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=None
    )
    assert last["diverged"] is True
    assert run(config, tmp_path, data=DATA, resume=True).diverged


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_run_whose_every_step_is_refused_has_diverged(tmp_path: Path) -> None:
    config = tiny.config(settings={"lr": 1e38, "gamma": 1e30}, warmup_epochs=0)
    result = run(config, tmp_path, data=DATA)
    assert result.diverged
    assert [row.train_loss for row in result.metrics] == [result.metrics[0].train_loss] * 2


@pytest.mark.usefixtures("own_methods")
def test_a_matrix_that_cannot_be_factored_ends_the_run_as_diverged(tmp_path: Path) -> None:

    class Mine(baselines.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.linalg.LinAlgError("not positive-definite")

    mine = methods.Method("mine", lambda m, own: Mine(m.parameters(), **own), {"lr": 0.1}, "")
    methods.register(mine)
    result = run(tiny.config("mine"), tmp_path, data=DATA)
    assert result.diverged
    assert len(result.metrics) == 2
    assert run(tiny.config("mine"), tmp_path, data=DATA, resume=True).diverged


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    row = Metrics(1, math.inf, math.nan, 0.0, 0.0, True)
    assert row.to_dict()["train_loss"] is row.to_dict()["test_loss"] is None
    assert math.isnan(Metrics.from_dict(row.to_dict()).train_loss)


def test_the_data_set_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.datasets, "load", lambda name: replace_name(DATA, name))
    result = run(tiny.config(dataset="mnist", epochs=1), tmp_path)
    assert RunFolder(tmp_path).description()["data"]["name"] == "mnist"
    assert result.finished


def replace_name(data: Dataset, name: str) -> Dataset:
    return Dataset(name, data.train, data.test, data.source)


# What is refused ------------------------------------------------------------------------------


def test_going_on_in_another_environment_is_told(tmp_path: Path) -> None:
    """Results are bit-identical on one machine only."""
    with pytest.raises(StopError):
        run(tiny.config(), tmp_path, data=DATA, on_epoch=stopping_after(1))
    description = json.loads((tmp_path / "config.json").read_text())
    description["environment"] |= {"torch": "1.2.3", "threads": 99}
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.warns(UserWarning, match=r"torch 1\.2\.3 there and .* here, threads 99 there"):
        assert run(tiny.config(), tmp_path, data=DATA, resume=True).finished


def test_another_run_in_the_folder_is_refused_by_its_differences(tmp_path: Path) -> None:
    run(tiny.config(epochs=1), tmp_path, data=DATA)
    with pytest.raises(RunError, match=r"already has a run.*--resume.*--out"):
        run(tiny.config(epochs=1), tmp_path, data=DATA)
    with pytest.raises(
        RunError, match=r"epochs is 1 there and 2 here, lr is 1e-05 there and 0\.1 here"
    ):
        run(tiny.config(epochs=2, settings={"lr": 0.1}), tmp_path, data=DATA, resume=True)
    other = Dataset("curves", DATA.train, DATA.test, "genuine")
    with pytest.raises(RunError, match="data source is 'made for tests' there and 'genuine' here"):
        run(tiny.config(epochs=1), tmp_path, data=other, resume=True)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="Another process"):
        run(tiny.config(), tmp_path, data=DATA)


@pytest.mark.parametrize(
    ("config", "data", "message"),
    [
        (tiny.config(model="13-8-3"), DATA, "first width must be 12, the number of pixels"),
        (tiny.config(dataset="mnist"), DATA, "configuration is for mnist, and the data is curves"),
        (tiny.config("muon", settings={"momentum": 3.0}), DATA, "Invalid momentum=3"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(
    config: RunConfig, data: Dataset, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run(config, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finds no GPU"):
        run(tiny.config(device="cuda"), tmp_path, data=DATA)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StopError):
        run(tiny.config(), tmp_path, data=DATA, on_epoch=stopping_after(1))
    checkpoint = tmp_path / "checkpoint.pt"
    for content in (b"", b"nonsense", checkpoint.read_bytes()[:-100]):
        checkpoint.write_bytes(content)
        with pytest.raises(RunError, match=r"checkpoint\.pt cannot be read"):
            run(tiny.config(), tmp_path, data=DATA, resume=True)
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    for text in ("{", "3", '{"epoch": 0}'):
        (tmp_path / "metrics.jsonl").write_text(f"{first}\n{text}\n")
        with pytest.raises(RunError, match=r"Line 2 of .*metrics\.jsonl is not"):
            run(tiny.config(), tmp_path, data=DATA, resume=True)
    for text in ("{", "[]", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=r"config\.json is not the description of a run"):
            run(tiny.config(), tmp_path, data=DATA, resume=True)


def test_lost_metrics_come_back_from_the_checkpoint(tmp_path: Path) -> None:
    whole = run(tiny.config(), tmp_path, data=DATA)
    (tmp_path / "metrics.jsonl").unlink()
    assert run(tiny.config(), tmp_path, data=DATA, resume=True).metrics == whole.metrics
    assert RunFolder(tmp_path).metrics() == whole.metrics


def test_a_run_that_began_meanwhile_is_not_mixed_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RunFolder.locked

    def late(files: RunFolder) -> AbstractContextManager[None]:
        monkeypatch.setattr(RunFolder, "locked", own)
        run(tiny.config("adam"), tmp_path, data=DATA)
        return own(files)

    monkeypatch.setattr(RunFolder, "locked", late)
    with pytest.raises(RunError, match="method is 'adam' there and 'sgd' here"):
        run(tiny.config("sgd"), tmp_path, data=DATA)
    assert result_of(tmp_path).config.method == "adam"


def test_no_checkpoint_no_model(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).metrics() == ()
    with pytest.raises(RunError, match="no checkpoint yet"):
        RunFolder(tmp_path).trained_model()


def test_a_failed_write_leaves_the_old_file_and_names_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, row = RunFolder(tmp_path), Metrics(0, 1.0, 1.0, 0.0, 0.0, False)
    files.write_checkpoint(Checkpoint({}, {}, (row,)))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint\.pt") as caught:
        files.write_checkpoint(Checkpoint({}, {}, (row, row)))
    assert caught.value.errno == errno.ENOSPC
    checkpoint = files.checkpoint()
    assert checkpoint is not None
    assert checkpoint.metrics == (row,)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
