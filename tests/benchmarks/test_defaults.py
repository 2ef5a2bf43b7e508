"""Defaults: tasks as described, tables and profiles by hand, runs from a cache, SOAP as published."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from benchmarks import (
    default_methods,
    default_profile,
    default_runs,
    default_tasks,
    defaults,
    odd_tasks,
)
from benchmarks.default_groups import TASKS, selected
from benchmarks.default_methods import BASELINES, build, ours, parse_settings
from benchmarks.default_runs import FINAL, PARTS, Cache, Job, Result, train
from benchmarks.default_table import Comparison, score, tables
from benchmarks.default_tasks import Data, Task
from benchmarks.plain_soap import SOAP
from torch_locoprop import LocoProp
from torch_locoprop.study.data.datasets import Dataset, DatasetError

ROOT = Path(__file__).parents[2]
ADAM = {"lr": 1e-3}


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the image data sets by a few random ones."""
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.rand(1200, 784, generator=numbers)
    labels = torch.randint(10, (1200,), generator=numbers)
    made = Dataset("mnist", pixels[:1100], pixels[1100:], "", labels[:1100], labels[1100:])
    monkeypatch.setattr(default_tasks, "_dataset", lambda name, folder: made)
    default_runs._data.cache_clear()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a data folder with a text of as many characters as the published one has."""
    folder = tmp_path / "tinyshakespeare"
    folder.mkdir()
    alphabet = "".join(chr(33 + place) for place in range(default_tasks.CHARACTERS))
    (folder / "input.txt").write_text(alphabet * 40)
    return tmp_path


def result(
    task: str = "friedman-200",
    method: str = "adam",
    settings: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    losses: list[float] | None = None,
    loss: float = 1.0,
    pace: float = 1.0,
    timed: bool = True,
) -> Result:
    """Return a made-up result whose parts take `pace` seconds each."""
    curve = [loss] * PARTS if losses is None else losses
    job = Job(task, method, settings if settings is not None else ADAM, seed, "cpu")
    seconds = [pace * (place + 1) for place in range(len(curve))]
    return Result(
        job.key, default_runs.asdict(job), curve, seconds, 2 * loss, None, timed, 1, "torch"
    )


# ---- tasks --------------------------------------------------------------------------------------


def test_the_tasks_are_as_varied_as_promised() -> None:
    tasks = selected(["all"])
    assert len(tasks) >= 12
    assert min(task.batch for task in tasks) == 16
    assert max(task.batch for task in tasks) == 1000
    assert {100, 2000} <= {task.steps for task in tasks}
    kinds = {type(part) for task in tasks for part in task.model().modules()}
    assert {nn.Tanh, nn.ReLU, nn.GELU, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d} <= kinds
    assert all(task.steps % PARTS == 0 for task in tasks)
    assert all(str(task.steps) == task.name.rsplit("-", 1)[1] for task in tasks)


@pytest.mark.parametrize("name", [task.name for task in selected(["all"])])
def test_every_task_trains_by_every_method(name: str, images: None, text: Path) -> None:
    for method in ("adam", "adamw", "muon", "soap", "ours"):
        run = train(Job(name, method, {} if method == "ours" else ADAM, 0, "cpu"), text, steps=20)
        assert run.error is None
        assert len(run.losses) == len(run.seconds) == PARTS
        assert run.test is not None
        assert run.final != run.losses[0]


@pytest.mark.parametrize("task", selected(["odd"]), ids=lambda task: task.name)
def test_every_odd_task_takes_steps_of_ours_and_of_muon(
    task: Task, images: None, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(odd_tasks, "RANDOM", 100)
    monkeypatch.setattr(odd_tasks, "TESTED", 20)
    default_runs._data.cache_clear()
    data = task.data(text, "cpu")
    inputs, targets = data.batch(torch.arange(min(task.batch, 4)))
    for method in ("ours", "muon"):
        model = task.model()
        optimizer = build(method, model, task, {} if method == "ours" else ADAM)
        before = [p.detach().clone() for p in model.parameters()]
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(moved)
        assert math.isfinite(loss.item())
    model.eval()
    assert math.isfinite(task.loss(model(data.test[0]), data.test[1]).item())


def test_all_methods_see_the_same_batches_and_start_at_the_same_weights(
    images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        TASKS,
        "friedman-200",
        Task(
            "friedman-200",
            "",
            TASKS["friedman-200"].data,
            partial(nn.Linear, 10, 1),
            nn.MSELoss(),
            16,
            20,
        ),
    )
    still = {"lr": 0.0}
    adam, muon = (train(Job("friedman-200", m, still, 3, "cpu"), None) for m in ("adam", "muon"))
    other = train(Job("friedman-200", "adam", still, 4, "cpu"), None)
    assert adam.losses == muon.losses
    assert adam.losses != other.losses


def test_groups_and_beginnings_of_names_select_tasks() -> None:
    names = [task.name for task in selected(["long", "friedman"])]
    assert {"friedman-200", "friedman-2000", "gpt-2000"} <= set(names)
    assert "gpt-300" not in names
    with pytest.raises(ValueError, match=r"Unknown task 'frieda'. Known: all, short"):
        selected(["frieda"])


def test_large_and_held_out_tasks_are_run_only_if_they_are_asked_for() -> None:
    large, held_out = ({task.name for task in selected([group])} for group in ("large", "held-out"))
    small = {task.name for task in selected(["all"])}
    assert len(large) >= 4
    assert len(held_out) >= 10
    assert not large & small
    assert not held_out & (large | small)
    odd = {task.name for task in selected(["odd"])}
    assert not odd & (held_out | large | small)
    assert large | small | held_out | odd == set(TASKS)
    assert small == {task.name for task in selected(["short", "long"])}


def test_a_changed_task_has_another_key() -> None:
    task = TASKS["friedman-200"]
    wider = Task(task.name, "", task.data, partial(nn.Linear, 10, 1), task.loss, 200, 200)
    more = Task(task.name, "", partial(task.data, examples=9), task.model, task.loss, 200, 200)
    same = Task(task.name, "other words", task.data, task.model, task.loss, 200, 200)
    assert same.fingerprint == task.fingerprint
    assert len({task.fingerprint, wider.fingerprint, more.fingerprint}) == 3


def test_friedmans_function_by_hand() -> None:
    data = default_tasks._friedman(None, "cpu", examples=500)
    x, y = data.batch(torch.arange(500))
    u = x / 12**0.5 + 0.5
    expected = 10 * (math.pi * u[:, 0] * u[:, 1]).sin() + 20 * (u[:, 2] - 0.5) ** 2
    expected = expected + 10 * u[:, 3] + 5 * u[:, 4]
    correlation = torch.corrcoef(torch.stack([expected, y[:, 0]]))[0, 1]
    assert correlation == pytest.approx(1, abs=1e-5)


def test_text_targets_are_the_next_characters(text: Path) -> None:
    data = default_tasks._text(text, "cpu", context=5)
    inputs, targets = data.batch(torch.tensor([3, 11]))
    assert torch.equal(targets.view(2, 5)[:, :-1], inputs[:, 1:])
    assert inputs[:, 0].tolist() == [3, 11]  # the alphabet comes in its order


def test_a_missing_text_says_where_it_was_searched(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"input.txt not found. Name the folder .* --data-dir"):
        default_tasks._text(tmp_path, "cpu", context=5)


def test_lower_halves_belong_to_upper_halves(images: None) -> None:
    data = default_tasks._images(None, "cpu", name="mnist", target="lower half")
    whole = default_tasks._images(None, "cpu", name="mnist", target="image")
    upper, lower = data.batch(torch.tensor([5]))
    assert torch.equal(torch.cat([upper, lower], 1), whole.batch(torch.tensor([5]))[0])


# ---- methods ------------------------------------------------------------------------------------


def test_soap_takes_the_steps_of_its_package() -> None:
    shapes = [(4, 6), (5,), (3, 2, 3, 3), (6, 4)]
    torch.manual_seed(0)
    starts = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    own, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    plain, package = SOAP(own, lr=0.02), pytorch_optimizer.SOAP(theirs, lr=0.02)
    for _ in range(23):  # bases are renewed twice
        gradients = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        for params, optimizer in ((own, plain), (theirs, package)):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
    for p, expected, start in zip(own, theirs, starts, strict=True):
        # The package rounds its bases to float32.
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-4)
        assert (p - start).abs().max() > 0.05


@pytest.mark.parametrize(
    ("name", "by_adamw"),
    [
        ("gpt-300", {"characters.weight", "positions.weight", "head.weight"}),
        ("cnn-200", {"5.weight"}),
        ("autoencoder-mse-200", set()),
    ],
)
def test_adamw_trains_embeddings_and_the_layer_of_the_classes_beside_muon(
    name: str, by_adamw: set[str]
) -> None:
    model = TASKS[name].model()
    muon, adamw = build("muon", model, TASKS[name], {"lr": 0.01})._parts
    assert isinstance(muon, torch.optim.Muon)
    own = {p.data_ptr(): name for name, p in model.named_parameters()}
    others = {own[p.data_ptr()] for p in adamw.param_groups[0]["params"]}
    vectors = {name for name, p in model.named_parameters() if p.dim() == 1}
    assert others == vectors | by_adamw
    matrices = {own[p.data_ptr()] for p in muon.param_groups[0]["params"]}
    assert matrices == set(own.values()) - others


def test_muon_steps_filters_as_matrices() -> None:
    torch.manual_seed(0)
    filters, matrix = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Parameter(torch.zeros(4, 18))
    matrix.data.copy_(filters.data.flatten(1))
    both = default_methods.MuonAndAdamW([filters], [], lr=0.01)
    plain = torch.optim.Muon([matrix], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        matrix.grad = torch.randn(4, 18)
        filters.grad = matrix.grad.view(4, 2, 3, 3).clone()
        both.step()
        plain.step()
    assert torch.equal(filters.flatten(1), matrix)


def test_ours_has_no_settings_unless_they_are_given() -> None:
    given: list[dict[str, Any]] = []

    class Spy(LocoProp):
        def __init__(self, model: nn.Module, **settings: Any) -> None:
            given.append(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_methods, "LocoProp", Spy)
        task = TASKS["friedman-200"]
        for text in ("", "lr=0.02, solver=rmsprop", "loss_fn=true"):
            build("ours", task.model(), task, parse_settings(text))
    assert given == [{}, {"lr": 0.02, "solver": "rmsprop"}, {"loss_fn": task.loss}]


def test_settings_are_read_as_numbers_constants_and_names() -> None:
    read = parse_settings("lr=1e-3,local_steps=5,preset=spectral,diagnose=False,gate=none")
    assert read == {
        "lr": 1e-3, "local_steps": 5, "preset": "spectral", "diagnose": False, "gate": None,
    }  # fmt: skip
    assert type(read["local_steps"]) is int
    with pytest.raises(ValueError, match=r"Invalid setting 'lr'. Must be NAME=VALUE"):
        parse_settings("lr")


# ---- runs ---------------------------------------------------------------------------------------


def test_the_final_loss_is_the_mean_of_the_last_tenth() -> None:
    run = result(losses=[float(place) for place in range(PARTS)])
    assert FINAL / PARTS == 0.1
    assert run.final == (PARTS - 1 + PARTS - 2) / 2


def test_the_loss_at_a_time_is_interpolated() -> None:
    run = result(losses=[float(place) for place in range(PARTS)])  # part n ends at n + 1 seconds
    assert run.at(0.5) == 0
    assert run.at(2) == 0.5
    assert run.at(2.5) == pytest.approx(1.0)
    assert run.at(1000) == run.final


def test_a_diverged_run_has_an_infinite_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(50, lambda i: (torch.full((len(i), 1), math.nan), torch.zeros(len(i), 1)), None)
    task = Task("x", "", lambda folder, device: data, partial(nn.Linear, 1, 1), nn.MSELoss(), 5, 20)
    monkeypatch.setitem(TASKS, "x", task)
    run = train(Job("x", "adam", ADAM, 0, "cpu"), None)
    assert (run.final, run.at(1), run.test, run.error) == (math.inf, math.inf, None, None)


def test_an_error_of_ours_is_a_result_and_one_of_a_baseline_is_not() -> None:
    run = train(Job("friedman-200", "ours", {"lr": -1.0}, 0, "cpu"), None, steps=20)
    assert run.error is not None
    assert run.error.startswith("ValueError: Invalid lr=-1.0")
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        train(Job("friedman-200", "adam", {"lr": -1.0}, 0, "cpu"), None, steps=20)


def test_the_cache_prefers_own_runs_and_asks_for_times(tmp_path: Path) -> None:
    run, timed = result(loss=1.0, timed=False), result(loss=2.0)
    published = tmp_path / "published.json"
    published.write_text(json.dumps({"runs": [default_runs.asdict(timed)]}))
    cache = Cache(tmp_path / "cache", published)
    assert cache.get(run.key, timed=False) == timed
    cache.put(run)
    assert cache.get(run.key, timed=False) == run
    assert cache.get(run.key, timed=True) == timed
    assert cache.get("unknown", timed=False) is None


def test_only_the_key_of_ours_depends_on_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("friedman-200", method, ADAM, 0, "cpu") for method in ("ours", "adam")]
    before = [job.key for job in jobs]
    monkeypatch.setattr(default_runs, "code_fingerprint", lambda: "changed")
    assert [job.key == old for job, old in zip(jobs, before, strict=True)] == [False, True]


# ---- tables and profiles ------------------------------------------------------------------------


def comparison(timed: bool = True) -> Comparison:
    """Ours at half the pace of Adam(); ahead of it in one of two tasks."""
    tasks = ["friedman-200", "gpt-300"]
    falling = [float(PARTS - place) for place in range(PARTS)]
    found = [
        result(tasks[0], "ours", {}, losses=falling, pace=2.0, timed=timed),
        result(tasks[1], "ours", {}, loss=4.0),
        result(tasks[0], loss=3.0),
        result(tasks[1], loss=3.0),
        result(tasks[0], "adam", {"lr": 0.5}, loss=0.1),  # not a rate of the row
    ]
    return Comparison(tasks, [ours({}), BASELINES["adam()"], BASELINES["muon"]], [0], found)


def test_scores_by_hand() -> None:
    made = comparison()
    assert [row.key for row in made.rows] == ["ours", "adam()"]  # Muon has no results
    mine, adam = made.rows
    steps = score(made, mine, adam, "steps")
    assert (steps.ahead, steps.of, steps.behind) == (1, 2, ["gpt-300"])
    assert steps.ratio == pytest.approx((1.5 / 3 * 4 / 3) ** 0.5)
    # When Adam() ends, the first run of ours is at part 10 of 20: losses 12 and 11.
    assert made.cell("friedman-200", mine, "time").loss == pytest.approx(11.5)
    assert score(made, mine, adam, "time").ahead == 0


def test_a_negative_loss_counts_but_has_no_quotient() -> None:
    tasks = ["friedman-200", "gpt-300"]
    losses = {("ours", tasks[0]): -4.0, ("adam", tasks[0]): -2.0}
    losses |= {("ours", tasks[1]): 6.0, ("adam", tasks[1]): 2.0}
    found = [
        result(task, method, {} if method == "ours" else ADAM, loss=loss)
        for (method, task), loss in losses.items()
    ]
    made = Comparison(tasks, [ours({}), BASELINES["adam()"]], [0], found)
    counted = score(made, *made.rows, "steps")
    assert (counted.ahead, counted.of, counted.behind) == (1, 2, ["gpt-300"])
    assert counted.ratio == pytest.approx(3)


def test_a_row_takes_the_best_rate_of_the_mean_over_the_seeds() -> None:
    name = "friedman-200"
    rates = [settings["lr"] for settings in BASELINES["soap"].candidates]
    losses = {
        rates[0]: (1.0, 9.0),
        rates[1]: (3.0, 3.0),
        rates[2]: (9.0, 9.0),
        rates[3]: (2.0, 5.0),
    }
    found = [
        result(name, "soap", {"lr": rate}, seed=seed, loss=loss)
        for rate, pair in losses.items()
        for seed, loss in enumerate(pair)
    ]
    made = Comparison([name], [BASELINES["soap"]], [0, 1], found)
    cell = made.cell(name, BASELINES["soap"], "steps")
    assert (cell.loss, cell.settings) == (3.0, {"lr": rates[1]})
    assert made.cell(name, BASELINES["soap"], "test").loss == 6.0
    assert made.measures() == ["steps", "test"]  # without Adam() there is no time to compare at


def test_the_tables_say_when_times_are_not_reliable() -> None:
    assert "NOT RELIABLE" not in tables(comparison())
    printed = tables(comparison(timed=False))
    assert "NOT RELIABLE" in printed
    assert "1 of 2, 0.816" in printed
    assert "LocoProp(model) behind Adam(): gpt-300\n" in f"{printed}\n"


def test_the_profile_by_hand() -> None:
    losses = [[1.0, 2.0], [3.0, 1.5], [1.0, math.inf], [1.0, 1.0]]
    assert default_profile.shares(losses, 0) == ([1.0, 1.0, 1.0, 2.0], [0.25, 0.5, 0.75, 1.0])
    assert default_profile.shares(losses, 1) == ([1.0, 1.0, 2.0], [0.25, 0.5, 0.75])


def test_the_figure_has_a_panel_of_times_only_if_they_count() -> None:
    panels = default_profile.draw(comparison()).axes
    assert [axes.get_title("left") for axes in panels] == list(default_profile.TITLES.values())
    assert len(default_profile.draw(comparison(timed=False)).axes) == 1
    labels = [line.get_label() for line in panels[0].lines]
    assert labels == ["LocoProp(model)", "Adam()"]


# ---- the command --------------------------------------------------------------------------------


def test_a_run_writes_what_its_tables_are_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, picture = tmp_path / "deeper" / "out.json", tmp_path / "profile.png"
    ask = ["run", "--tasks", "friedman-200", "--device", "cpu", "--cache", str(tmp_path / "cache")]
    ask += ["--published", str(tmp_path / "none.json")]
    Cache(tmp_path / "cache", None).put(result(timed=False))
    # A candidate alone is compared with the baselines that are in the cache.
    ask += [
        "--methods",
        "ours",
        "--ours",
        "lr=1e-4",
        "--ours",
        "",
        "--jobs",
        "2",
        "--out",
        str(path),
    ]
    defaults.main(ask)
    printed = capsys.readouterr().out
    assert "2 runs, 0 more are in the cache" in printed
    content = json.loads(path.read_text())
    assert [row["key"] for row in content["rows"]] == ["ours(lr=0.0001)", "ours", "adam()"]
    assert len(content["runs"]) == 3
    assert content["timed"] is False
    assert set(content["scores"]) == {"LocoProp(model, lr=0.0001)", "LocoProp(model)"}
    monkeypatch.setattr(defaults, "run_all", None)  # the table of a file must not run anything
    defaults.main(["show", str(path), "--figure", str(picture)])
    assert printed.endswith(capsys.readouterr().out)
    assert picture.stat().st_size > 10_000


def test_the_page_has_the_tables_of_the_committed_file() -> None:
    page = (ROOT / "docs" / "results-defaults.md").read_text()
    assert defaults.with_tables(page, defaults._read(defaults.PUBLISHED)) == page


def test_the_page_has_the_table_of_the_odd_tasks() -> None:
    made = defaults._read(defaults.PUBLISHED.with_name("defaults-odd-cpu.json"))
    assert made.tasks == [task.name for task in selected(["odd"])]
    assert tables(made, ["steps"]) in (ROOT / "docs" / "results-defaults.md").read_text()


def test_tables_go_between_the_marks_of_a_page() -> None:
    start, end = defaults.MARKS
    page = defaults.with_tables(f"before\n{start} old {end}\nafter\n", comparison(timed=False))
    assert page.startswith(f"before\n{start}\n\nTraining loss at equal steps:")
    assert page.endswith(f"{end}\nafter\n")
    assert " old " not in page
    assert "Adam() ends" not in page  # times that do not count
    with pytest.raises(ValueError, match="no marks"):
        defaults.with_tables(f"{start} without an end", comparison())


def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--methods", "adm"], "Unknown method 'adm'. Did you mean 'adam'?"),
        (["--timed", "--jobs", "2"], "Invalid --jobs 2 with --timed. Must be 1."),
    ):
        with pytest.raises(SystemExit) as stop:
            defaults.main(["run", *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_the_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    defaults.main(["tasks"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TASKS)


def test_folders_of_a_machine_are_not_written() -> None:
    given = ["run", "--data-dir", "/home/someone", "--jobs", "2", "--cache", "/tmp/x"]
    shown = defaults._public([*given, "--out", "/tmp/out.json"])
    expected = ["run", "--data-dir", "DATA-DIR", "--jobs", "2", "--cache", "CACHE"]
    assert shown == [*expected, "--out", "out.json"]
