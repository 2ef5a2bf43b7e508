"""Mutants: which changes of a source are made, and whether tests that notice them are run."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coverage import CoverageData

from benchmarks.mutants import Mutant, applied, mutants_of
from benchmarks.mutants_live import live_functions, put_in, swaps
from benchmarks.mutation import (
    Outcomes,
    of_every_file,
    reason_keys,
    reasons,
    result_of,
    source_digest,
)
from benchmarks.mutation_coverage import SOURCES, Coverage, durations, fastest
from benchmarks.mutation_trials import KILLED, UNABLE, LiveTrials, outcome_of


def changes(source: str) -> list[str]:
    return [f"{each.was} -> {each.becomes}" for each in mutants_of(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a + b", ["a + b -> a - b"]),
        ("x = a @ b", []),
        ("x = -a", ["-a -> +a"]),
        ("x = not a", ["not a -> not not a"]),
        ("x = a < b", ["a < b -> a <= b"]),
        ("x = a is None or b", ["a is None or b -> a is None and b", "a is None -> a is not None"]),
        ("x = 2", ["2 -> 3", "2 -> 1"]),
        ("x = True", ["True -> False"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("x = a.sum()", ["a.sum() -> a.mean()"]),
        ("a.clear()", ["a.clear() -> None"]),
        ("x += a", ["x += a -> x -= a"]),
        ('"""Docstring 1 + 1."""', []),
        ("raise ValueError(1 + 1)", []),
        ("x: int | None = None", []),
        ("if TYPE_CHECKING:\n    x = 1 + 1", []),
    ],
)
def test_what_is_changed(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


def test_a_mutant_differs_in_one_place() -> None:
    source = "def f(a, b):\n    c = a + b\n    return c * 2"
    found = [applied(each, source) for each in mutants_of(source)]
    assert found == [
        "def f(a, b):\n    c = a - b\n    return c * 2",
        "def f(a, b):\n    c = a + b\n    return c / 2",
        "def f(a, b):\n    c = a + b\n    return c * 3",
        "def f(a, b):\n    c = a + b\n    return c * 1",
    ]


def test_every_mutant_of_the_mathematics_can_be_compiled() -> None:
    package = Path(__file__).parents[2] / "src" / "torch_locoprop" / "solvers"
    for path in package.glob("*.py"):
        source = path.read_text()
        for each in mutants_of(source)[::10]:
            compile(applied(each, source), str(path), "exec")


def test_some_mutants_of_every_file() -> None:
    mutants = [(file, Mutant(i, 1, 1, "", "")) for i, file in enumerate("abaabc")]
    found = [(file, mutant.place) for file, mutant in of_every_file(mutants, 2)]
    assert found == [("a", 0), ("b", 1), ("a", 2), ("b", 4), ("c", 5)]


SOURCE = """
LIMIT = 2

def plain(a):
    return a + 1

def outer(a):
    def inner(b):
        return a * b
    return inner

class Kept:
    size = 3

    def method(self):
        return self.size - 1
