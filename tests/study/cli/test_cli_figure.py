"""`locoprop figure`: listing, making and reusing figures, and its errors."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from torch_locoprop.study import methods
from torch_locoprop.study.cli import exit_codes
from torch_locoprop.study.figures import catalog, run_jobs
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.training.run_result import result_of

COMMAND = import_module("torch_locoprop.study.cli.figure")  # the package has the function
TASK = {"dataset": "curves", "model": "784-6-3", "batch_size": 20, "epochs": 2}
NEWER = ("soap", "muon", "exact-s-muon", "locoprop-spectral")
PEERS = [word for name in NEWER for word in ("--without", name)]
FEW = [*PEERS, "--without", "locoprop-s", "--without", "kfac@2"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both scales are tiny, and the current folder is empty."""
    small = replace(
        QUICK,
        tasks=dict.fromkeys(QUICK.tasks, TASK),
        renewed=dict.fromkeys(QUICK.renewed, ("kfac@2",)),
        images=(40, 10),
    )
    monkeypatch.setattr(COMMAND, "QUICK", small)
    monkeypatch.setattr(COMMAND, "PROTOCOL", replace(small, note="", threads=None))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(run: Any) -> Any:
    return partial(run, "figure")


def test_without_a_name_it_lists_the_figures(run: Any) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(name in out for name in catalog.NAMES)
    listed = json.loads(run("--json")[1])
    assert [entry["name"] for entry in listed] == list(catalog.NAMES)
    assert not Path("figures").exists()


def test_it_makes_a_figure_and_reuses_its_runs(run: Any) -> None:
    code, out, err = run("relu", "--quick", *FEW)
    assert code == 0
    assert out == "relu: figures/relu.png, figures/relu.pdf, figures/relu.md\n"
    assert "3 runs are missing; they are made in runs." in err
    assert "curves 784-6-3 adam (2 of 3 runs)  epoch 2/2" in err
    pictures = [Path(f"figures/relu.{kind}").read_bytes() for kind in ("png", "pdf", "md")]
    code, out, err = run("relu", "--quick", *FEW, "--json")
    assert (code, err) == (0, "")
    (made,) = json.loads(out)
    assert made["files"] == ["figures/relu.png", "figures/relu.pdf", "figures/relu.md"]
    assert made["missing"] == []
    assert len(made["runs"]) == 3
    assert all(result_of(folder).finished for folder in made["runs"])
    assert [Path(path).read_bytes() for path in made["files"]] == pictures


def test_runs_are_looked_for_where_told_and_new_ones_go_to_the_first(run: Any) -> None:
    run("relu", "--quick", *FEW, "--runs", "old", "--quiet")
    Path("results").mkdir()
    Path("old").rename("results/old")
    code, out, _ = run("relu", "--quick", *FEW, "--json", "--seeds", "0,1", "--quiet")
    assert code == 0
    (made,) = json.loads(out)
    folders = {folder.split("/")[0] for folder in made["runs"]}
    assert folders == {"runs", "results"}
    assert len(made["runs"]) == 6


def test_nothing_to_draw_is_told_and_is_exit_code_one(run: Any) -> None:
    words = ["relu", "costs", "--quick", *FEW, "--only-existing"]
    code, out, err = run(*words, "--runs", "here", "--runs", "there", "--quiet", "--json")
    assert code == 1
    assert [made["files"] for made in json.loads(out)] == [[], []]
    assert err == (
        "Nothing was drawn: none of the runs is in here or there. Leave out "
        "--only-existing to train missing runs, or give the folder of the runs with --runs.\n"
    )
    code, out, err = run(*words, "matching-loss")
    assert code == 0, "one of them was drawn"
    files = ", ".join(f"figures/matching-loss.{kind}" for kind in ("png", "pdf", "md"))
    assert out == f"matching-loss: {files}\n"
    assert "relu: none of its runs exists, so it is not drawn." in err


def test_tuned_settings_and_epochs_reach_the_runs(run: Any) -> None:
    tuned = {"config": {**TASK, "method": "adam", "settings": {"lr": 0.123}}}
    other = {"config": {**TASK, "method": "rmsprop", "settings": {"lr": 0.5}, "model": "784-7-3"}}
    steps = {"config": {**TASK, "method": "locoprop-m", "settings": {"gamma": 3.0}}}
    words = []
    for name, content in (("adam", tuned), ("other", other), ("steps", steps)):
        Path(f"{name}.json").write_text(json.dumps(content))
        words += ["--config", f"{name}.json"]
    code, out, err = run("relu", "s-vs-m", "--quick", *FEW, *words, "--epochs", "1", "--json")
    assert code == 0
    assert "No line uses the settings of rmsprop for curves." in err
    relu, by_steps = (
        [result_of(folder).config for folder in made["runs"]] for made in json.loads(out)
    )
    assert {config.epochs for config in relu} == {1}
    rates = {config.method: config.settings["lr"] for config in relu}
    assert rates["adam"] == 0.123
    assert rates["rmsprop"] == methods.get("rmsprop").quick["lr"]
    assert {(c.settings["gamma"], c.settings["local_steps"]) for c in by_steps} == {
        (3.0, steps) for steps in (1, 5, 10, 50)
    }


