"""The byte-level GPT: its data from installed packages, its model, and runs that go on after a stop."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
MODULES = (
    *("arguments", "muon", "training", "timing", "methods", "comparison"),
    *("next_token", "package_bytes", "equal_loss", "byte_gpt"),
)
METHODS = ("adamw", "muon", "soap", "locoprop-spectral", "locoprop")


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """Import the modules of the examples from their folder, as a script there would."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path[:] = before
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture
def quick(examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timings, and few evaluations."""
    monkeypatch.setattr(examples["timing"], "WARM_UP", 1)
    monkeypatch.setattr(examples["timing"], "TURNS", 1)
    monkeypatch.setattr(examples["timing"], "TURN", 2)
    monkeypatch.setattr(examples["timing"], "own_process", examples["timing"].InProcess)
    monkeypatch.setattr(examples["training"], "POINTS", 4)


# ---- the data -----------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """Return two folders of packages: 60 different text files of 90 to 104 bytes, and other files."""
    folders = [tmp_path / "library", tmp_path / "library" / "site-packages"]
    for place, folder in enumerate(folders):
        for i in range(30):
            package = folder / f"package{i % 3}"
            package.mkdir(parents=True, exist_ok=True)
            line = f"name_{place}_{i} = {i * 7919 % 1000}\n"
            suffix = ("py", "md", "rst", "txt", "pyi")[i % 5]
            (package / f"file{i}.{suffix}").write_text(line * (90 // len(line) + 1))
        cache = folder / "package0" / "__pycache__"
        cache.mkdir()
        (cache / "kept_out.py").write_text("from a cache\n")
        (folder / "package0" / "kept_out.so").write_text("no text\n")
        (folder / "package0" / "large.txt").write_bytes(b"large\n" * 2**16)
        (folder / "package0" / "empty.py").touch()
        (folder / "package0" / "nowhere.py").symlink_to("missing.py")
        (folder / "package1" / f"copy{place}.py").write_text("the same text\n" * 7)
    return folders


def collected(
    examples: dict[str, ModuleType], folder: Path, packages: list[Path], train: int, held_out: int
) -> Any:
    return examples["package_bytes"].collect(folder, train, held_out, packages)


def parts(data: Any) -> tuple[list[bytes], list[bytes]]:
    """Return the files for training and the held-out ones."""
    content = data.path.read_bytes()
    train, held_out = content[: data.train], content[data.train :]
    return train.split(b"\0"), held_out.split(b"\0")


def test_the_data_are_whole_files_in_one_part_each(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    data = collected(examples, tmp_path, packages, 4000, 1000)
    train, held_out = parts(data)
    paths = [path for path in packages[0].rglob("*") if path.is_file()]
    known = {path.read_bytes() for path in paths} - {b""}
    *whole, cut = train
    assert set(whole) <= known
    assert any(each.startswith(cut) for each in known)
    *held, held_cut = held_out
    assert set(held) <= known
    assert not set(train) & set(held_out)
    assert not any(each.startswith(held_cut) for each in whole)  # no rest of it either
    assert len(set(whole)) == len(whole) > 30
    assert not any(word in b"".join(train + held_out) for word in (b"cache", b"no text", b"large"))
    files, packages_found = data.description["files"], data.description["packages"]
    assert files == {"train": len(train), "held_out": len(held_out)}
    assert sum(packages_found.values()) == 5000
    assert set(packages_found) == {"package0", "package1", "package2"}


def test_the_data_do_not_depend_on_the_place_or_the_order_of_files(
    examples: dict[str, ModuleType],
    packages: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = collected(examples, tmp_path / "first", packages, 4000, 1000)
    moved = tmp_path / "elsewhere"
    packages[0].rename(moved)
    walk = os.walk

    def backwards(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, below, names in walk(folder):
            below.sort(reverse=True)
            yield place, below, sorted(names, reverse=True)

    monkeypatch.setattr(examples["package_bytes"].os, "walk", backwards)
    places = [moved, moved / "site-packages"]
    second = collected(examples, tmp_path / "second", places, 4000, 1000)
    assert second.path.read_bytes() == first.path.read_bytes()
    assert second.sha256 == first.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()


def test_collected_bytes_are_kept(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    first = collected(examples, tmp_path, packages, 4000, 1000)
    (packages[0] / "package0" / "file0.py").write_text("changed\n")
    assert collected(examples, tmp_path, packages, 4000, 1000) == first
    assert collected(examples, tmp_path, packages, 3000, 1000).sha256 != first.sha256
    first.path.with_suffix(".json").unlink()  # as if it was stopped between the two files
    assert collected(examples, tmp_path, packages, 4000, 1000).path == first.path
    assert not list(tmp_path.glob("*.part"))


def test_bytes_are_read_as_they_are(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    data = collected(examples, tmp_path, packages, 400, 100)
    found = examples["package_bytes"].read(data.path, data.sha256)
    assert found.dtype == torch.uint8
    assert bytes(found.tolist()) == data.path.read_bytes()
    data.path.write_bytes(data.path.read_bytes()[:-1] + b"!")
    with pytest.raises(SystemExit, match=f"{data.path} has the SHA-256 .* it was changed"):
        examples["package_bytes"].read(data.path, data.sha256)


def test_too_few_bytes_are_counted(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    data = collected(examples, tmp_path, packages, 5000, 500)
    *whole, _ = parts(data)[0]
    with pytest.raises(SystemExit, match=r"bytes of text in 61 .* 90500 are needed") as refused:
        collected(examples, tmp_path, packages, 90000, 500)
    everything = {path.read_bytes() for path in packages[0].rglob("*") if path.is_file()}
    texts = [each for each in everything if each.startswith((b"name_", b"the same"))]
    assert set(whole) <= set(texts)
    count = re.search(r"have (\d+) bytes", str(refused.value))
    assert count is not None
    # The last held-out file is cut, and its rest is not used.
    assert 0 <= sum(len(each) + 1 for each in texts) - int(count[1]) < max(map(len, texts))
    assert "--train-bytes" in str(refused.value)
    assert not list(tmp_path.glob("train=90000*"))


def test_the_packages_are_those_of_this_interpreter(examples: dict[str, ModuleType]) -> None:
    folders = examples["package_bytes"].package_folders()
    assert len(set(folders)) == len(folders)
    assert any(Path(os.__file__).parent == folder for folder in folders)
    assert any(Path(torch.__file__).parents[1] == folder for folder in folders)


# ---- the model ----------------------------------------------------------------------------------


def test_a_prediction_depends_on_the_bytes_before_alone(examples: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    model = examples["byte_gpt"].GPT(layers=2, width=128, context=12).double()
    text = torch.randint(256, (3, 12))
    changed = text.clone()
    changed[:, 7] = (text[:, 7] + 1) % 256
    before, after = model(text), model(changed)
    assert before.shape == (3, 12, 256)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-12)
    assert (after[:, 7:] != before[:, 7:]).any(dim=-1).all()
    torch.testing.assert_close(model(text[:, :5]), before[:, :5], rtol=0, atol=1e-12)


def test_the_model_has_19_million_parameters_and_the_loss_of_chance(
    examples: dict[str, ModuleType],
) -> None:
    task = examples["byte_gpt"].ByteGPT(None)
    with torch.device("meta"):
        model = examples["byte_gpt"].GPT(task.layers, task.width, task.context)
    blocks, others = 6 * 12 * 512**2, (256 + 512 + 256) * 512
    assert sum(p.numel() for p in model.parameters()) == blocks + others + (2 * 6 + 1) * 512
    torch.manual_seed(0)
    small = examples["byte_gpt"].GPT(layers=2, width=64, context=16)
    logits, labels = small(torch.randint(256, (8, 16))), torch.randint(256, (8, 16))
    loss = torch.nn.functional.cross_entropy(logits.detach().flatten(0, 1), labels.flatten())
    assert float(loss) == pytest.approx(math.log(256), abs=0.05)


# ---- runs ---------------------------------------------------------------------------------------

TINY = (
    *("--device", "cpu", "--layers", "1", "--width", "64", "--context", "16", "--batch-size", "4"),
    *("--train-bytes", "4000", "--held-out-bytes", "1000", "--steps", "8"),
)


@pytest.fixture
def main(
    examples: dict[str, ModuleType],
    packages: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
) -> Callable[..., Path]:
    """Run the command on a tiny model with three trials; return the folder of results."""
    monkeypatch.setattr(examples["package_bytes"], "package_folders", lambda: packages)
    out = tmp_path / "out"

    def run(*arguments: str) -> Path:
        folders = ("--out", str(out), "--data-dir", str(tmp_path / "data"))
        examples["byte_gpt"].main([*TINY, *folders, "--trials", "3", *arguments])
        return out

    return run


def written(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def tiny_task(examples: dict[str, ModuleType], packages: list[Path], folder: Path) -> Any:
    data = collected(examples, folder, packages, 4000, 1000)
    sizes = {"layers": 1, "width": 64, "context": 16, "batch_size": 8}
    own = {"train_bytes": data.train, "held_out_bytes": data.held_out, "sha256": data.sha256}
    return examples["byte_gpt"].ByteGPT(data.path, **sizes, **own)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path, method: str
) -> None:
    task = tiny_task(examples, packages, tmp_path)
    assert set(METHODS) == set(task.methods)
    run = examples["training"].Run(method, task.methods[method].settings, 0, 60, tmp_path)
    training = examples["training"].Training(task, run, "cpu")
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    first = float(training.advance(5))
    training.advance(50)
    last = float(training.advance(5))
    assert last < 0.7 * first
    moved = {n for n, p in training.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before)
    if isinstance(training.optimizer, examples["methods"].LocoProp):
        assert len(training.optimizer.skipped_updates) == 6  # the layers of the block
        assert not any(training.optimizer.skipped_updates.values())


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_shrink_weights_alike_and_share_the_rate_of_adamw(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path, method: str
) -> None:
    task = tiny_task(examples, packages, tmp_path)
    rate = task.methods[method].settings["lr"]
    run = examples["training"].Run(method, task.methods[method].settings, 0, 60, tmp_path)
    training = examples["training"].Training(task, run, "cpu")
    rates = {}
    for group in training.optimizer.param_groups:
        lr = group["initial_lr"]
        rates |= dict.fromkeys(group["params"], lr)
        if all(p.dim() < 2 for p in group["params"]):
            assert not group["weight_decay"]
        else:
            assert lr * group["weight_decay"] == pytest.approx(1e-4)
    for name, p in training.model.named_parameters():
        inner = name.startswith("blocks.") and p.dim() == 2
        assert rates[p] == (rate if inner or method == "adamw" else 2e-3)


def test_methods_try_equally_many_rates(examples: dict[str, ModuleType]) -> None:
    """The last two rates are below a best one that is the lowest of three, else on both sides of it."""
    lowest_is_best = {"adamw": True, "muon": False, "soap": False}
    lowest_is_best |= {"locoprop-spectral": True, "locoprop": True}
    for name, method in examples["byte_gpt"].METHODS.items():
        trials = method.trials()
        assert trials[0] == method.settings
        first = sorted(trial["lr"] for trial in trials[:3])
        every = sorted(trial["lr"] for trial in trials)
        assert len(every) == 5
        factors = [b / a for a, b in itertools.pairwise(every)]
        if lowest_is_best[name]:
            assert every[2:] == first
            assert factors == pytest.approx([2] * 4, rel=0.01)
        else:
            assert every[::2] == first
            assert factors == pytest.approx([2**0.5] * 4, rel=0.02)


RESULTS = FOLDER.parent / "results" / "examples" / "byte-gpt"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
def test_the_readme_has_the_table_of_the_runs(
    examples: dict[str, ModuleType], tmp_path: Path
) -> None:
    folder = shutil.copytree(RESULTS, tmp_path / "byte-gpt")
    kept = (folder / "table.md").read_text()
    examples["byte_gpt"].main(["--table", "--out", str(folder)])
    made = (folder / "table.md").read_text()
    assert made == kept
    assert made in (FOLDER / "README.md").read_text()


def test_validation_and_test_are_different_windows(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    task = tiny_task(examples, packages, tmp_path)
    data = task.load(torch.device("cpu"))
    held_out = list(collected(examples, tmp_path, packages, 4000, 1000).path.read_bytes()[4000:])
    found = {tuple(x.tolist()): part for part in data.held_out for x in data.held_out[part][0]}
    windows = [tuple(held_out[i : i + 16]) for i in range(0, 62 * 16, 16)]
    assert set(windows) == set(found)
    assert [found[window] for window in windows[:9]] == ["validation", *7 * ["test"], "validation"]
    inputs, labels = data.held_out["test"]
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_a_comparison_and_its_table(
    main: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = main("--seeds", "0", "1", "--methods", "adamw", "muon")
    runs = written(folder / "runs")
    assert len(runs) == 2 * (3 + 1)
    sha256 = json.loads((folder / "task.json").read_text())["data"]["sha256"]
    timings = written(folder)["timings.json"]["methods"]
    rows = (folder / "table.md").read_text().splitlines()
    for method, row in zip(("adamw", "muon"), rows[2:4], strict=True):
        own = [run for run in runs.values() if run["method"] == method]
        assert {run["task"]["sha256"] for run in own} == {sha256}
        trials = [run for run in own if run["seed"] == 0]
        best = min(trials, key=lambda run: run["final"]["validation loss"])
        (other,) = (run for run in own if run["seed"] == 1)
        assert other["settings"] == best["settings"]
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[0] == method
        assert f"lr {best['settings']['lr']:g}" in cells[1]
        assert cells[2] == "3"
        for cell, part in zip(cells[3:5], ("validation loss", "test loss"), strict=True):
            assert cell == ", ".join(f"{run['final'][part]:.4f}" for run in (best, other))
        assert cells[5] == f"{timings[method]['ms_per_step']:.2f}"
    assert "| 8, 8 |" in rows[2]  # AdamW has its own loss at the end
    for run in runs.values():
        assert [point["step"] for point in run["curve"]] == [2, 4, 6, 8]
        seconds = [point["seconds"] for point in run["curve"]]
        assert seconds == sorted(seconds)
        assert all(set(point) & {"test loss"} == set() for point in run["curve"])
        assert "test loss" in run["final"]
        assert all(round(value, 6) == value for value in run["final"].values())
    assert "\n".join(rows) in capsys.readouterr().out


def test_an_interrupted_comparison_goes_on(
    main: Callable[..., Path],
    examples: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ("--seeds", "0", "1", "--methods", "adamw", "muon")
    folder = main(*own, "--minutes", "0")
    assert not (folder / "runs").exists()
    assert "6 runs would have ended after the time limit" in capsys.readouterr().out
    perform, made = examples["training"].perform, []

    def performed(task: Any, run: Any, *others: Any) -> Any:
        made.append(run.path.name)
        if len(made) == 5:  # the deadline comes in the fifth run, a trial
            return perform(task, run, "cpu", 0.0)
        return perform(task, run, *others)

    monkeypatch.setattr(examples["comparison"], "perform", performed)
    main(*own)
    printed = capsys.readouterr().out
    assert "stopped at the limit: 1. Run the same command again" in printed
    assert "| 2 of 3 |" in printed
    stopped = made[4].split("-")[0]
    kept = {path: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}
    assert len(kept) == len(made) - 1 == 6  # five trials, and a seed of the other method
    made.clear()
    main(*own)
    assert len(made) == 2  # the sixth trial, and a seed of its method
    assert all(name.startswith(stopped) for name in made)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not list(folder.rglob("*.part"))
    made.clear()
    main(*own)
    assert not made


def test_the_table_needs_files_alone(
    main: Callable[..., Path], examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="No results in"):
        main("--table")
    own = ("--seeds", "0", "--methods", "adamw", "muon")
    folder = main(*own)
    table = (folder / "table.md").read_text()
    (folder / "table.md").unlink()
    for module, name in (("package_bytes", "collect"), ("package_bytes", "read")):
        monkeypatch.setattr(examples[module], name, None)
    monkeypatch.setattr(examples["training"].Training, "advance", None)
    own = ("--out", str(folder), "--steps", "8", "--trials", "3", *own)
    examples["byte_gpt"].main(["--table", "--device", "cuda", *own])  # of any size, on any machine
    assert (folder / "table.md").read_text() == table
    examples["byte_gpt"].main(["--table", *own, "--seeds", "0", "1"])
    row = (folder / "table.md").read_text().splitlines()[2]
    assert "| 8, – |" in row


def test_results_of_other_data_are_not_mixed_in(
    main: Callable[..., Path], packages: list[Path], tmp_path: Path
) -> None:
    own = ("--seeds", "0", "--methods", "adamw", "--trials", "1")
    folder = main(*own)
    for path in packages[0].rglob("file*.py"):
        path.write_text(path.read_text() + "# one more line\n")
    main(*own)  # the collected bytes are still there
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    with pytest.raises(SystemExit, match=f"{folder} has results of another task.* --out"):
        main(*own)
    with pytest.raises(SystemExit, match="another task"):
        main(*own, "--context", "8")


def test_steps_to_equal_loss(examples: dict[str, ModuleType]) -> None:
    def run(*losses: float, diverged: bool = False) -> Any:
        curve = [{"step": 10 * (i + 1), "validation loss": loss} for i, loss in enumerate(losses)]
        return {"diverged": diverged, "curve": curve, "final": curve[-1]}

    steps_to, adamw = examples["equal_loss"].steps_to, run(4.0, 3.0, 2.5, 2.0)
    assert steps_to(adamw, adamw) == 40
    assert steps_to(run(3.0, 2.2, 1.8, 1.5), adamw) == pytest.approx(25)
    assert steps_to(run(1.9, 1.8, 1.7, 1.6), adamw) == 10
    assert steps_to(run(4.0, 3.0, 2.6, 2.1), adamw) == "not reached"
    assert steps_to(run(4.0, diverged=True), adamw) == "diverged"
    assert steps_to(None, adamw) == steps_to(adamw, None) == "–"
    assert steps_to(adamw, run(4.0, diverged=True)) == "–"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "100"), "must be a multiple of 64, not 100"),
        (("--trials", "6"), "must be at most 5, not 6"),
        (("--trials", "0"), "must be at least 1, not 0"),
    ],
)
def test_unusable_options_are_refused(
    main: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_too_few_bytes_for_a_window_are_said_at_once(main: Callable[..., Path]) -> None:
    with pytest.raises(SystemExit, match="1000 held out are too few for windows of 512 bytes"):
        main("--context", "512")


def test_the_command_makes_runs_in_other_processes(
    examples: dict[str, ModuleType], packages: list[Path], tmp_path: Path
) -> None:
    collected(examples, tmp_path / "data", packages, 4000, 1000)
    own = ("--methods", "adamw", "--trials", "1", "--seeds", "0", "--processes", "2")
    folders = ("--out", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data"))
    subprocess.run(
        [sys.executable, str(FOLDER / "byte_gpt.py"), *TINY, *own, *folders],
        check=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent / "src")},
        timeout=100,
    )
    assert len(written(tmp_path / "out/runs")) == 1
    assert "| adamw | lr 0.00" in (tmp_path / "out/table.md").read_text()
