"""The command line: output, files and errors of `train`, `compare` and `datasets`."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.study import methods
from torch_locoprop.study.cli import exit_codes, main, run_session, shared
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training import progress
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.run_result import RunResult, result_of

TINY = ["--model", "12-8-3", "--epochs", "2", "--batch-size", "20", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every data set is a tiny one, and the current folder is empty."""
    images = torch.rand(60, 12, generator=torch.Generator().manual_seed(1))

    def load(name: str, data_dir: Path | None = None, **_: Any) -> Dataset:
        if name not in datasets.NAMES:
            raise ValueError(f"Invalid name={name!r}.")
        return Dataset(name, images[:40], images[40:], str(data_dir))

    monkeypatch.setattr(datasets, "load", load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_LOCOPROP_DATA", raising=False)
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "debian")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_train_makes_a_run_in_a_folder_of_its_own(run: Any) -> None:
    code, out, err = run("train", *TINY)
    assert code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("curves-12-8-3-locoprop-m-")
    assert out.startswith("locoprop-m: train loss ")
    assert str(folder) in out
    lines = [line for line in err.splitlines() if line.startswith("locoprop-m ")]
    assert [line.split()[2] for line in lines] == ["0/2", "1/2", "2/2"]
    assert f"train {result_of(folder).metrics[-1].train_loss:.2f}" in lines[-1]


def test_options_reach_the_configuration(run: Any) -> None:
    options = {
        "--method": "proxprop",
        "--dataset": "mnist",
        "--model": "12-5",
        "--transfer": "relu",
        "--epochs": "3",
        "--batch-size": "7",
        "--warmup-epochs": "1",
        "--weight-decay": "0.01",
        "--seed": "9",
        "--schedule": "linear",
        "--device": "cpu",
        "--out": "there",
    }
    flat = [word for pair in options.items() for word in pair]
    given = ["--set", "solver=adam", "--set", "lr=1e-3", "--set", "regularizer=null"]
    code, out, err = run("train", *flat, *given, "--quiet", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["finished"] is True
    assert result["epoch"] == 3
    assert result["settings_from"] == "given"
    assert result["data"].keys() == {"name", "source", "fingerprint"}
    config = result["config"]
    assert config == result_of("there").config.to_dict()
    for name, value in options.items():
        if name != "--out":
            assert str(config[name.removeprefix("--").replace("-", "_")]) == value
    settings = config["settings"]
    assert (settings["solver"], settings["lr"], settings["regularizer"]) == ("adam", 1e-3, None)


def test_resume_needs_only_the_folder(run: Any) -> None:
    run("train", *TINY, "-m", "adam", "--out", "there")
    lines = Path("there/metrics.jsonl").read_text()
    code, _, err = run("train", *TINY, "-m", "adam", "--out", "there")
    assert code == 1
    assert "there already has a run" in err
    code, out, err = run("train", "--resume", "--out", "there")
    assert code == 0
    assert "there is already finished" in err
    assert out.startswith("adam: ")
    assert Path("there/metrics.jsonl").read_text() == lines
    code, _, err = run("train", "--resume", "--out", "there", "--seed", "3")
    assert code == 1
    assert "seed is 0 there and 3 here" in err
    assert "finished" not in err
    code, _, err = run("train", "--resume", "--out", "there", "-m", "sgd")
    assert code == 1
    assert "method is 'adam' there and 'sgd' here" in err


def test_resuming_what_is_not_there_says_so(run: Any) -> None:
    code, _, err = run("train", *TINY, "-m", "adam", "--out", "elsewhere", "--resume")
    assert code == 0
    assert "No run to continue in elsewhere; starting a new one." in err
    code, _, err = run("train", *TINY, "-m", "adam", "--out", "elsewhere", "--resume")
    assert "No run" not in err


def test_a_configuration_file_is_a_start_for_others(run: Any) -> None:
    run("train", *TINY, "-m", "adam", "--set", "lr=0.01", "--out", "first")
    code, out, _ = run(
        "train", "--config", "first/config.json", "--seed", "4", "--set", "eps=1e-6", "--json"
    )
    assert code == 0
    first, second = result_of("first").config.to_dict(), json.loads(out)["config"]
    assert second == {**first, "seed": 4, "settings": {**first["settings"], "eps": 1e-6}}
    Path("plain.json").write_text(json.dumps({**first, "seed": 5}))
    assert run("train", "--config", "plain.json", "--json")[0] == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"config": 3}', '{"epoch": 3}'])
def test_a_bad_configuration_file_is_an_error(run: Any, content: str) -> None:
    Path("bad.json").write_text(content)
    code, _, err = run("train", "--config", "bad.json")
    assert code == exit_codes.USAGE
    assert len(err.splitlines()) == 1
    assert err.startswith("bad.json")


