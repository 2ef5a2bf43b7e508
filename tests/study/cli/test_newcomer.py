"""What a newcomer meets: hints, estimates, exit codes, completion, and runs that were interrupted."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console

from torch_locoprop.study import cli, methods
from torch_locoprop.study.cli import exit_codes, run_session, tables
from torch_locoprop.study.data import datasets
from torch_locoprop.study.training import progress, runner
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.run_result import RunResult, result_of

ROOT = Path(__file__).parents[3]
TASK = ["--model", "12-8-3", "--epochs", "4", "--batch-size", "15", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _tiny_data_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: tiny.data())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send_in_step(patch: pytest.MonkeyPatch, number: int, kind: signal.Signals) -> None:
    """Send a signal within the step of this number."""
    own, count = runner._Training._step, 0

    def step(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(kind)
        own(*arguments)

    patch.setattr(runner._Training, "_step", step)


# Threads --------------------------------------------------------------------------------------


def spincount(**given: str) -> str | None:
    """Return GOMP_SPINCOUNT at the moment at which the installed command imports torch."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["locoprop"]
    module, _, function = entry.partition(":")
    script = (
        "import os, sys\n"
        "class Probe:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print('at import', os.environ.get('GOMP_SPINCOUNT'))\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Probe())\n"
        f"from {module} import {function} as command\n"
        "sys.argv = ['locoprop', '--version']; command()\n"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert second.startswith("torch-locoprop ")
    found = first.removeprefix("at import ")
    return None if found == "None" else found


def test_threads_wait_only_briefly_where_the_user_has_not_chosen() -> None:
    assert spincount() == "1000"
    assert spincount(GOMP_SPINCOUNT="7") == "7"
    assert spincount(OMP_WAIT_POLICY="active") is None


# The demo -------------------------------------------------------------------------------------


def test_the_demo_needs_no_more_than_its_extra(tmp_path: Path) -> None:
    """Packages of other extras cannot be imported, and the Makefile installs the extra alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not any("torch-locoprop" in each for each in extras["demo"])
    others = ("study", "report", "tensorboard", "frameworks", "peers")
    named = {re.split(r"[\[>]", each)[0] for extra in others for each in extras[extra]}
    hidden = sorted(named - {"torch-locoprop"})
    assert {"scipy", "optuna", "plotly"} <= set(hidden)
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        "from torch_locoprop.study.demo.run import main\n"
        "from pathlib import Path\n"
        f"main(epochs=1, images=8, seed=0, out=Path({str(tmp_path)!r}, 'd.png'))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert (tmp_path / "d.png").is_file()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(DEMO\)", makefile, re.MULTILINE)
    assert re.search(r"^\$\(DEMO\):.*\n.*\n.*\"\.\[demo\]\"$", makefile, re.MULTILINE)


# Readable commands ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(Path(cli.__path__[0]).glob("*.py")), ids=lambda p: p.stem)
def test_no_function_of_the_command_is_longer_than_seventy_lines(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, node.name


# Methods --------------------------------------------------------------------------------------


def test_a_method_is_shown_with_settings_defaults_origin_and_space(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run("methods", "locoprop-s")
    assert code == 0
    assert out.startswith("locoprop-s (LocoProp-S)")
    assert re.search(r"gamma +│ 161.7 +│ 10,100,500,1000", out)
    assert f"Defaults: {methods.get('locoprop-s').source}." in out
    (found,) = json.loads(run("methods", "locoprop-s", "--json")[1])
    assert found["settings"]["gamma"] == 161.7
    assert found["settings_from"] == methods.get("locoprop-s").source
    assert found["space"]["lr"] == {"log": [1e-07, 0.1]}
    monkeypatch.setattr(methods.Method, "missing_package", "needs that")
    assert "The method needs that." in run("methods", "adam")[1]


# Completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("locoprop tr", {"train"}),
        ("locoprop train --method locoprop-", {"locoprop-m", "locoprop-s", "locoprop-spectral"}),
        ("locoprop train --method adam --set m", {"momentum="}),
        ("locoprop train --method nothing --set m", set()),
        ("locoprop train --set local_st", {"local_steps="}),
        ("locoprop compare adam sgd --set sgd.", {"sgd.lr="}),
        ("locoprop compare nothing sgd --set sgd.", {"sgd.lr="}),
        ("locoprop compare rms", {"rmsprop"}),
        ("locoprop train --dataset fash", {"fashion-mnist"}),
        ("locoprop train --model sta", {"standard"}),
        ("locoprop train --schedule pa", {"paper"}),
        ("locoprop figure matc", {"matching-loss"}),
        ("locoprop datasets mn", {"mnist"}),
        ("locoprop methods kf", {"kfac"}),
        ("locoprop train --restar", {"--restart"}),
    ],
)
def test_the_shell_completes(
    run: Any, monkeypatch: pytest.MonkeyPatch, line: str, found: set[str]
) -> None:
    monkeypatch.setenv("_LOCOPROP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    code, out, _ = run()
    assert code == 0
    assert set(out.split()) == found


def test_the_shell_can_be_set_up(run: Any) -> None:
    assert "--install-completion" in run("--help")[1]
    assert "--show-completion" in run("--help")[1]


# Estimates ------------------------------------------------------------------------------------


def test_the_time_that_is_left_comes_from_this_process_alone() -> None:
    now = 100.0
    left = progress.TimeLeft(lambda: now)
    assert left(6, 10) == "", "a resumed run begins at epoch 6"
    now = 130.0
    assert left(7, 10) == "90 s left"
    now = 1000.0
    assert left(9, 10) == "5 min left"
    assert left(10, 10) == ""
    assert progress.as_time(99.4) == "99 s"
    assert progress.as_time(7500) == "2 h 05 min"
    assert progress.as_time(3.5 * 86400) == "3.5 days"


def test_bars_and_lines_show_the_time_that_is_left(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.TimeLeft.__init__, "__defaults__", (lambda: now,))
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=140)
        with progress.watching(console, "adam", 5, quiet=False) as watch:
            for epoch in range(2):
                watch(Metrics(epoch, 1.0, 1.0, 1.0, 1.0, False))
                now += 20
        assert "80 s left" in capfd.readouterr().out


# After a comparison ---------------------------------------------------------------------------


def test_compare_says_where_the_runs_are_and_what_is_next(run: Any) -> None:
    code, out, _ = run("compare", "adam", "sgd", *TASK, "--out", "over there", "--quiet")
    assert code == 0
    ranked = json.loads(
        run("compare", "adam", "sgd", *TASK, "--out", "over there", "--quiet", "--json")[1]
    )
    lines = out.splitlines()
    start = lines.index("Runs, in the order of the table:")
    assert [line.strip() for line in lines[start + 1 : start + 3]] == [
        each["folder"] for each in ranked
    ]
    assert "locoprop report 'over there'    #" in out
    last = ranked[-1]["config"]["method"]
    same_task = "--model 12-8-3 --epochs 4 --batch-size 15"
    assert f"locoprop tune -m {last} {same_task}    #" in out


def test_memory_is_shown_on_a_gpu_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU only the memory of the whole process is known."""
    row = Metrics(4, 1.0, 1.0, 1.0, 12345.0, False)
    for device in ("cpu", "cuda"):
        config = RunConfig("adam", device=device)
        table = tables.ranking([RunResult(Path("there"), config, (row,))])
        Console(width=120).print(table)
        out = capfd.readouterr().out
        assert ("memory" in out, "12345" in out) == (device == "cuda",) * 2


# The first epoch ------------------------------------------------------------------------------


def test_the_first_epoch_at_rate_zero_is_explained_once(run: Any) -> None:
    """The paper's schedule stays, so that results can be made again."""
    _, _, err = run("compare", "adam", "sgd", *TASK)
    assert err.count(run_session.RATE_ZERO) == 1
    first, second = (row.train_loss for row in result_of(next(Path("runs").iterdir())).metrics[:2])
    assert first == second
    for words in (["--schedule", "linear"], ["--warmup-epochs", "0"], ["--quiet", "--seed", "1"]):
        code, _, err = run("train", "-m", "adam", *TASK, *words)
        assert code == 0
        assert run_session.RATE_ZERO not in err


# Interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "word", "code"),
    [
        (signal.SIGINT, "Interrupted", exit_codes.INTERRUPTED),
        (signal.SIGTERM, "Terminated", exit_codes.TERMINATED),
    ],
)
def test_a_signal_saves_a_checkpoint_and_resume_says_from_where(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals, word: str, code: int
) -> None:
    run("train", *TASK, "--out", "whole", "--quiet")
    with monkeypatch.context() as patch:
        send_in_step(patch, 5, kind)
        found, _, err = run("train", *TASK, "--out", "there", "--quiet")
    assert found == code
    assert err == (
        f"{word}, with a checkpoint after epoch 1 and step 2 of the next epoch. "
        "Continue with: locoprop train --resume --out there\n"
    )
    found, _, err = run("train", "--resume", "--out", "there")
    assert found == 0
    assert err.startswith("Continuing there from epoch 1 and step 2 of the next epoch of 4.\n")
    losses = [[row.train_loss for row in result_of(f).metrics] for f in ("whole", "there")]
    assert losses[0] == losses[1]


