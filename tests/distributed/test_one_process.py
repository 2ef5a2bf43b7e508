"""One process of a process group equals a plain run: on a GPU with NCCL, on a CPU with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_locoprop


@pytest.mark.distributed
def test_one_process_of_a_group_is_one_without() -> None:
    source, tests = Path(torch_locoprop.__file__).parents[1], Path(__file__).parents[1]
    folders = (source, tests.parent / "examples", tests)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("one_process.py"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") > 100
