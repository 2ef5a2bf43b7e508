"""The example comparisons: every method trains, finished runs are kept, the table shows them."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "examples"
MODULES = (
    *("arguments", "muon", "training", "timing", "methods", "comparison", "next_token"),
    *("fashion_cnn", "shakespeare_gpt"),
)
TEXT = "to be, or not to be: that is the question.\n" * 60
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """Import the modules of the examples from their folder, as a script there would."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture
def quick(examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timings, and few evaluations."""
    monkeypatch.setattr(examples["timing"], "WARM_UP", 1)
    monkeypatch.setattr(examples["timing"], "TURNS", 1)
    monkeypatch.setattr(examples["timing"], "TURN", 2)
    monkeypatch.setattr(examples["timing"], "own_process", examples["timing"].InProcess)
    monkeypatch.setattr(examples["training"], "POINTS", 2)


@pytest.fixture
def gpt(examples: dict[str, ModuleType], tmp_path: Path) -> Any:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 8, "dropout": 0.0}
    return examples["shakespeare_gpt"].ShakespeareGPT(path, **sizes)


@pytest.fixture
def cnn(examples: dict[str, ModuleType]) -> Any:
    """Two classes of noise with horizontal or vertical stripes: shifts and mirroring keep the class."""
    module = examples["fashion_cnn"]

    class Tiny(module.FashionCNN):  # type: ignore[name-defined, misc]
        def load(self, device: torch.device) -> Any:
            generator = torch.Generator().manual_seed(0)
            labels = torch.arange(240) % 2
            images = torch.randint(0, 60, (240, 12, 12), generator=generator)
            images[labels == 0, ::3] += 180
            images[labels == 1, :, ::3] += 180
            images = images.to(torch.uint8)
            return self.divided(images[:200], labels[:200], images[200:], labels[200:])

    return Tiny(None, channels=(4, 8), batch_size=32, validation=40)


def run_of(
    task: Any, method: str, folder: Path, examples: dict[str, ModuleType], **other: Any
) -> Any:
    asked = {"settings": task.methods[method].settings, "seed": 0, "steps": 8} | other
    return examples["training"].Run(method, folder=folder, **asked)


METHODS = ("adamw", "muon", "soap", "spectral")
METHODS = (*METHODS, "locoprop-s-exact-muon", "locoprop-s-adamw", "locoprop-s")


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(
    request: pytest.FixtureRequest, examples: dict[str, ModuleType], kind: str, method: str
) -> None:
    task = request.getfixturevalue(kind)
    assert set(METHODS) == set(task.methods)
    run = run_of(task, method, Path(), examples, steps=40)
    training = examples["training"].Training(task, run, "cpu")
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    first = float(training.advance(5))
    training.advance(30)
    last = float(training.advance(5))
    assert last < 0.9 * first
    moved = {n for n, p in training.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before)
    if isinstance(training.optimizer, examples["methods"].LocoProp):
        assert "blocks" in training.optimizer.summary()
        assert not any(training.optimizer.skipped_updates.values())


@pytest.mark.parametrize(("kind", "module"), [("cnn", "fashion_cnn"), ("gpt", "shakespeare_gpt")])
def test_all_sets_of_layers_train_all_parameters(
    kind: str, module: str, examples: dict[str, ModuleType], request: pytest.FixtureRequest
) -> None:
    task, method, counts = request.getfixturevalue(kind), "locoprop-s-exact-muon", []
    for layers in examples[module].MAKE.layers:
        settings = {**task.methods[method].settings, "layers": layers}
        run = run_of(task, method, Path(), examples, settings=settings)
        training = examples["training"].Training(task, run, "cpu")
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        training.advance(3)
        moved = {n for n, p in training.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == set(before)
        counts.append(len(training.optimizer.skipped_updates))
    assert len(set(counts)) == len(counts)  # the numbers of layers with local problems differ


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_methods_have_the_same_number_of_trials(request: pytest.FixtureRequest, kind: str) -> None:
    task = request.getfixturevalue(kind)
    assert len({len(method.trials()) for method in task.methods.values()}) == 1
    for method in task.methods.values():
        assert all(set(trial) == set(method.settings) for trial in method.trials())


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_shrink_weights_alike(
    gpt: Any, examples: dict[str, ModuleType], method: str
) -> None:
    training = examples["training"].Training(gpt, run_of(gpt, method, Path(), examples), "cpu")
    optimizer = training.optimizer
    outer = getattr(optimizer, "_outer", None)
    groups = [*optimizer.param_groups, *(outer.param_groups if outer else ())]
    shrinking = [group for group in groups if group.get("weight_decay")]
    full = [group["initial_lr"] if "initial_lr" in group else group["lr"] for group in shrinking]
    shrunk = [lr * group["weight_decay"] for lr, group in zip(full, shrinking, strict=True)]
    assert shrunk == pytest.approx([1e-4] * len(shrinking))
    # LocoProp's own groups hold biases too, which its weight decay leaves alone.
    weights = {p for group in shrinking for p in group["params"] if p.dim() >= 2}
    assert weights == {p for p in training.model.parameters() if p.dim() >= 2}


def test_muon_is_that_of_torch(examples: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    shapes = [(8, 5), (5, 8), (8, 5), (6, 6)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    mine = examples["muon"].Muon(ours, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", nesterov=True, **settings)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        mine.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)  # steps of 0.02, in bfloat16


def test_soap_takes_the_steps_of_its_package(examples: dict[str, ModuleType]) -> None:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 6), nn.BatchNorm2d(3)).double()
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.02, "momentum": 0.9}
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 1e-4 / 0.02},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    own = examples["methods"].Optimizers({}).by_soap(ours, settings)
    package = pytorch_optimizer.SOAP(
        groups, lr=0.02, betas=(0.9, 0.95), precondition_frequency=10, weight_decay=0.0
    )
    before = [p.detach().clone() for p in ours.parameters()]
    for _ in range(23):  # bases are renewed twice
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        own.step()
        package.step()
    for p, q, start in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        # The package rounds its bases to float32.
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
        assert (p - start).abs().max() > 0.05


def test_a_filter_is_the_matrix_of_its_inputs(examples: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(4, 2, 3, 3))
    matrix = nn.Parameter(filters.detach().flatten(1).clone())
    filters.grad = torch.randn_like(filters)
    matrix.grad = filters.grad.flatten(1)
    for parameter in (filters, matrix):
        examples["muon"].Muon([parameter], lr=0.1).step()
    assert torch.equal(filters.detach().flatten(1), matrix.detach())


def test_orthogonalised_matrices_have_singular_values_near_one(
    examples: dict[str, ModuleType],
) -> None:
    matrices = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(examples["muon"].orthogonalised(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_the_schedule_rises_and_falls(examples: dict[str, ModuleType]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = examples["training"].schedule(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.02


def test_shifted_images_are_shifted_images(examples: dict[str, ModuleType]) -> None:
    image = torch.arange(1, 37, dtype=torch.uint8).reshape(6, 6)
    generator = torch.Generator().manual_seed(0)
    found = examples["fashion_cnn"].shifted_and_flipped(image.repeat(200, 1, 1), generator, far=1)
    padded = nn.functional.pad(image, (1, 1, 1, 1))
    possible = {
        bytes(torch.where(torch.tensor(flip), view.flip(1), view).flatten().tolist())
        for flip in (False, True)
        for down in range(3)
        for right in range(3)
        for view in [padded[down : down + 6, right : right + 6]]
    }
    assert {bytes(each.flatten().tolist()) for each in found} == possible


def test_windows_cover_the_text_once(gpt: Any) -> None:
    data = gpt.load(torch.device("cpu"))
    assert len(data.train) == int(0.9 * len(TEXT))
    inputs, labels = gpt.windows(torch.arange(100))
    assert inputs.flatten().tolist() == list(range(96))
    assert labels.flatten().tolist() == list(range(1, 97))


@pytest.fixture
def main(examples: dict[str, ModuleType], gpt: Any, tmp_path: Path, quick: None) -> Any:
    """Run the command on the tiny task; return the folder of results."""

    def run(*arguments: str) -> Path:
        comparison = examples["comparison"]
        own = [
            "--steps",
            "4",
            "--methods",
            "adamw",
            "locoprop-s-exact-muon",
            "--out",
            str(tmp_path),
        ]
        options = comparison.parser("", steps=9).parse_args([*own, *CPU, *arguments])
        comparison.main(gpt, options)
        return tmp_path

    return run


def written(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_a_comparison_and_its_table(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = main("--seeds", "0", "1")
    timings = written(folder)["timings.json"]["methods"]
    runs = written(folder / "runs")
    slower = timings["locoprop-s-exact-muon"]["ms_per_step"] / timings["adamw"]["ms_per_step"]
    counts = sorted((run["method"], run["steps"], run["seed"]) for run in runs.values())
    fewer = max(int(4 / slower + 1e-9), 1)
    expected = {("adamw", 4), ("locoprop-s-exact-muon", 4), ("locoprop-s-exact-muon", fewer)}
    assert counts == sorted((*which, seed) for which in expected for seed in (0, 1))
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out
    of_adamw = [run for run in runs.values() if run["method"] == "adamw"]
    low, high = sorted(run["final"]["test loss"] for run in of_adamw)
    row = next(line for line in table.splitlines() if line.startswith("| adamw"))
    assert f"| {(low + high) / 2:.4f} ± {(high - low) / math.sqrt(2):.4f} |" in row
    assert row.split("|")[3].strip() == "0"  # trials


def test_finished_runs_are_not_made_again(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = main("--seeds", "0")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    next((folder / "runs").glob("adamw*seed=0.json")).unlink()
    capsys.readouterr()
    main("--seeds", "0")
    printed = capsys.readouterr().out
    made = [line for line in printed.splitlines() if line.startswith("shakespeare-gpt  ")]
    assert len(made) == 1
    assert "adamw lr=0.002 seed=0 steps=4" in made[0]
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    assert [path.name for path in after if after[path] != before[path]] == [
        path.name for path in folder.glob("runs/adamw*")
    ]


def test_runs_use_the_best_of_the_search(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = main("--search", "--methods", "adamw", "--search-steps", "2")
    tried = written(folder / "searches")
    assert len(tried) == 10
    assert {run["seed"] for run in tried.values()} == {100}
    best = min(tried.values(), key=lambda run: run["final"]["validation loss"])["settings"]
    assert "at the edge of the grid: lr" in capsys.readouterr().out  # after two steps, the largest
    main("--methods", "adamw", "--search-steps", "2", "--seeds", "0")
    (run,) = written(folder / "runs").values()
    assert run["settings"] == best
    row = (folder / "table.md").read_text().splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[1:4]] == ["adamw", f"lr {best['lr']:g}", "10"]


def test_the_table_needs_no_training(main: Any, examples: Any, monkeypatch: Any) -> None:
    folder = main("--seeds", "0")
    table = (folder / "table.md").read_text()
    (folder / "table.md").unlink()
    monkeypatch.setattr(examples["training"].Training, "advance", None)
    main("--seeds", "0", "--table")
    assert (folder / "table.md").read_text() == table
    main("--seeds", "0", "1", "--table")
    assert "(1 of 2 seeds)" in (folder / "table.md").read_text()


def test_the_full_timing_is_that_of_long_runs(examples: dict[str, ModuleType]) -> None:
    length = examples["timing"].length
    assert length(400) == length(2000) == length(2140) == (200, 9, 20)
    assert length(2000).steps == 380
    assert length(100) == (50, 2, 20)
    assert all(1 < length(steps).steps <= max(steps, 2) for steps in range(1, 400))
    assert all(min(length(steps)) >= 1 for steps in range(1, 400))


def test_a_short_timing_is_not_that_of_longer_runs(
    main: Any, examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples["timing"], "WARM_UP", 4)

    def timed(*arguments: str) -> dict[str, Any]:
        return written(main("--methods", "adamw", "--seeds", "0", *arguments))["timings.json"]

    short = timed()
    assert short["steps"] == 4  # two and one turn of two
    with pytest.raises(SystemExit, match="No timings in"):
        timed("--steps", "8", "--table")
    full = timed("--steps", "8")
    assert full["steps"] == 6
    assert timed() == full  # no need for a shorter one


def test_timings_that_do_not_say_their_length_are_full(main: Any) -> None:
    path = main("--seeds", "0") / "timings.json"
    kept = json.loads(path.read_text())
    del kept["steps"]
    path.write_text(json.dumps(kept))
    main("--seeds", "0")
    assert json.loads(path.read_text()) == kept


@pytest.mark.parametrize("option", ["--steps", "--search-steps", "--processes"])
@pytest.mark.parametrize("number", ["0", "-3"])
def test_counts_below_one_are_refused(
    main: Any, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option, number)
    assert ended.value.code == 2
    assert f"argument {option}: must be at least 1, not {number}" in capsys.readouterr().err


@pytest.fixture
def no_training(examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attempt to train fail, in this process and in others."""
    monkeypatch.setattr(examples["timing"], "processes", None)
    monkeypatch.setattr(examples["comparison"], "perform", None)


WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=WITHOUT_CUDA), "cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_said_at_once(
    examples: dict[str, ModuleType], gpt: Any, device: str, tmp_path: Path
) -> None:
    arguments = ["--text", str(gpt.source), "--device", device, "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=f"^Device '{device}' cannot be used .* --device") as ended:
        examples["shakespeare_gpt"].main(arguments)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("phase", [[], ["--search"], ["--time"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a text file"),
        (b"\xff", "is not a text file"),
        (b"to be", "is too short: .* 5 characters"),
    ],
)
def test_a_text_that_cannot_be_used_is_said_at_once(
    examples: dict[str, ModuleType], phase: list[str], content: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    arguments = [*phase, "--text", str(path), "--out", str(tmp_path / "out"), *CPU]
    with pytest.raises(SystemExit, match=f"^{path} {message}.* with --text") as ended:
        examples["shakespeare_gpt"].main(arguments)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_a_folder_of_images_that_is_not_there_is_said_at_once(
    examples: dict[str, ModuleType], tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SystemExit, match=f"^{nowhere}, given by --data-dir, is not a folder"):
        examples["fashion_cnn"].main(["--data-dir", str(nowhere), "--out", str(tmp_path), *CPU])


RESULTS = FOLDER.parent / "results" / "examples"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
@pytest.mark.parametrize("script", ["fashion_cnn", "shakespeare_gpt"])
def test_the_readme_has_the_tables_of_the_runs(
    examples: dict[str, ModuleType], script: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(RESULTS / script.replace("_", "-"), tmp_path / script)
    kept = (folder / "table.md").read_text()
    examples[script].main(["--search-steps", "1000", "--table", "--out", str(folder)])
    made = (folder / "table.md").read_text()
    assert made == kept
    assert made in (FOLDER / "README.md").read_text()


def test_all_makes_the_missing_trials_and_runs_and_measures_beside_the_first_method(
    main: Any, examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("--search-steps", "2", "--seeds", "0", "--all")
    folder = main(*own)
    first = {path: path.stat().st_mtime_ns for path in folder.glob("*s/*.json")}
    assert len(first) == 2 * 10 + 3
    path = folder / "timings.json"
    timings = json.loads(path.read_text())
    # The host was three times as fast then, so the second measurement of AdamW has another time.
    timings["methods"]["adamw"]["ms_per_step"] = 5.0
    timings["methods"]["locoprop-s-exact-muon"]["ms_per_step"] = 10.0
    path.write_text(json.dumps(timings))
    times = iter([15.0, 5.0])
    measured = [{"ms_per_step": time, "ms_in_turns": [time], "memory_mib": 1.0} for time in times]
    asked: list[Any] = []

    def measure(task: Any, runs: Any, *others: Any) -> Any:
        asked.extend(runs)
        return {run.method: found for run, found in zip(runs, measured, strict=True)}

    monkeypatch.setattr(examples["timing"], "measured", measure)
    main(*own, "--methods", "adamw", "muon")
    assert [run.method for run in asked] == ["adamw", "muon"]
    muon = sorted(written(folder / "searches").values(), key=lambda run: run["method"])[-10:]
    best = min(muon, key=lambda run: run["final"]["validation loss"])["settings"]
    assert asked[1].settings == best  # the trials came first
    now = json.loads(path.read_text())["methods"]
    assert now["muon"] == {**measured[1], "first_ms_per_step": 15.0}
    assert now["adamw"] == timings["methods"]["adamw"]
    assert {path: path.stat().st_mtime_ns for path in first} == first
    made = set(folder.glob("*s/*.json")) - set(first)
    assert len(made) == 10 + 2
    # Three steps of Muon take the time of one of AdamW in the same turns.
    runs = [run for run in written(folder / "runs").values() if run["method"] == "muon"]
    assert sorted(run["steps"] for run in runs) == [4, 12]
    main("--search-steps", "2", "--seeds", "0", "--table", "--methods", *now)
    rows = (folder / "table.md").read_text().splitlines()[2:5]
    cells = {row.split("|")[1].strip(): row.split("|") for row in rows}
    assert cells["muon"][6].strip() == "5.00 (adamw 15.00)"
    assert cells["locoprop-s-exact-muon"][6].strip() == "10.00"
    assert [cells[name][8].strip() for name in now] == ["4", "2", "12"]


def test_methods_without_all_trials_are_left_out(
    main: Any,
    examples: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    perform, count = examples["training"].perform, 0

    def performed(task: Any, run: Any, device: str, deadline: float) -> Any:
        nonlocal count
        count += 1
        return perform(task, run, device, 0.0 if count in stopped else deadline)

    monkeypatch.setattr(examples["comparison"], "perform", performed)
    own = ("--search-steps", "2", "--seeds", "0", "--all")
    stopped = {1, 11}  # the first trial of each method
    with pytest.raises(SystemExit, match="Trials of adamw are missing"):
        main(*own)
    stopped = {22}
    folder = main(*own)
    assert "locoprop-s-exact-muon is left out" in capsys.readouterr().out
    assert {run["method"] for run in written(folder / "runs").values()} == {"adamw"}
    main(*own)
    assert len(written(folder / "searches")) == 20
    assert "| locoprop-s-exact-muon |" in (folder / "table.md").read_text()


def test_no_run_starts_that_would_end_after_the_limit(
    main: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = main("--seeds", "0", "--limit", "3")
    assert not (folder / "runs").exists()
    assert "would have ended after the time limit" in capsys.readouterr().out


def test_the_pace_is_that_of_runs_at_the_same_time(
    gpt: Any, examples: dict[str, ModuleType]
) -> None:
    pace = examples["comparison"].Pace()
    run = run_of(gpt, "muon", Path(), examples, steps=100)
    assert pace.seconds(run, 8) == 10  # nothing is known
    pace.alone = {"muon": 0.02}
    assert pace.seconds(run, 1) == pytest.approx(10 + 1.3 * 2)
    assert pace.seconds(run, 8) == pytest.approx(10 + 1.3 * 16)  # as if each had an eighth
    pace.learn(run, {"ms_per_step": 40.0}, 8)  # the host was slow, and not the GPU
    assert pace.seconds(run, 8) == pytest.approx(10 + 1.3 * 4)
    assert pace.seconds(run, 6) == pytest.approx(10 + 1.3 * 3)
    assert pace.seconds(run, 2) == pytest.approx(10 + 1.3 * 2)  # never faster than alone
    pace.learn(run, {"ms_per_step": 24.0}, 8)
    assert pace.seconds(run, 8) == pytest.approx(10 + 1.3 * 4)


def test_results_of_another_task_are_not_mixed_in(
    main: Any, gpt: Any, examples: dict[str, ModuleType]
) -> None:
    folder = main("--seeds", "0")
    other = type(gpt)(gpt.source, context=8)
    run = run_of(gpt, "adamw", folder / "runs", examples, steps=4)
    assert examples["training"].finished(gpt, run)
    with pytest.raises(SystemExit, match="another task"):
        examples["training"].finished(other, run)


def test_a_run_that_diverges_says_so(
    gpt: Any, examples: dict[str, ModuleType], tmp_path: Path, quick: None
) -> None:
    run = run_of(gpt, "adamw", tmp_path, examples, settings={"lr": 1e30})
    record = examples["training"].perform(gpt, run, "cpu")
    assert record["diverged"]
    assert json.loads(run.path.read_text())["final"] == {"step": 4}


SCRIPT = """
import sys
from pathlib import Path

import comparison
import timing
from shakespeare_gpt import ShakespeareGPT

timing.WARM_UP = timing.TURNS = timing.TURN = 1

if __name__ == "__main__":
    options = comparison.parser("", steps=2).parse_args()
    comparison.main(ShakespeareGPT(Path("text.txt"), layers=1, width=8, context=8), options)
"""


def test_runs_share_the_machine(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--processes", "2", "--seeds", "0", "1", "--methods", "adamw", "--out", "out", *CPU]
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parent / "src")])
    done = subprocess.run(
        [sys.executable, "script.py", *options],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=100,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "Traceback" not in done.stderr  # all processes have ended
    assert len(written(tmp_path / "out/runs")) == 2
    assert "| adamw | lr 0.002 |" in (tmp_path / "out/table.md").read_text()