def test_a_signal_before_the_run_begins_asks_for_the_same_command(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder does not say yet what to train, so --resume would train the default."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", lambda *_: signal.raise_signal(signal.SIGINT))
        code, _, err = run("train", *TASK, "--out", "there", "--quiet")
    assert code == exit_codes.INTERRUPTED
    assert err == "Interrupted. Give the same command again to start the run.\n"
    assert run("train", *TASK, "--out", "there", "--quiet")[0] == 0


def test_compare_continues_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        send_in_step(patch, 17, signal.SIGTERM)
        code, _, err = run("compare", "adam", "sgd", *TASK, "--quiet")
    assert code == exit_codes.TERMINATED
    assert err == (
        "Terminated, with a checkpoint after epoch 1 and step 2 of the next epoch. "
        "Give the same command again to continue.\n"
    )
    code, _, err = run("compare", "adam", "sgd", *TASK)
    assert code == 0
    assert "adam-" in err.splitlines()[0]
    assert err.splitlines()[0].endswith(" is already finished.")
    assert re.search(r"^Continuing runs/\S*sgd\S* from epoch 1 and step 2", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(signal.SIGINT, exit_codes.INTERRUPTED), (signal.SIGTERM, exit_codes.TERMINATED)],
)
def test_a_signal_where_nothing_is_to_save(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(datasets, "status", lambda *_: signal.raise_signal(kind))
    assert run("datasets") == (code, "", "")


def test_sigterm_in_a_process(tmp_path: Path) -> None:
    script = (
        "import torch, sys; from torch_locoprop.study.data import datasets\n"
        "from torch_locoprop.study.cli import main as cli\n"
        "x = torch.rand(60, 12); data = datasets.Dataset('curves', x[:40], x[40:], 'test')\n"
        "datasets.load = lambda *a, **k: data\n"
        "cli.main(sys.argv[1:])\n"
    )
    words = ["train", *TASK, "--epochs", "1000000", "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 3/" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == exit_codes.TERMINATED
    assert "Traceback" not in rest
    checkpoint = RunFolder(tmp_path / "run").checkpoint()
    assert checkpoint is not None
    assert f"with a checkpoint after {checkpoint.place}. Continue with: " in rest.splitlines()[-1]
    assert checkpoint.metrics[-1] == result_of(tmp_path / "run").metrics[-1], "no epoch is lost"


# Lost checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def lost(run: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with two epochs whose checkpoint is lost; its metrics."""
    with monkeypatch.context() as patch:
        send_in_step(patch, 7, signal.SIGINT)
        run("train", *TASK, "--out", "there", "--quiet")
    Path("there/checkpoint.pt").unlink()
    return Path("there/metrics.jsonl").read_text()


def test_a_run_without_its_checkpoint_restarts_only_if_asked_to(run: Any, lost: str) -> None:
    code, out, err = run("train", "--resume", "--out", "there")
    assert (code, out) == (exit_codes.FAILED, "")
    assert "the metrics of epochs 0 to 2, but checkpoint.pt" in err
    assert "locoprop train --restart --out there" in err
    assert Path("there/metrics.jsonl").read_text() == lost
    code, _, err = run("train", "--restart", "--out", "there")
    assert code == 0
    assert result_of("there").finished
    assert Path("there/metrics.jsonl.old").read_text() == lost


@pytest.mark.parametrize("words", [["--resume"], [], ["--restart"]])
@pytest.mark.parametrize("also", ["checkpoint.pt", "metrics.jsonl", None])
def test_a_run_without_its_description_is_left_as_it_is(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], also: str | None
) -> None:
    """Its settings are not known: another run would go on from its weights, or replace it."""
    with monkeypatch.context() as patch:
        send_in_step(patch, 7, signal.SIGINT)
        run("train", *TASK, "--out", "there", "--quiet")
    for name in ("config.json", *([also] if also else [])):
        Path("there", name).unlink()
    left = {path.name: path.read_bytes() for path in Path("there").iterdir()}
    code, out, err = run("train", *TASK, "--out", "there", *words)
    assert (code, out) == (exit_codes.FAILED, "")
    assert "of a run, but its config.json is missing. Put it back, or choose another folder" in err
    assert "starting a new one" not in err
    assert {path.name: path.read_bytes() for path in Path("there").iterdir()} == left


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked(
    run: Any, lost: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(run_session.typer, "confirm", lambda *_, **__: answer == "y")
    code, _, err = run("train", "--resume", "--out", "there")
    assert (code, result_of("there").finished) == ((0, True) if answer == "y" else (1, False))
    assert ("was left as it is" in err) == (answer == "n")


# Exit codes -----------------------------------------------------------------------------------


def test_exit_codes(run: Any) -> None:
    assert run("train", "-m", "adem", *TASK)[0] == exit_codes.USAGE
    diverging = ["--warmup-epochs", "0", "--quiet", "--set"]
    code, out, _ = run("train", "-m", "sgd", *TASK, *diverging, "lr=1e8", "--json")
    assert code == exit_codes.DIVERGED
    assert json.loads(out)["diverged"] is True
    words = ("compare", "sgd", "momentum", *TASK, *diverging)
    assert run(*words, "lr=1e8")[0] == exit_codes.DIVERGED, "all of them"
    assert run(*words, "sgd.lr=1e8")[0] == 0, "a ranking with a diverged run is a result"


def test_exit_codes_are_documented(run: Any) -> None:
    codes = [v for name, v in vars(exit_codes).items() if name.isupper() and isinstance(v, int)]
    assert set(exit_codes.MEANING) == {0, *codes}
    text = " ".join(run("--help")[1].split())
    page = (ROOT / "docs/study.md").read_text()
    for code, meaning in exit_codes.MEANING.items():
        assert f"{code} {meaning.split(',')[0]}" in text
        assert f"| {code} |" in page


def test_library_users_are_told_about_busy_cores() -> None:
    for page in ("docs/speed.md", "docs/getting-started.md"):
        assert "GOMP_SPINCOUNT=1000" in (ROOT / page).read_text()


# Configuration files --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["train"], ["figure", "relu", "--quick"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON file"),
        ("[]", "not a configuration"),
        ('{"epoch": 3}', "Unknown field of a configuration 'epoch'. Did you mean 'epochs'?"),
        ('{"method": "adem"}', "Did you mean 'adam'"),
        ('{"method": "adam", "settings": {"lr": -1}}', "Invalid lr=-1"),
        ('{"epochs": 0}', "Invalid epochs=0"),
        ("\xff", "not a JSON file"),
        (None, "No such file or directory"),
    ],
)
def test_an_error_of_a_configuration_file_names_the_file(
    run: Any, command: list[str], content: str | None, message: str
) -> None:
    if content is not None:
        Path("bad.json").write_bytes(content.encode("latin-1"))
    code, out, err = run(*command, "--config", "bad.json")
    assert (code, out) == (exit_codes.USAGE, "")
    assert err.startswith("bad.json")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_folder_is_no_configuration_file(run: Any) -> None:
    Path("run").mkdir()
    code, _, err = run("train", "--config", "run")
    assert code == exit_codes.USAGE
    assert err == "run is a folder. Give a file, such as run/config.json.\n"


def test_tiny_images_are_what_the_commands_see() -> None:
    assert datasets.load("curves").train.shape == torch.Size([40, 12])
