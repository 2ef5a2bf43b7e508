"""The figure of times to fixed train losses: points by hand, words for what has none, its caption."""

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
from torch_locoprop.study.figures.time_to_loss import Reached
from torch_locoprop.study.training import runner

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
        "| Adam | yes | 0, 1 | 3 ± 1 | 3.0 ± 1.4 | 6 ± 0 | 6.0 ± 0.0 | 8 ± 0 | 8.0 ± 0.0 |",
        "| Muon | no | 0, 1 | 4 ± 0 | 4.0 ± 0.0 | 6 (1 of 2 seeds) | 6.0 (1 of 2 seeds) "
        "| 8 (1 of 2 seeds) | 8.0 (1 of 2 seeds) |",
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
    assert "\n| Adam | no | 0 |" in caption
    assert "\n| PocoProp-M | no | 0 |" in caption
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
