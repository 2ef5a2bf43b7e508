"""Plots of losses: limits, legends, bands, divergence, seconds and captions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from drawn import DATA, ENVIRONMENT, FALLING, found, legend, line, picture

from torch_locoprop.study.figures import captions, catalog, style
from torch_locoprop.study.figures.catalog import LossFigure, Series
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.run_library import Found
from torch_locoprop.study.training import runner
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.run_result import RunResult


def test_the_legend_is_by_final_loss_and_names_what_diverged() -> None:
    lines = [
        line("sgd", found("sgd", [100.0, 5000.0], diverged=True)),
        line("adam", found("adam", [x + 5 for x in FALLING])),
        line("locoprop-m", found("locoprop-m", FALLING)),
    ]
    assert legend(picture(lines)) == ["LocoProp-M: 40.00", "Adam: 45.00", "SGD: diverged"]


def test_a_line_above_the_picture_is_marked() -> None:
    stuck = [100.0] + 10 * [95.0]
    lines = [
        line("adam", found("adam", [x + 1 for x in FALLING])),
        line("sgd", found("sgd", stuck)),
    ]
    lines += [line("locoprop-m", found("locoprop-m", FALLING))]
    figure = picture(lines)
    assert "SGD: 95.00 ↑" in legend(figure)
    bottom, top = figure.axes[0].get_ylim()
    assert bottom < 40 < 61 <= top < 95


def test_a_wide_range_of_losses_is_drawn_on_a_logarithmic_scale() -> None:
    stuck, late = [545.0] + 10 * [206.0], [545.0] + 5 * [207.0] + [120.0, 80.0, 70.0, 65.0, 62.0]
    lines = [line("adam", found("adam", stuck)), line("rmsprop", found("rmsprop", late))]
    lines += [line("locoprop-m", found("locoprop-m", FALLING))]
    axes = picture(lines).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "train loss, log scale"
    bottom, top = axes.get_ylim()
    assert 30 < bottom < 40
    assert 206 < top < 300
    narrow = picture(lines[2:]).axes[0]
    assert (narrow.get_yscale(), narrow.get_ylabel()) == ("linear", "train loss")


def test_seeds_are_a_mean_and_a_band() -> None:
    runs = [
        found("adam", [x + shift for x in FALLING], seed=n) for n, shift in enumerate((0, 3, 6))
    ]
    figure = picture([line("adam", *runs)])
    axes = figure.axes[0]
    assert np.allclose(axes.lines[0].get_ydata(), [x + 3 for x in FALLING])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices[:, 1]
    assert (corners.min(), corners.max()) == pytest.approx((40.0, 106.0))
    assert legend(figure) == ["Adam: 43.00"]


def test_one_seed_that_diverged_is_counted_and_does_not_spoil_the_mean() -> None:
    runs = [found("adam", FALLING), found("adam", [100.0, 9999.0], diverged=True, seed=1)]
    assert legend(picture([line("adam", *runs)])) == ["Adam: 40.00 (1 of 2 diverged)"]


def test_seconds_are_epochs_times_the_clock() -> None:
    lines = [line("adam", found("adam", FALLING), seconds=0.5), line("sgd", found("sgd", FALLING))]
    _, by_seconds = picture(lines).axes
    timed = [each for each in by_seconds.lines if len(each.get_xdata()) > 1]
    assert len(timed) == 1  # the line that was not timed is not drawn
    assert np.allclose(timed[0].get_xdata(), 0.5 * np.arange(1, 11))
    assert by_seconds.get_xscale() == "log"
    assert [text.get_text() for text in by_seconds.texts] == ["not timed: SGD"]


def test_seconds_begin_where_the_first_line_comes_into_the_picture() -> None:
    from_above = [100.0, 90.0, 80.0, *FALLING[1:]]
    lines = [line("adam", found("adam", from_above), seconds=0.5)]
    lines += [line("sgd", found("sgd", FALLING), seconds=10.0)]
    _, by_seconds = picture(lines).axes
    top = by_seconds.get_ylim()[1]
    first = 0.5 * next(n for n, loss in enumerate(from_above) if loss <= top)
    assert 0.5 < by_seconds.get_xlim()[0] < first < by_seconds.get_xlim()[1]


def test_an_empty_panel_says_so() -> None:
    texts = [text.get_text() for axes in picture([]).axes for text in axes.texts]
    assert texts == ["not run yet", "not timed yet"]


def test_train_and_test_losses_stand_together() -> None:
    figure = picture([line("adam", found("adam", FALLING))], "relu")
    assert legend(figure) == ["Adam: 40.00 / 50.00"]
    train, test = figure.axes
    assert np.allclose(test.lines[0].get_ydata(), np.add(train.lines[0].get_ydata(), 10))


def test_losses_that_are_not_finite_can_be_drawn(tmp_path: Path) -> None:
    lines = [line("sgd", found("sgd", [100.0, float("nan")], diverged=True))]
    assert legend(picture(lines)) == ["SGD: diverged"]
    style.save(picture(lines), tmp_path, "nan")


def test_variants_differ_in_dashes_and_none_is_pale() -> None:
    looks = [style.line_look("kfac", variant) for variant in range(4)]
    assert {look["color"] for look in looks} == {"#6a3d9a"}
    assert len({str(look["ls"]) for look in looks}) == 4


def test_files_are_replaced_whole_and_the_same_twice(tmp_path: Path) -> None:
    lines = [line("adam", found("adam", FALLING))]
    first = [path.read_bytes() for path in style.save(picture(lines), tmp_path / "new", "a")]
    second = [path.read_bytes() for path in style.save(picture(lines), tmp_path / "new", "a")]
    assert first == second
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.pdf", "a.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        style.save(picture(lines), tmp_path / "file", "a")


def footer(figure: LossFigure, runs: list[Found], *more: Any) -> str:
    return "\n".join(captions.footer_of(figure, runs, *more))


def test_the_footer_says_where_and_how() -> None:
    figure = catalog.loss_figure("standard", small.SCALE)
    runs = [found("adam", FALLING), found("adam", FALLING, seed=3)]
    text = footer(figure, runs, "a machine", ("SOAP (not run)",), "locoprop figure standard")
    for part in (
        *("784-6-3, tanh, batches of 20", "10 epochs", "seeds 0, 3"),
        *("NVIDIA H200, fp32, torch 2.11.0", "a machine", "SOAP (not run)"),
        *("Settings: given.", "Made by: `locoprop figure standard`"),
    ):
        assert part in text
    assert captions.subtitle_of(figure) == "small; 784-6-3, tanh, batches of 20"


def test_every_figure_of_losses_is_drawn(tmp_path: Path) -> None:
    """All layouts are drawn from the same few runs: a grid, two panels, one panel."""
    config = small.SCALE.series("standard", "adam").config
    runner.run(config, tmp_path / "runs" / "adam", data=small.IMAGES.load("curves"))
    making = small.Making(small.order(tmp_path, only_existing=True))
    names = ("first-order", "standard", "curves", "test-losses")
    for made in making(*names):
        assert [path.suffix for path in made.files] == [".png", ".pdf", ".md"]
        assert made.files[0].read_bytes().startswith(b"\x89PNG")
        assert made.files[1].read_bytes().startswith(b"%PDF")


def test_the_footer_says_where_settings_come_from() -> None:
    runs = [found(name, FALLING) for name in ("adam", "nesterov", "muon")]
    default = replace(runs[1].config, settings={})
    runs[1] = replace(runs[1], result=replace(runs[1].result, config=default))
    figure = catalog.loss_figure("standard", small.SCALE)
    text = footer(figure, runs, "", (), "")
    assert "Settings: Adam, Muon: given; Nesterov: untuned, as momentum." in text


def protocol_run(series: Series) -> Found:
    rows = tuple(Metrics(n, x, x, n, 1.0, False) for n, x in enumerate(FALLING))
    config = replace(series.config, seed=2, device="cuda", precision="tf32")
    return Found(RunResult(Path("run"), config, rows), DATA, ENVIRONMENT)


def test_settings_of_one_task_have_an_origin_of_their_own() -> None:
    figure = catalog.loss_figure("wide", PROTOCOL)
    runs = [protocol_run(each) for each in figure.panels[0].series[:2]]
    text = footer(figure, runs, "", (), "")
    assert (
        "RMSProp: the best of three rates for this model; Adam: tuned on mnist, 32 trials. "
        "Tuned on mnist: with the standard model, tanh, batches of 1000." in text
    )
    standard = catalog.loss_figure("standard", PROTOCOL)
    assert "with the standard model" not in footer(
        standard, [protocol_run(each) for each in standard.panels[0].series[:2]], "", (), ""
    )


def test_with_several_tasks_the_origin_names_its_own() -> None:
    figure = catalog.loss_figure("test-losses", PROTOCOL)
    runs = [protocol_run(panel.series[0]) for panel in figure.panels]
    assert (
        "RMSProp (wide), RMSProp (deep): the best of three rates for this model; "
        "RMSProp (relu), RMSProp (fashion-mnist), RMSProp (curves): tuned on mnist, the best of"
        in footer(figure, runs, "", (), "")
    )


def test_solvers_are_named_with_their_own_searches() -> None:
    figure = catalog.loss_figure("inner-solvers", PROTOCOL)
    text = footer(figure, [protocol_run(each) for each in figure.panels[0].series], "", (), "")
    assert "local SGD, local Adagrad: tuned on mnist, 8 trials of 30 epochs" in text
    assert "local RMSProp: reference." in text


def test_settings_that_were_found_at_another_number_of_iterations_are_called_that() -> None:
    run = found("locoprop-m", FALLING)
    runs = []
    for steps in (10, 5):
        config = replace(run.config, settings={"local_steps": steps})
        runs.append(replace(run, result=replace(run.result, config=config)))
    figure = catalog.loss_figure("s-vs-m", small.SCALE)
    text = footer(figure, runs, "", (), "")
    assert "LocoProp-M: reference; LocoProp-M with T = 5: reference, at T = 10." in text


def test_settings_for_a_number_of_iterations_have_an_origin_of_their_own() -> None:
    figure = catalog.loss_figure("s-vs-m", PROTOCOL)
    text = footer(figure, [protocol_run(each) for each in figure.panels[0].series], "", (), "")
    assert (
        "LocoProp-S with T = 1, LocoProp-M with T = 1: one method, tuned on mnist, 32 trials of 60 "
        "epochs; LocoProp-S with T = 5: tuned on mnist, 32 trials, at T = 10;" in text
    )
    assert "LocoProp-S with T = 50, LocoProp-M with T = 50: tuned on mnist, 12 trials" in text
