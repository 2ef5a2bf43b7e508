"""The figure of times to fixed train losses: points by hand, words for what has none, its caption."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import small
from drawn import found, line
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D

from torch_locoprop.study import methods
from torch_locoprop.study.figures import captions, run_library, time_to_loss, timings
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.run_library import Found, GraphClock
from torch_locoprop.study.figures.time_to_loss import Reached
from torch_locoprop.study.training import runner
from torch_locoprop.study.training.description import RunError

TARGETS = (53.0, 52.0, 51.0)


def on_gpu(drawn: Drawn) -> Drawn:
    runs = tuple(
        replace(run, result=replace(run.result, config=replace(run.config, device="cuda")))
        for run in drawn.runs
    )
    return replace(drawn, runs=runs)


def row(name: str, *curves: Sequence[float], seconds: float | None = 2.0) -> Reached:
    """When these curves, one for each seed, reached the targets with two steps an epoch."""
    runs = [found(name, curve, seed=seed) for seed, curve in enumerate(curves)]
    return time_to_loss.reached(on_gpu(line(name, *runs, seconds=seconds)), TARGETS, 40)


FAST, SLOW, SHORT = (
    [90.0, 53.0, 52.5, 52.0, 50.0],
    [90.0, 80.0, 53.0, 52.0, 51.0],
    [90.0, 60.0, 52.9, 52.8, 52.7],
)


def points(axes: Axes, name: str) -> list[Line2D]:
    own = [each for each in axes.lines if each.get_markeredgecolor() == methods.colour(name)]
    return [each for each in own if each.get_marker() in time_to_loss.SHAPES]


def test_steps_and_seconds_are_those_by_hand() -> None:
    both = row("adam", FAST, SLOW)
    assert both.epochs == {0: (1, 3, 4), 1: (2, 3, 4)}
    assert [both.steps(at) for at in range(3)] == [[2, 4], [6, 6], [8, 8]]
    assert [both.seconds(at) for at in range(3)] == [[2.0, 4.0], [6.0, 6.0], [8.0, 8.0]]
    assert row("adam", SHORT).steps(1) == [None]
    assert row("adam", FAST, seconds=None).seconds(0) == [None]


def test_every_seed_is_a_point_of_its_own() -> None:
    figure = time_to_loss.draw({"standard": [row("adam", FAST, SLOW)]}, TARGETS, "title", "")
    drawn = points(figure.axes[0], "adam")
    places = [(each.get_marker(), each.get_xdata()[0], each.get_ydata()[0]) for each in drawn]
    assert sorted((shape, x) for shape, x, _ in places) == sorted(
        [("o", 2.0), ("s", 6.0), ("^", 8.0), ("o", 4.0), ("s", 6.0), ("^", 8.0)]
    )
    assert len(set(places)) == 6, "equal times of two seeds do not hide each other"


def test_cuda_graphs_are_filled_and_eager_methods_open() -> None:
    rows = [row("adam", FAST), row("muon", SLOW)]
    (axes,) = time_to_loss.draw({"standard": rows}, TARGETS, "title", "").axes
    faces = {
        name: {each.get_markerfacecolor() for each in points(axes, name)}
        for name in ("adam", "muon")
    }
    assert faces == {"adam": {methods.colour("adam")}, "muon": {"white"}}
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["53", "52", "51", "filled: as a CUDA graph", "open: run eagerly"]


def clock_of(path: Path, **milliseconds: float) -> GraphClock:
    """A clock that has read its file, with batches of 20 images of the standard model."""
    steps = {name: {"ms": ms, "step_ms": ms} for name, ms in milliseconds.items()}
    content = {
        "models": {"standard": {**steps, "soap": {"missing": "a reason"}}},
        "batch": 20,
        "precision": "tf32",
        "environment": {"machine": "a GPU"},
    }
    path.write_text(json.dumps(content))
    return GraphClock.read(path)


def test_all_methods_have_points_of_their_steps_as_cuda_graphs(tmp_path: Path) -> None:
    """An epoch has two steps of 20 of the 40 images."""
    clock = clock_of(tmp_path / "clock.json", muon=250.0, adam=100.0)
    own = [on_gpu(line(name, found(name, FAST), seconds=2.0)) for name in ("adam", "muon", "soap")]
    own = [replace(each, runs=tuple(in_batches(run, 20) for run in each.runs)) for each in own]
    adam, muon, soap = (time_to_loss.reached(each, TARGETS, 40, clock) for each in own)
    assert [adam.as_graph, muon.as_graph, soap.as_graph] == pytest.approx([0.2, 0.5, None])
    assert [adam.eager, muon.eager, soap.eager] == [None, 2.0, 2.0]
    (axes,) = time_to_loss.draw({"standard": [adam, muon, soap]}, TARGETS, "title", "").axes
    faces = {
        name: [(each.get_markerfacecolor(), each.get_xdata()[0]) for each in points(axes, name)]
        for name in ("adam", "muon")
    }
    own_colour = {name: methods.colour(name) for name in faces}
    assert faces["adam"] == [(own_colour["adam"], pytest.approx(0.2 * at)) for at in (1, 3, 4)]
    assert faces["muon"] == [
        *((own_colour["muon"], pytest.approx(0.5 * at)) for at in (1, 3, 4)),
        *(("white", 2.0 * at) for at in (1, 3, 4)),
    ]
    caption = time_to_loss.caption({"standard": [muon]}, TARGETS, "Title", "", [])
    assert "| Muon | 0 | 2 | 0.5 | 2.0 | 6 | 1.5 | 6.0 | 8 | 2.0 | 8.0 |" in caption
    assert time_to_loss.ordered({"standard": [soap, muon, adam]}) == ["Adam", "Muon", "SOAP"]


def in_batches(run: Found, size: int) -> Found:
    config = replace(run.config, batch_size=size, model="standard", device="cuda", precision="tf32")
    return replace(run, result=replace(run.result, config=config))


def test_the_clock_counts_for_its_batch_and_model_alone(tmp_path: Path) -> None:
    clock = clock_of(tmp_path / "clock.json", muon=250.0)
    config = in_batches(found("muon", FAST), 20).config
    assert clock.seconds(config, 41) == pytest.approx(0.75)
    assert clock.machine == "a GPU, tf32"
    for other in ({"batch_size": 10}, {"model": "deep"}, {"method": "soap"}):
        assert clock.seconds(replace(config, **other), 40) is None
    (tmp_path / "clock.json").write_text('{"models": []}')
    with pytest.raises(RunError, match=r"clock\.json is not a file of benchmarks"):
        GraphClock.read(tmp_path / "clock.json")


def test_the_library_finds_the_clock_beside_the_timings(tmp_path: Path) -> None:
    library = small.Making(small.order(tmp_path, only_existing=True)).maker.library
    assert library.graph_clock() is None
    folder = library.folders[0] / "timings"
    folder.mkdir(parents=True)
    expected = clock_of(folder / run_library.GRAPH_CLOCK, muon=1.0)
    assert library.graph_clock() == expected


def test_what_has_no_point_is_said() -> None:
    tasks = {
        "standard": [row("adam", SHORT), row("muon", FAST), row("sgd", FAST, seconds=None)],
        "deep": [row("adam", FAST)],
    }
    first, second = time_to_loss.draw(tasks, TARGETS, "title", "").axes
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["Muon", "Adam", "SGD"]
    assert {text.get_position()[1]: text.get_text() for text in first.texts} == {
        1: "ends at 52.70",
        2: "not timed",
    }
    assert [text.get_text() for text in second.texts] == ["not run", "not run"]


@pytest.mark.parametrize("slower", [2.0, 10.0, 100.0, 1e4])
def test_numbers_of_the_axis_are_apart(slower: float) -> None:
    rows = [row("adam", FAST, seconds=1.0), row("muon", FAST, seconds=slower)]
    tasks = {"standard": rows, "deep": rows, "wide": rows}
    figure = time_to_loss.draw(tasks, TARGETS, "title", "")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes:
        low, high = axes.get_xlim()
        numbers = [
            tick.label1.get_window_extent(renderer)
            for tick in axes.xaxis.get_major_ticks()
            if low <= tick.get_loc() <= high
        ]
        assert len(numbers) >= 2
        assert all(a.x1 + 2 < b.x0 for a, b in pairwise(numbers))


def test_the_table_has_steps_and_seconds_with_their_spread() -> None:
    tasks = {"standard": [row("muon", SHORT, SLOW), row("adam", FAST, SLOW)]}
    caption = time_to_loss.caption(tasks, TARGETS, "Title", "", ["Made by: `x`"])
    table = [text for text in caption.splitlines() if text.startswith("|")]
    assert table[2:] == [
        "| Adam | 0, 1 | 3 ± 1 | 3.0 ± 1.4 |  | 6 ± 0 | 6.0 ± 0.0 |  | 8 ± 0 | 8.0 ± 0.0 |  |",
        "| Muon | 0, 1 | 4 ± 0 |  | 4.0 ± 0.0 | 6 (1 of 2 seeds) |  | 6.0 (1 of 2 seeds) "
        "| 8 (1 of 2 seeds) |  | 8.0 (1 of 2 seeds) |",
    ]
    assert caption.endswith("±: the standard deviation over the seeds.\n\nMade by: `x`\n")


@pytest.mark.parametrize(
    ("method", "device", "expected"),
    [
        ("locoprop-m", "cuda", True),
        ("locoprop-spectral", "cuda", True),
        ("rmsprop", "cuda", True),
        ("locoprop-m", "cpu", False),
        ("muon", "cuda", False),
        ("kfac@10", "cuda", False),
        ("exact-s-muon", "cuda", False),
    ],
)
def test_the_optimizer_says_whether_a_run_replays_cuda_graphs(
    method: str, device: str, expected: bool
) -> None:
    config = replace(small.SCALE.series("standard", method).config, device=device)
    assert timings.replays_cuda_graphs(config) is expected


def test_captions_name_the_methods_of_both_kinds() -> None:
    lines = [row("adam", FAST).line, row("muon", FAST).line, row("sgd", FAST, seconds=None).line]
    assert captions.how_timed(lines, "NVIDIA H200, tf32") == (
        "Seconds: each method alone for some epochs on NVIDIA H200, tf32. "
        "Replayed as CUDA graphs: Adam. Run eagerly: Muon."
    )
    on_cpu = line("adam", found("adam", FAST), seconds=1.0)
    assert captions.how_timed([on_cpu], "a CPU") == (
        "Seconds: each method alone for some epochs on a CPU."
    )


def test_it_has_all_methods_with_runs_and_timings(tmp_path: Path) -> None:
    """Also those that the tasks' own figures leave out; nothing is trained with only_existing."""
    order = small.order(tmp_path, only_existing=True)
    making = small.Making(order)
    assert time_to_loss.make_time_to_loss(making.maker).files == ()
    assert "time-to-loss: no run has a timing, so it is not drawn." in making.said
    images = small.IMAGES.load("curves")
    for method in ("adam", "pocoprop-m", "sgd"):
        config = small.SCALE.series("standard", method).config
        runner.run(config, tmp_path / "runs" / method, data=images)
        if method != "sgd":
            alone = timings.timing_config(config, 40)
            runner.run(alone, tmp_path / "runs" / "timings" / method, data=images)
    made = time_to_loss.make_time_to_loss(small.Making(order).maker)
    kinds = [path.name for path in made.files]
    assert kinds == ["time-to-loss.png", "time-to-loss.pdf", "time-to-loss.md"]
    caption = made.files[2].read_text()
    assert "\n| Adam | 0 |" in caption
    assert "\n| PocoProp-M | 0 |" in caption
    assert "| SGD |" not in caption
    assert "Made by: `locoprop figure time-to-loss`" in caption
    assert "## Deep autoencoder" in caption, "all tasks of this scale are the same one"


def test_a_timing_may_have_more_epochs_but_not_fewer(tmp_path: Path) -> None:
    config = small.SCALE.series("standard", "adam").config
    images = small.IMAGES.load("curves")
    for epochs in (2, 5):
        alone = replace(config, epochs=epochs)
        runner.run(alone, tmp_path / "runs" / "timings" / f"{epochs}", data=images)
    order = small.order(tmp_path)
    library = run_library.Library(order.folders, order.images, order.place)
    wanted = timings.timing_config(config, 40)
    assert wanted.epochs == 3
    assert [each.config.epochs for each in library.timings(wanted)] == [5]
