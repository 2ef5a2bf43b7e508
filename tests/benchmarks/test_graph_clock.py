"""The clock of recorded steps: what it times, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import graph_clock
from benchmarks.contestants import Task
from benchmarks.graph_clock import Member, main, markdown
from torch_locoprop.study.training import matrix_updates


@pytest.mark.parametrize("method", ["soap", "kfac@10", "shampoo@10", "exact-s-muon"])
def test_a_renewing_step_and_no_other_renews(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renewals: list[int] = []
    plain = matrix_updates.in_threads

    def counted(*given: object) -> object:
        renewals.append(member.update.steps)
        return plain(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(matrix_updates, "in_threads", counted)
    member = Member(method, Task("9-5-3", batch=8))
    for _ in range(graph_clock.EARLY + 2):
        member.step()
    member.before_renewal()
    renewals.clear()
    for number in range(21):
        member.step()
        assert len(renewals) == number // 10 + 1


def test_muon_has_nothing_to_renew() -> None:
    member = Member("muon", Task("9-5-3", batch=8))
    before = member.layers[0]["weight"].clone()
    member.before_renewal()
    assert member.update.steps == 0
    member.step()
    assert not member.layers[0]["weight"].equal(before)


def test_the_command_measures_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_clock, "WHOLE", 2)
    out = tmp_path / "clock.json"
    arguments = ["--models", "9-5-3", "--batch", "8", "--rounds", "1", "--device", "cpu"]
    main([*arguments, "--methods", "sgd", "muon", "kfac@10", "--out", str(out)])
    rows = json.loads(out.read_text())["models"]["9-5-3"]
    assert list(rows) == ["sgd", "muon", "kfac@10"]
    assert rows["kfac@10"]["ms"] == pytest.approx(
        rows["kfac@10"]["step_ms"] + rows["kfac@10"]["renewals_ms"]
    )
    table = capsys.readouterr().out
    main(["--show", str(out)])
    assert capsys.readouterr().out in table


def test_the_table_tells_what_was_not_recorded() -> None:
    rows = {"sgd": {"ms": 0.5}, "soap": {"missing": "out of memory"}}
    assert markdown({"models": {"deep": rows}}).splitlines()[2:] == [
        "| `sgd` | 0.50 |",
        "| `soap` | – |",
    ]
