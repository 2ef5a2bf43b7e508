"""Host time: every part of a step is measured for both variants."""

import pytest

from benchmarks import host_time


@pytest.mark.parametrize("method", host_time.METHODS)
def test_all_parts_are_measured(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "STEPS", 6)
    monkeypatch.setattr(host_time, "WARM", 2)
    found = host_time.measure(method)
    assert list(found) == list(host_time.KEYS)
    assert 0 < found["bare"] < found["step"]


def test_the_other_version_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_time.main([])
    assert "Give --other" in capsys.readouterr().err