def test_a_diverged_run_is_marked(run: Any) -> None:
    code, out, _ = run("train", *TINY, "-m", "sgd", "--set", "lr=1e8", "--warmup-epochs", "0")
    assert code == exit_codes.DIVERGED
    assert out.startswith("sgd diverged in epoch ")
    code, out, _ = run("compare", *TINY, "sgd", "adam", "--set", "sgd.lr=1e8")
    assert code == 0
    assert out.index("adam") < out.index("sgd")
    assert "diverged" in out


def test_compare_ranks_and_reuses(run: Any) -> None:
    code, out, err = run("compare", "adam", "kfac@3", "adam", *TINY, "--set", "adam.lr=1e-2")
    assert code == 0
    assert "curves" in out
    assert len(list(Path("runs").iterdir())) == 2
    assert "already finished" not in err
    code, out, err = run(
        "compare", "adam", "kfac@3", "sgd", *TINY, "--set", "adam.lr=1e-2", "--json"
    )
    assert err.count("already finished") == 2
    results = json.loads(out)
    losses = [result["train_loss"] for result in results]
    assert losses == sorted(losses)
    assert {result["config"]["method"] for result in results} == {"adam", "kfac@3", "sgd"}
    adam = next(result["config"] for result in results if result["config"]["method"] == "adam")
    assert adam["settings"]["lr"] == 1e-2


@pytest.mark.parametrize("columns", ["80", "60", "40"])
def test_methods_keep_their_names_in_a_narrow_terminal(
    run: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = ("locoprop-m", "locoprop-s", "exact-s-muon", "shampoo@100")
    code, out, _ = run("compare", *names, *TINY)
    assert code == 0
    for name in names:
        assert f"│ {name} " in out
        origin = " ".join(out.split("Settings from")[1].split())
        assert f"{name}: {methods.get(name).source}" in origin
    if columns == "80":
        assert "train loss" in out, "not even the headings are broken"


@pytest.mark.usefixtures("own_methods")
def test_a_script_can_bring_a_method_of_its_own(run: Any) -> None:
    def build(model: nn.Module, settings: methods.Settings) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), **settings)

    methods.register(methods.Method("mine", build, {"lr": 1e-3}, "untuned"))
    code, out, _ = run("compare", "mine", "adam", *TINY, "--set", "mine.lr=0.01", "--json")
    assert code == 0
    found = {each["config"]["method"]: each["config"]["settings"] for each in json.loads(out)}
    assert found["mine"] == {"lr": 0.01}
    assert run("train", *TINY, "-m", "mine", "--out", "alone")[1].startswith("mine: train loss ")


