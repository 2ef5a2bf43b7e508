"""Warnings, versions and invalid values are reported in sentences, without code."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny

import torch_locoprop
from torch_locoprop.study.cli import run_session
from torch_locoprop.study.data import datasets
from torch_locoprop.study.training import runner

TINY = ["--model", "12-8-3", "--epochs", "1", "--batch-size", "15", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def _tiny_data_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: tiny.data())


def test_a_warning_is_a_sentence(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def warning(*arguments: Any, **options: Any) -> Any:
        warnings.warn("A layer keeps its weights.", UserWarning, stacklevel=2)
        return runner.run(*arguments, **options)

    monkeypatch.setattr(run_session, "run", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("train", "-m", "adam", *TINY, "--out", "there")
    assert (code, err) == (0, "Warning: A layer keeps its weights.\n")
    assert "after 1 epoch in" in out


def test_a_comparison_that_was_interrupted_goes_on_as_a_whole(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", "adam", "sgd", *TINY)
    with monkeypatch.context() as patch:
        patch.setattr(run_session, "run", interrupted)
        code, _, err = run(*words)
    assert (code, err) == (130, "Interrupted. Give the same command again to continue.\n")
    code, out, _ = run(*words, "--json")
    assert [each["finished"] for each in json.loads(out)] == [True, True]


def interrupted(*arguments: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def test_the_version(run: Any) -> None:
    assert run("--version") == (0, f"torch-locoprop {torch_locoprop.__version__}\n", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"method": 3}, "Invalid method=3. Must be a string."),
        ({"model": 784}, "Invalid model=784. Must be a string."),
        ({"settings": [1]}, "Invalid settings=[1]. Must be a dictionary."),
    ],
)
def test_a_configuration_file_with_values_of_another_type(
    run: Any, content: dict[str, Any], message: str
) -> None:
    Path("c.json").write_text(json.dumps(content))
    assert run("train", "--config", "c.json") == (2, "", f"c.json: {message}\n")


@pytest.mark.parametrize("content", ['{"config": 3, "data": {}}', '{"config": {}, "data": 3}'])
def test_a_folder_with_a_description_of_another_type(run: Any, content: str) -> None:
    Path("there").mkdir()
    Path("there/config.json").write_text(content)
    code, _, err = run("train", "--resume", "--out", "there")
    assert code == 1
    assert err.startswith("there/config.json is not the description of a run (")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("config", 3, "config is 3, not an object"),
        ("space", {"lr": {"log": [1]}}, "{'log': [1]} is not the range of a setting"),
    ],
)
def test_a_search_with_a_description_that_makes_no_sense(
    run: Any, part: str, value: Any, message: str
) -> None:
    content = {"config": {}, "space": {}, "sampler": "tpe", "data": {}, part: value}
    Path("there").mkdir()
    Path("there/tuning.json").write_text(json.dumps(content))
    code, _, err = run("tune", "--out", "there")
    assert code == (1 if part == "config" else 2)
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--device", "gpu"], "Known: cpu, cuda; CUDA_VISIBLE_DEVICES selects the GPU."),
        (["train", "--seed", "9" * 30], "Must be below 2**63."),
        (["train", "--model", f"12-{10**15}"], "There is not enough memory. Use a smaller"),
        (["figure", "all", "wid"], "Unknown figure 'wid'. Did you mean 'wide'?"),
        (["train", "--transfer", "foo"], "Must be one of linear, relu,"),
        (["tune", "-m", "adam", "--range", "momentum=0.5:1"], "the upper end must be below 1"),
        (["tune", "-m", "adam", "--range", "lr=1:2:3"], "lr=1:2:3 (3 ends)"),
    ],
)
def test_what_was_meant_can_be_guessed_from_the_message(
    run: Any, words: list[str], message: str
) -> None:
    code, _, err = run(*words)
    assert code == (1 if "memory" in message else 2)
    assert message in err
    assert "softmax" not in err