"""


def outcomes_of_all(mutants: list[Mutant]) -> dict[str, tuple[object, ...] | None]:
    """Return what the functions give with each mutant put into them; None outside of functions."""
    found: dict[str, tuple[object, ...] | None] = {}
    for mutant in mutants:
        space: dict[str, Any] = {}
        exec(compile(SOURCE, "/folder/module.py", "exec"), space)
        kept = space["plain"], space["outer"](5), space["Kept"]().method
        changes = swaps(mutant, SOURCE, "/folder/module.py")
        if changes is not None:
            functions = [space["plain"], space["outer"], kept[1], space["Kept"].method]
            by_place = {
                place: [f for f in functions if place_of(f) == place] for place, _ in changes
            }
            put_in(changes, by_place)
        values = kept[0](1), kept[1](2), kept[2]()
        found[f"{mutant.was} -> {mutant.becomes}"] = None if changes is None else values
    return found


def place_of(function: Any) -> tuple[str, str, int]:
    code = function.__code__
    return code.co_filename, code.co_qualname, code.co_firstlineno


def test_a_mutant_reaches_functions_that_others_hold_already() -> None:
    assert outcomes_of_all(mutants_of(SOURCE)) == {
        "2 -> 3": None,
        "2 -> 1": None,
        "a + 1 -> a - 1": (0, 10, 2),
        "1 -> 2": (2, 10, 1),  # of the last place with this change, the method
        "1 -> 0": (2, 10, 3),
        "a * b -> a / b": (2, 2.5, 2),
        "3 -> 4": None,
        "3 -> 2": None,
        "self.size - 1 -> self.size + 1": (2, 10, 4),
    }


def test_functions_of_a_folder_are_found_in_the_running_program() -> None:
    folder = str(Path(__file__).parent)
    assert outcomes_of_all in live_functions(folder)[place_of(outcomes_of_all)]


def test_every_reason_belongs_to_a_mutant_of_the_source() -> None:
    """A reason whose line has changed says nothing any more."""
    known = reasons()
    there = {key for file in {key[0] for key in known} for key in reason_keys(file).values()}
    assert known.keys() <= there
    assert all(known.values())


def place_in(source: str, name: str) -> tuple[str, str, int]:
    space: dict[str, Any] = {}
    exec(compile(source, "/folder/module.py", "exec"), space)
    return place_of(space[name])


def test_a_mutant_of_a_function_that_is_not_there_is_not_put_in() -> None:
    mutant = mutants_of(SOURCE)[2]  # a + 1 -> a - 1
    changes = swaps(mutant, SOURCE, "/folder/module.py")
    assert changes is not None
    assert put_in(changes, {place_in(SOURCE, "plain"): []})
    assert not put_in(changes, {place_in(SOURCE, "outer"): []})


@pytest.mark.parametrize(
    ("code", "found"), [(0, "survived"), (KILLED, "killed"), (UNABLE, "unable")]
)
def test_the_outcome_is_what_a_process_finds(code: int, found: str) -> None:
    assert outcome_of(lambda: code, 30) == found


def test_a_process_without_end_is_ended() -> None:
    assert outcome_of(threading.Event().wait, 0.1) == "timeout"  # type: ignore[arg-type]


class Session:
    """What pytest has collected."""

    def __init__(self, names: list[str]) -> None:
        self.items = [SimpleNamespace(nodeid=name) for name in names]


def test_a_test_that_is_not_collected_kills_nothing() -> None:
    """It would look as if it had failed."""
    trials = LiveTrials(["tests/a.py::one", "tests/b.py::two"], lambda trials: None)
    with pytest.raises(LookupError, match=r"1 measured tests are not collected.*b\.py::two"):
        trials.pytest_runtestloop(Session(["tests/a.py::one", "tests/c.py::three"]))


REPORT = """<testsuites><testsuite>
<testcase classname="tests.paper.test_gram" name="test_fast" time="0.25" />
<testcase classname="tests.paper.test_gram" name="test_slow[a-b]" time="2.5" />
<testcase classname="tests.paper.test_gram" name="test_left_out" time="0.1"><skipped /></testcase>
<testcase classname="tests.paper.test_gram" name="test_wrong" time="0.1"><failure /></testcase>
</testsuite></testsuites>"""


def test_tests_that_passed_have_a_duration(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert durations(tmp_path / "report.xml") == {
        "tests/paper/test_gram.py::test_fast": 0.25,
        "tests/paper/test_gram.py::test_slow[a-b]": 2.5,
    }


@pytest.mark.parametrize(
    ("most", "names"), [(0.5, ["b"]), (3, ["b", "c"]), (3.5, ["b", "c"]), (9, ["b", "c", "a"])]
)
def test_the_fastest_tests_run_and_always_one(most: float, names: list[str]) -> None:
    assert fastest(["a", "b", "c"], {"a": 4, "b": 1, "c": 2}, most) == names


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Coverage]:
    """Coverages of given tests: each run of the tests covers line 7 of a file by all its tests."""
    runs = []

    def measure(coverage: Coverage) -> None:
        runs.append(coverage.paths)
        names = [f"{path}/test_x.py::test_{len(runs)}" for path in coverage.paths]
        coverage.folder.mkdir(parents=True)
        cases = [name.replace("/", ".").replace(".py::", '" name="') for name in names]
        rows = "".join(f'<testcase classname="{case}" time="1" />' for case in cases)
        (coverage.folder / "durations.xml").write_text(f"<testsuite>{rows}</testsuite>")
        data = CoverageData(str(coverage.folder / "coverage"))
        for name in names:
            data.set_context(f"{name}|run")
            data.add_lines({str(SOURCES / "paper" / "gram.py"): [7]})
        data.write()
        data.close()

    monkeypatch.setattr(Coverage, "_measure", measure)
    return lambda *tests: Coverage(tmp_path, tests)


def test_only_tests_that_run_are_named(measured: Callable[..., Coverage]) -> None:
    """A narrower choice of tests is measured again, and the wider one is kept."""
    mutant, other = Mutant(0, 7, 7, "", ""), Mutant(0, 8, 8, "", "")
    both, narrow, again = (
        measured("paper", "solvers"),
        measured("paper"),
        measured("paper", "solvers"),
    )
    wide = ["tests/paper/test_x.py::test_1", "tests/solvers/test_x.py::test_1"]
    assert both.tests_of("paper/gram.py", mutant, 9) == wide
    assert narrow.tests_of("paper/gram.py", mutant, 9) == ["tests/paper/test_x.py::test_2"]
    assert again.tests_of("paper/gram.py", mutant, 9) == wide
    assert both.tests_of("paper/gram.py", other, 9) == []
    assert both.digest == again.digest != narrow.digest


FILE = "paper/gram.py"


def test_killed_mutants_stay_killed_and_survivors_are_tried_with_more(tmp_path: Path) -> None:
    killed, survivor = mutants_of((SOURCES / FILE).read_text())[:2]
    first = Outcomes(tmp_path / "outcomes.jsonl")
    first.add(FILE, killed, "killed", "tests", 5)
    first.add(FILE, survivor, "survived", "tests", 5)
    known = Outcomes(tmp_path / "outcomes.jsonl")
    assert known.is_final(FILE, killed, "other tests", 60)
    assert known.is_final(FILE, survivor, "tests", 5)
    assert not known.is_final(FILE, survivor, "tests", 60)
    assert not known.is_final(FILE, survivor, "other tests", 5)


def test_outcomes_of_an_earlier_source_do_not_count(tmp_path: Path) -> None:
    mutant = mutants_of((SOURCES / FILE).read_text())[0]
    Outcomes(tmp_path / "outcomes.jsonl").add(FILE, mutant, "killed", "tests", 5)
    text = (tmp_path / "outcomes.jsonl").read_text()
    (tmp_path / "outcomes.jsonl").write_text(text.replace(source_digest(FILE), "earlier"))
    assert Outcomes(tmp_path / "outcomes.jsonl").of(FILE, mutant) is None


def test_the_score_counts_what_tests_had_to_kill(tmp_path: Path) -> None:
    """Of four mutants one is killed, one survives, one is not covered, and one has no end."""
    found = mutants_of((SOURCES / FILE).read_text())[:5]
    outcomes = Outcomes(tmp_path / "outcomes.jsonl")
    for mutant, outcome in zip(
        found, ("killed", "survived", "not covered", "timeout"), strict=False
    ):
        outcomes.add(FILE, mutant, outcome, "tests", 5)
    result = result_of([(FILE, mutant) for mutant in found], outcomes)
    assert (result["mutants"], result["tried"]) == (5, 4)
    assert result["score"] == result["by package"]["paper"]["score"] == round(1 / 3, 4)
    assert [row["outcome"] for row in result["survivors"]] == ["survived", "not covered", "timeout"]
