"""What all tests share: settings that torch reads when it loads, a seed, the command line."""

import os
import re
from collections.abc import Iterator
from typing import Any

# Some processors announce bfloat16 instructions that then fail; oneDNN reads this when torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# As in the Makefile: on a core shared with other programs, a long busy wait makes products crawl.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse test names that differ between processes, which pytest-xdist could not distribute."""
    for item in items:
        if re.search(r" at 0x[0-9a-f]{4}", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid}: give this test ids without addresses.")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code before and after: what other tests compiled counts towards its limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line: from arguments to the exit code, what is printed, and what is told."""
    from torch_locoprop.study.cli import main

    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main.main(arguments)
        code = 0 if stop.value.code is None else stop.value.code
        out, err = capfd.readouterr()
        return int(code), out, err

    return invoke
