"""The documentation site, built once for all processes that run tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Build the site as `make docs` does; return its folder and the finished process."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    if not (ROOT / "results").is_dir():
        pytest.skip("a source distribution has no runs, and the pages show them")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    html, log, code = (shared / name for name in ("site", "site.log", "site.code"))
    with FileLock(shared / "site.lock"):
        if not code.exists():
            command = [
                sys.executable,
                "-m",
                "sphinx",
                "-W",
                "--keep-going",
                "-q",
                "docs",
                str(html),
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            log.write_text(done.stdout + done.stderr)
            code.write_text(str(done.returncode))
    return html, subprocess.CompletedProcess([], int(code.read_text()), log.read_text())


@pytest.fixture(scope="session")
def site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """Return the folder of a site that was built without a warning."""
    html, process = built
    assert process.returncode == 0, process.stdout
    return html