def test_all_makes_every_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_locoprop.study.figures.costs.PAPER", ("sgd", "adam"))
    monkeypatch.setattr("torch_locoprop.study.figures.costs.LEAST_SECONDS", 0.0)
    words = [*PEERS, "--without", "kfac@2", "--epochs", "1"]
    code, out, _ = run("all", "--quick", *words, "--quiet")
    assert code == 0
    for name in catalog.NAMES:
        for kind in ("png", "pdf"):
            assert Path(f"figures/{name}.{kind}").stat().st_size > 5000
    assert "| BackProp (SGD) |" in out
    assert Path("figures/costs.md").read_text().startswith("| method |")


def test_ctrl_c_says_how_to_go_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_jobs, "run", interrupted)
    code, _, err = run("relu", "--quick", *FEW)
    assert code == 130
    assert err.endswith("Interrupted. Give the same command again to continue.\n")


def test_a_failed_run_is_told_and_is_exit_code_one(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(run_jobs, "run", failing)
    code, out, err = run("relu", "--quick", *FEW)
    assert (code, out) == (1, "")
    assert "adam failed: no memory" in err


def test_a_full_disk_says_how_to_go_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/checkpoint.pt")

    monkeypatch.setattr(run_jobs, "run", full)
    code, _, err = run("relu", "--quick", *FEW, "--quiet")
    assert code == 1
    assert err == (
        "runs/a/checkpoint.pt: No space left on device. "
        "Free some space, then give the same command again.\n"
    )


def test_a_run_that_fails_is_told_even_quietly(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no way")

    monkeypatch.setattr(run_jobs, "run", failing)
    code, _, err = run("relu", "--quick", *FEW, "--quiet")
    assert code == 1
    assert "curves 784-6-3 adam failed: no way\n" in err


def test_a_method_is_added_to_a_figure(run: Any) -> None:
    code, out, err = run("relu", "--quick", *FEW, "--with", "adamw", "--json")
    assert code == 0
    (made,) = json.loads(out)
    found = [result_of(folder).config.method for folder in made["runs"]]
    assert sorted(found) == ["adam", "adamw", "locoprop-m", "rmsprop"]
    code, _, err = run("costs", "--quick", "--with", "adamw")
    assert code == exit_codes.USAGE
    assert "--with adds methods to first-order, standard" in err


def test_without_matplotlib_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from torch_locoprop.study.cli import main; main.main(['figure', 'matching-loss'])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "The command line needs the package matplotlib, which is not installed. "
        'Install it with: pip install "torch-locoprop[study]".\n'
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["relo"], "Did you mean 'relu'?"),
        (["relu", "--without", "shampo@1"], "Did you mean 'shampoo'?"),
        (["relu", "--seeds", "0,x"], "Invalid --seeds '0,x'"),
        (["relu", "--device", "cpu", "--precision", "tf32"], "precision='tf32' needs a GPU"),
        (["relu", "--device", "tpu"], "Unknown device 'tpu'"),
        (["relu", "--config", "missing.json"], "missing.json: No such file"),
        (["matching-loss", "--out", "file/figures"], "that you can write to with --out."),
        (["relu", "--quick", "--runs", "file/runs", "--quiet"], "can write to with --runs."),
    ],
)
def test_errors_are_one_sentence(run: Any, arguments: list[str], message: str) -> None:
    Path("file").write_text("")
    code, out, err = run(*arguments)
    code_of = exit_codes.FAILED if "write to" in message else exit_codes.USAGE
    assert (code, out) == (code_of, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_command_in_the_footer_has_no_path_of_this_machine() -> None:
    words = COMMAND._command(
        True, [Path("/a/b/best.json")], ["adamw"], ["soap"], 3, "0,1", "cuda", "tf32"
    )
    assert words == (
        "locoprop figure NAME --quick --config best.json --with adamw --without soap --epochs 3 "
        "--device cuda --precision tf32 --seeds 0,1"
    )


def test_the_paper_is_the_default_scale(run: Any) -> None:
    assert PROTOCOL.tasks["wide"] == {"dataset": "mnist", "model": "wide"}
    code, out, err = run("relu", "--only-existing")
    assert (code, out) == (1, "")
    assert "quick" not in err
