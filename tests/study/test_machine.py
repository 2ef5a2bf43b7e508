"""Measurements of the machine on a CPU and on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_locoprop.study import machine

GPU = torch.device("cuda")


def test_the_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    machine.forget_peak(GPU)
    assert calls == ["reset"]
    assert machine.memory_mib(GPU) == 3


def test_the_memory_of_a_cpu_is_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10 < machine.memory_mib(torch.device("cpu")) < 1e6
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.memory_mib(torch.device("cpu")) == 0


def test_the_precision_is_set_and_set_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with machine.matmul_precision("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        with machine.matmul_precision("fp32"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_the_revision_is_that_of_the_packages_own_repository(tmp_path: Path) -> None:
    package = tmp_path / "src/package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", *words]
        done = subprocess.run(
            ["git", *own], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def revision() -> str:
        machine.revision.cache_clear()
        return machine.revision(package)

    assert revision() == "unknown", "no repository"
    git("init", "-q")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-qm", "one")
    assert revision() == "unknown", "the repository of another project"
    git("add", ".")
    git("commit", "-qm", "two")
    assert revision() == git("rev-parse", "--short", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert revision() == git("rev-parse", "--short", "HEAD") + "-dirty"
