"""``examples/fsdp_gpt.py`` under torchrun: two processes have the losses of one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_gpt.py"


def run(processes: int, *arguments: str) -> list[float]:
    """Return the losses that the example prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), *arguments],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


@pytest.fixture(autouse=True)
def _with_processes() -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no processes")


def test_two_processes_train_and_save(tmp_path: Path) -> None:
    losses = run(2, "--steps", "21", "--folder", str(tmp_path / "saved"))
    assert len(losses) == 2
    assert losses[1] < losses[0] - 1
    assert (tmp_path / "saved" / "step-21" / ".metadata").is_file()


@pytest.mark.distributed
def test_one_process_has_the_same_losses_and_goes_on_from_two(tmp_path: Path) -> None:
    two, one = (run(number, "--steps", "4") for number in (2, 1))
    assert two == pytest.approx(one, abs=2e-4)
    folder = str(tmp_path / "saved")
    run(2, "--steps", "2", "--folder", folder)
    assert run(1, "--steps", "4", "--folder", folder) == pytest.approx(one[1:], abs=2e-4)
