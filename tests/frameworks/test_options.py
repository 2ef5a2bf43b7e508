"""Invalid options of the framework examples end with a message, before any training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = {
    "lightning_autoencoder": ("lightning", "--images"),
    "transformers_language_model": ("transformers", "--sentences"),
    "accelerate_classifier": ("accelerate", "--epochs"),
}


@pytest.fixture(params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    for needed in {EXAMPLES[request.param][0], "accelerate"}:
        pytest.importorskip(needed, reason="needs the extra 'frameworks'")
    return str(request.param)


@pytest.fixture
def module(name: str, example: Callable[[str], ModuleType]) -> ModuleType:
    return example(name)


@pytest.mark.parametrize("number", ["0", "-1"])
def test_counts_below_one_are_refused(
    name: str, module: ModuleType, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in {"--epochs", "--batch-size", "--accumulate", EXAMPLES[name][1]}:
        with pytest.raises(SystemExit) as ended:
            module.main([option, number])
        assert ended.value.code == 2
        assert f"argument {option}: must be at least 1, not {number}" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_resuming_without_a_checkpoint_says_what_to_do(
    module: ModuleType, there: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    if there:
        folder.mkdir()
    with pytest.raises(SystemExit) as ended:
        module.main(["--resume", "--folder", str(folder)])
    assert ended.value.code == f"No checkpoint in {folder}. Run this without --resume first."
    assert folder.exists() == there
