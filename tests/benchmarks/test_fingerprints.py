"""Fingerprints: equal for equal runs, different for different ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fingerprints import __main__ as command
from benchmarks.fingerprints.cases import Case, cases
from benchmarks.fingerprints.digests import differences, digest
from benchmarks.fingerprints.training import fingerprint

CASES = {
    "loop": Case({"variant": "locoprop-s"}, model="conv", loop="resume", steps=2),
    "population": Case({"variant": "pocoprop-m"}, "population", steps=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_the_same_fingerprint_twice(name: str) -> None:
    assert fingerprint(CASES[name]) == fingerprint(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_changed_setting_is_found_by_the_comparison(name: str) -> None:
    case = CASES[name]
    changed = replace(case, settings={**case.settings, "gamma": 2.0 + 1e-6})
    before = {each: fingerprint(own) for each, own in CASES.items()}
    after = {**before, name: fingerprint(changed)}
    (line,) = differences(before, after)
    assert line.startswith(f"{name}: ")
    assert "weights" in line


def test_one_bit_of_a_tensor_changes_the_digest() -> None:
    one = torch.ones(3)
    other = one.clone()
    other[1] = 1 + torch.finfo(other.dtype).eps
    assert digest({"a": one, "b": 2}) == digest({"b": 2, "a": one.clone()})
    assert digest({"a": one, "b": 2}) != digest({"a": other, "b": 2})
    assert digest(torch.zeros(1)) != digest(-torch.zeros(1))
    assert digest([0.0]) != digest([-0.0])


def test_runs_that_one_file_lacks_are_named() -> None:
    both = {"a": {"weights": "1"}}
    assert differences(both, {**both, "b": {}}) == ["b: only in the second file"]
    assert differences({**both, "b": {}}, both) == ["b: only in the first file"]


def test_all_axes_are_in_the_list() -> None:
    names = list(cases())
    assert len(names) > 500
    for axis in ("methods", "models", "loops", "options", "transfers", "baselines", "populations"):
        assert any(name.startswith(f"{axis}/") for name in names)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fingerprints", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return int(stop.value.code or 0)


def test_the_command_writes_and_compares_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    assert run(monkeypatch, "--only", "populations/l2/", "--out", one) == 0
    found = json.loads(one.read_text())
    assert len(found) == 2
    assert run(monkeypatch, "--compare", one, one) == 0
    found["populations/l2/float64"]["state"] = "another"
    other.write_text(json.dumps(found))
    assert run(monkeypatch, "--compare", one, other) == 1
    assert "populations/l2/float64: state" in capsys.readouterr().out
    assert run(monkeypatch, "--compare", one, other, "--only", "float32") == 0