def test_datasets_tells_what_is_there(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("datasets")
    assert code == 0
    assert all(name in out for name in datasets.NAMES)
    code, out, _ = run("datasets", "mnist", "--download", "--json")
    assert code == 0
    assert [entry["name"] for entry in json.loads(out)] == ["mnist"]
    code, _, err = run("datasets", "mnits")
    assert code == exit_codes.USAGE
    assert "Unknown data set 'mnits'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-m", "locopro"], "Did you mean 'locoprop-"),
        (["train", "--set", "lr"], "Must be KEY=VALUE"),
        (["train", "--set", "rate=3"], "Unknown setting of locoprop-m 'rate'"),
        (["train", "--set", "lr=-1"], "Invalid lr=-1"),
        (["train", "--set", "lr=fast"], "Invalid lr='fast'"),
        (["train", "--model", "13-2"], "first width must be 12"),
        (["train", "--dataset", "imagenet"], "imagenet"),
        (["train", "--config", "missing.json"], "missing.json: No such file or directory."),
        (["train", "--out", "file/run"], "Choose a folder that you can write to with --out."),
        (["train", "--out=/proc/run"], "Choose a folder that you can write to with --out."),
        (["train", "--config", "file/a.json"], "file/a.json: Not a directory."),
        (["compare", "adam", "--set", "sgd.lr=1"], "sgd is not among the methods"),
        (["train", "-m", "soap"], "torch-locoprop[peers]"),
        (["compare", "adam", "soap"], "torch-locoprop[peers]"),
        (["compare", "adam", "sgd", "--set", "sgd.lr=-1"], "Invalid lr=-1"),
    ],
)
def test_errors_are_one_sentence(
    run: Any, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    Path("file").write_text("")
    tail = [] if "--model" in arguments else TINY
    code, out, err = run(*arguments, *tail)
    elsewhere = "write to" in message or "peers" in message
    assert (code, out) == (exit_codes.FAILED if elsewhere else exit_codes.USAGE, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("runs").exists()


def test_wrong_usage_is_exit_code_two(run: Any) -> None:
    assert run("train", "--nonsense")[0] == 2
    assert run("compare")[0] == 2


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(run: Any) -> None:
    """A limit on the size of files simulates a full disk; a checkpoint of this model is larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        code, _, err = run("train", *TINY, "--out", "there", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert err.startswith("there/checkpoint.pt: ")
    assert err.endswith("Free some space, then continue with --resume.\n")
    assert run("train", "--resume", "--out", "there")[0] == 0
    assert result_of("there").finished


def test_an_unwritable_folder_of_logs_is_one_sentence(run: Any) -> None:
    Path("file").write_text("")
    options = ["--out", "there", "--tensorboard", "file/logs", "--quiet"]
    code, _, err = run("train", *TINY, *options)
    assert code == 1
    assert err.startswith("file/logs")
    assert err.endswith("Choose a folder that you can write to with --tensorboard.\n")


def test_an_unwritable_place_that_nobody_chose_is_one_sentence(run: Any) -> None:
    Path("runs").write_text("")
    code, _, err = run("train", *TINY, "--quiet")
    assert code == 1
    assert err.endswith("Not a directory. Change to a folder that you can write to.\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_sentence(run: Any) -> None:
    Path("closed").mkdir(mode=0o500)
    code, _, err = run("train", *TINY, "--out", "closed/run", "--quiet")
    assert code == 1
    assert "Permission denied. Choose a folder" in err


def test_ctrl_c_says_how_to_go_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        Path("over there").mkdir()
        Path("over there/config.json").write_text("{}")  # the run has begun
        raise KeyboardInterrupt

    monkeypatch.setattr(run_session, "run", interrupted)
    Path("data").mkdir()
    code, _, err = run("train", *TINY, "--out", "over there", "--data-dir", "data")
    assert code == 130
    assert "locoprop train --resume --out 'over there' --data-dir data" in err


def test_ctrl_c_in_a_process(tmp_path: Path) -> None:
    """A real process: a signal within an epoch, and a folder that can be resumed."""
    script = (
        "import torch, sys; from torch_locoprop.study.data import datasets\n"
        "from torch_locoprop.study.cli import main as cli\n"
        "x = torch.rand(60, 12); data = datasets.Dataset('curves', x[:40], x[40:], 'test')\n"
        "datasets.load = lambda *a, **k: data\n"
        "cli.main(sys.argv[1:])\n"
    )
    arguments = ["train", *TINY, "--epochs", "1000000", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=_default_sigint
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 3/" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "--resume" in rest.splitlines()[-1]
    assert "Traceback" not in rest
    assert RunFolder(tmp_path / "run").checkpoint() is not None


def test_help_teaches(run: Any) -> None:
    for command in ("train", "compare", "datasets"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"locoprop {command}" in out
    assert "kfac@10" in run("train", "-h")[1]
    assert "compare" in run()[1]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named(package: str) -> None:
    script = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from torch_locoprop.study.cli.main import main; main(['train'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == exit_codes.FAILED
    assert f"needs the package {package}" in done.stderr
    assert 'pip install "torch-locoprop[study]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_the_commands_are_imported_is_quiet(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    name = "torch_locoprop.study.cli.app"
    monkeypatch.setitem(sys.modules, name, Interrupted(name))
    assert run("train") == (130, "", "")


def test_memory_that_runs_out_is_told_in_a_sentence(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nA second line.")

    monkeypatch.setattr(run_session, "run", full)
    code, _, err = run("train", *TINY, "--out", "there")
    assert code == 1
    assert "Tried to allocate 2 GiB. Use a smaller --batch-size" in err
    assert "second line" not in err


# What a terminal sees -------------------------------------------------------------------------


def metrics(epoch: int) -> Metrics:
    return Metrics(epoch, 100.0 - epoch, 101.0, 1.0, 1.0, False)


def test_a_terminal_gets_a_bar(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=120)
    with progress.watching(console, "adam", 5, quiet=False) as watch:
        watch(metrics(5))
    out = capfd.readouterr().out
    assert "━" in out
    assert "5/5" in out
    assert "train 95.00" in out


def test_a_download_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(name: str, data_dir: Path | None = None, progress: Any = None) -> Dataset:
        progress("file.gz", 10, 100)
        progress("file.gz", 100, 100)
        calls.append(name)
        return Dataset(name, torch.rand(2, 3), torch.rand(2, 3), "")

    monkeypatch.setattr(datasets, "load", load)
    monkeypatch.setattr(
        shared, "Console", lambda **_: Console(force_terminal=True, stderr=True, width=80)
    )
    assert shared.load("mnist", None, quiet=False).name == "mnist"
    assert calls == ["mnist"]


def test_an_error_is_red_on_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main.main(["train", "-m", "nothing"])
    assert "\033[31mUnknown method" in capfd.readouterr().err


def test_a_run_that_has_not_begun_has_a_description_too() -> None:
    result = RunResult(Path("nowhere"), RunConfig("adam"), ())
    assert result.to_dict()["finished"] is False
    assert result.to_dict()["data"] is None


def _default_sigint() -> None:
    """Undo what a shell does to its background jobs, which ignore Ctrl-C, and so would the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
