"""Figures in print: fonts, lines that are told apart without colour, frames, titles and captions."""

import math
import re
import zlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import small
from drawn import FALLING, found, legend, line, picture
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUP

from torch_locoprop.study import methods
from torch_locoprop.study.figures import (
    captions,
    catalog,
    loss_frame,
    loss_lines,
    matching_loss,
    style,
)
from torch_locoprop.study.figures.final_table import final_table
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.profile import make_profile
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import IMAGES, QUICK
from torch_locoprop.study.figures.time_to_loss import make_time_to_loss
from torch_locoprop.study.training import runner

LOSSES = catalog.LOSS_FIGURES
SCALES = {"paper": PROTOCOL, "quick": QUICK}
WHITE = "#ffffff"


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def curves(axes: Axes) -> list[Line2D]:
    """The lines of losses; marks at the edge of the frame have no line."""
    return [each for each in axes.lines if each.get_linestyle() != "None"]


def carets(axes: Axes) -> list[tuple[str, float, float]]:
    """The marks at the upper edge: colour, x and y."""
    return [
        (each.get_color(), float(x), float(y))
        for each in axes.lines
        if each.get_marker() == CARETUP
        for x, y in zip(each.get_xdata(), each.get_ydata(), strict=True)
    ]


def test_pdf_files_embed_fonts_of_type_42(tmp_path: Path) -> None:
    pictures = {"losses": picture([line("adam", found("adam", FALLING))])}
    pictures["matching"] = matching_loss.draw()
    for name, figure in pictures.items():
        content = style.save(figure, tmp_path, name)[1].read_bytes()
        objects = content + b"".join(
            zlib.decompress(part)
            for part in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", content, re.DOTALL)
        )
        kinds = set(re.findall(rb"/Subtype\s*/(Type3|TrueType|CIDFontType2)", objects))
        assert kinds
        assert b"Type3" not in kinds


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", SCALES)
def test_lines_are_told_apart_without_colour(name: str, scale: str) -> None:
    """In grey and for the colour-blind, each pair of lines differs in its marker or its dashes."""
    for panel in catalog.loss_figure(name, SCALES[scale]).panels:
        looks = [
            (
                style.marker_look(each.painted_as)["marker"],
                str(style.line_look(each.painted_as, each.variant)["ls"]),
            )
            for each in panel.series
        ]
        assert len(set(looks)) == len(looks)


def test_every_line_is_dark_enough_to_be_seen_on_white() -> None:
    """WCAG asks for a contrast of 3 for graphics, for dotted lines as for solid ones."""
    for name in (*methods.names(), "not registered", *style.ITERATIONS):
        for variant in range(4):
            assert contrast(style.line_look(name, variant)["color"], WHITE) >= 3, name
    for shade in matching_loss.SHADES:
        assert contrast(shade, WHITE) >= 3


def test_dashes_have_more_ink_than_a_third() -> None:
    """Sparse dots are lost in print."""
    for dashes in (*style.DASHES[1:], *style.OVER):
        lengths = dashes[1]
        assert sum(lengths[::2]) / sum(lengths) > 1 / 3


def test_no_two_methods_share_a_marker() -> None:
    markers = [methods.marker(name) for name in methods.names()]
    assert len(set(markers)) == len(markers)
    assert style.DIVERGED not in markers
    assert methods.marker("kfac@10") == methods.marker("kfac")
    assert methods.marker("not registered") not in markers


def test_markers_of_different_lines_are_staggered() -> None:
    lines = [line(name, found(name, FALLING)) for name in ("adam", "sgd")]
    first, second = curves(picture(lines).axes[0])
    assert {first.get_marker(), second.get_marker()} == {"D", "|"}
    # The end of a line always has a marker; lines of eleven points cannot differ in all others.
    assert set(first.get_markevery()) != set(second.get_markevery())
    assert first.get_markevery()[-1] == second.get_markevery()[-1] == len(FALLING) - 1


@pytest.mark.parametrize("count", [2, 5, 13])
def test_no_marker_lies_on_that_of_the_end(count: int) -> None:
    losses = [100.0 - epoch / 2 for epoch in range(101)]
    names = methods.names()[:count]
    for drawn in curves(picture([line(name, found(name, losses)) for name in names]).axes[0]):
        marks = drawn.get_markevery()
        assert marks[-1] == 100
        assert 5 < 100 - marks[-2] < 30


def test_the_methods_of_the_figures_have_colours_that_can_be_told_apart() -> None:
    """At least 20 apart in CIELAB, where 2.3 can just be seen side by side."""
    compared = (*catalog.COMPARED, "kfac", "shampoo", *catalog.newer_methods())
    assert "locoprop-spectral" in compared
    for one, other in combinations(compared, 2):
        first, second = (_lab(methods.colour(name)) for name in (one, other))
        assert math.dist(first, second) > 20, (one, other)


def _lab(colour: str) -> tuple[float, float, float]:
    """Return L, a and b of a colour `#rrggbb`, for the white of D65."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lines_that_coincide_are_drawn_with_gaps() -> None:
    close = [x + 0.05 for x in FALLING]
    lines = [
        line("momentum", found("momentum", FALLING)),
        line("nesterov", found("nesterov", close)),
        line("muon", found("muon", [x + 0.02 for x in FALLING])),
        line("adam", found("adam", [x + 5 for x in FALLING])),
    ]
    figure = picture(lines)
    momentum, nesterov, muon, adam = curves(figure.axes[0])
    dashes = [str(each._dash_pattern) for each in (momentum, nesterov, muon)]
    assert len(set(dashes)) == 3
    assert momentum.get_linestyle() == adam.get_linestyle() == "-"
    handles = figure.axes[-1].get_legend().legend_handles
    shown = {h.get_label().partition(":")[0]: str(h._dash_pattern) for h in handles}
    assert [shown[name] for name in ("Momentum", "Nesterov", "Muon")] == dashes


def test_no_solid_line_hides_one_that_has_gaps() -> None:
    """Three lines, each on the one before, of which the first and the last are apart."""
    step = 0.7 * loss_lines.CLOSE * 20
    lines = [
        line(name, found(name, [x + number * step for x in FALLING]))
        for number, name in enumerate(("momentum", "nesterov", "muon"))
    ]
    bounds = (40.0, 60.0)
    dashes = [look["ls"] for look in loss_lines.looks(lines, "train_loss", bounds)]
    assert dashes[0] == "-"
    assert "-" not in dashes[1:]
    assert dashes[1] != dashes[2]
    apart = loss_lines.looks([lines[0], lines[2]], "train_loss", bounds)
    assert [look["ls"] for look in apart] == ["-", "-"]


@pytest.mark.parametrize("name", ["first-order", "relu", "test-losses"])
@pytest.mark.parametrize("above", [1, 2, 4])
def test_no_name_covers_the_end_of_a_line(name: str, above: int) -> None:
    """Names of lines that end above the frame are over all ends in it."""
    low = ("adam", "muon", "soap", "kfac@2", "exact-s-muon", "locoprop-spectral")
    lines = [
        line(each, found(each, [x + number / 50 for x in FALLING]))
        for number, each in enumerate(low)
    ]
    high = [*FALLING[:-1], 60.5]  # just below where the frame would end without names
    lines.append(line("rmsprop", found("rmsprop", high)))
    names = ("sgd", "momentum", "nesterov", "adagrad")[:above]
    for number, each in enumerate(names):  # identical lines would be one
        lines.append(line(each, found(each, [500.0 + number] * len(FALLING))))
    figure = picture(lines, name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert len(boxes) == above
        for each in curves(axes):
            end = axes.transData.transform((each.get_xdata()[-1], each.get_ydata()[-1]))
            assert not any(box.contains(*end) for box in boxes), each.get_color()


def test_identical_lines_are_one_line_under_both_names() -> None:
    lines = [
        line("momentum", found("momentum", FALLING)),
        line("nesterov", found("nesterov", FALLING)),
    ]
    figure = picture(lines, "first-order")
    assert legend(figure) == ["Momentum and\nNesterov: 40.00"]
    assert len(curves(figure.axes[0])) == 1


def test_no_line_leaves_the_frame_without_a_mark() -> None:
    out_and_back = [*FALLING[:4], 300.0, *FALLING[5:]]
    rising = [*FALLING[:6], 60.0, 90.0, 120.0, 150.0, 180.0]
    never = [500.0] * len(FALLING)
    lines = [
        line("adam", found("adam", FALLING)),
        line("muon", found("muon", [x + 1 for x in FALLING])),
        line("rmsprop", found("rmsprop", out_and_back)),
        line("sgd", found("sgd", rising)),
        line("adagrad", found("adagrad", never)),
    ]
    axes = picture(lines, "first-order").axes[0]
    top = axes.get_ylim()[1]
    assert top < 150
    marked = carets(axes)
    assert {y for _, _, y in marked} == {top}
    assert (methods.colour("rmsprop"), 4.0, top) in marked
    assert (methods.colour("sgd"), 10.0, top) in marked
    assert (methods.colour("adagrad"), 10.0, top) in marked
    assert not [each for each in marked if each[0] == methods.colour("adam")]
    named = [text.get_text() for text in axes.texts]
    assert named == ["SGD: 180.00 ↑", "Adagrad: 500.00 ↑"]
    for each in curves(axes):
        y = np.asarray(each.get_ydata())
        expected = set(loss_frame.exits(y, top))
        assert expected == {int(x) for colour, x, _ in marked if colour == each.get_color()}


@pytest.mark.parametrize(
    ("losses", "marked"),
    [
        ([9, 5, 1, 1], []),
        ([9, 1, 5, 7, 6, 1], [3]),
        ([9, 1, 5, 7, 1, 1, 8], [3, 6]),
        ([9, 1, 5, 6, 7], [4]),
        ([9, 8, 7], [2]),
        ([9, 1, float("nan")], [2]),
    ],
)
def test_exits_are_peaks_after_the_line_came_in(losses: list[float], marked: list[int]) -> None:
    assert loss_frame.exits(np.array(losses, dtype=float), 4.0) == marked


@pytest.mark.parametrize("method", ["locoprop-s", "locoprop-m"])
def test_locoprops_own_test_losses_stay_in_the_frame(method: str) -> None:
    """A test loss that rises far above those of other methods is drawn too."""
    rising = [*FALLING[:4], 48.0, 52.0, 58.0, 64.0, 68.0, 72.0, 76.0]
    lines = [line(name, found(name, FALLING)) for name in ("adam", "muon", "kfac@2")]
    lines.append(line(method, found(method, rising)))
    for axes in picture(lines, "relu").axes:
        own = next(each for each in curves(axes) if each.get_color() == methods.colour(method))
        assert max(own.get_ydata()[5:]) < axes.get_ylim()[1]
        assert not carets(axes)


def test_a_diverged_line_ends_in_a_cross_in_the_frame() -> None:
    lines = [line("adam", found("adam", FALLING))]
    lines += [line("sgd", found("sgd", [100.0, 60.0, 1e9], diverged=True))]
    axes = picture(lines).axes[0]
    (cross,) = [each for each in axes.lines if each.get_marker() == style.DIVERGED]
    assert list(cross.get_xdata()) == [2.0]
    assert list(cross.get_ydata()) == [axes.get_ylim()[1]]
    assert [text.get_text() for text in axes.texts] == ["SGD: diverged ↑"]


def titles(figure: Figure) -> list[str]:
    return [axes.get_legend().get_title().get_text() for axes in figure.axes if axes.get_legend()]


def test_the_legend_says_which_loss_at_which_epoch() -> None:
    lines = [line("adam", found("adam", FALLING))]
    config = replace(lines[0].series.config, epochs=100)
    lines = [replace(lines[0], series=replace(lines[0].series, config=config))]
    assert titles(picture(lines)) == ["train loss at epoch 100"]
    assert titles(picture(lines, "relu")) == ["train / test loss at epoch 100"]
    assert titles(picture(lines, "test-losses")) == ["test loss at epoch 100"] * 6


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("standard", {"name": "mnist", "source": "published IDX files"}, "MNIST"),
        ("fashion-mnist", {"name": "fashion-mnist", "source": "IDX files"}, "Fashion-MNIST"),
        ("curves", {"name": "curves", "source": "generated"}, "CURVES (generated)"),
        ("curves", {"name": "curves", "source": "digs3pts_1.mat"}, "CURVES"),
    ],
)
def test_the_title_names_the_data_set(name: str, data: dict[str, str], named: str) -> None:
    run = replace(found("adam", FALLING), data=data)
    assert captions.title_of(catalog.loss_figure(name, PROTOCOL), [run]) == (
        f"Standard autoencoder on {named}"
    )


def texts(figure: Figure) -> str:
    """All text of a picture."""
    return "\n".join(
        each.get_text() for each in figure.findobj(match=lambda a: hasattr(a, "get_text"))
    )


def test_provenance_is_in_the_caption_and_in_the_picture_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small.SCALE.series("standard", "adam").config
    runner.run(config, tmp_path / "runs" / "adam", data=small.IMAGES.load("curves"))
    drawn: list[Figure] = []
    save = style.save
    monkeypatch.setattr(
        style, "save", lambda figure, *to: (drawn.append(figure), save(figure, *to))[1]
    )
    for wanted in (False, True):
        order = small.order(tmp_path, only_existing=True, provenance=wanted)
        (made,) = small.Making(order)("curves")
        caption = made.files[2].read_text()
        assert caption.startswith("# Standard autoencoder on CURVES (generated)\n")
        for part in ("Made by: `locoprop figure curves`", "torch ", "Missing: ", "| Adam | "):
            assert part in caption
        assert ("Made by" in texts(drawn[-1])) is wanted
        assert "autoencoder on CURVES (generated)" in texts(drawn[-1])
    (made,) = small.Making(small.order(tmp_path, only_existing=True))("test-losses")
    assert "Wide autoencoder on CURVES (generated)" in texts(drawn[-1])
    assert "## Wide autoencoder on CURVES (generated)" in made.files[2].read_text()


def test_a_quick_figure_states_the_number_of_images_once() -> None:
    figure = catalog.loss_figure("standard", QUICK)
    run = replace(
        found("adam", FALLING),
        data={"name": "curves", "source": f"the first {sum(IMAGES)} generated", "fingerprint": "0"},
    )
    lines = [[line("adam", run)]] * 2
    title, subtitle = captions.title_of(figure, [run]), captions.subtitle_of(figure)
    footer = captions.footer_of(figure, [run], "", (), "locoprop figure standard --quick")
    caption = captions.caption(figure, lines, title, footer)
    for text in (caption, "\n".join([title, subtitle, *footer])):
        assert len(re.findall(r"\b[45],?000\b", text)) == 1


def test_the_table_has_mean_and_spread_over_seeds() -> None:
    runs = [found("adam", [*FALLING[:-1], end], seed=n) for n, end in enumerate((40.0, 41.0, 42.0))]
    lost = found("adam", [100.0, 9e9], diverged=True, seed=3)
    lines = [
        line("sgd", found("sgd", [9.0, 9e9], diverged=True)),
        line("adam", *runs, lost),
        line("muon", found("muon", FALLING), seconds=0.25),
    ]
    assert final_table(lines).splitlines()[2:] == [
        "| Muon | 40.00 | 50.00 | 0 | 0.250 |",
        "| Adam | 41.00 ± 1.00 | 51.00 ± 1.00 | 0, 1, 2 (1 diverged) | not timed |",
        "| SGD | diverged | diverged | 0 | not timed |",
    ]
    assert "seconds" not in final_table(lines[:2])
    figure = catalog.loss_figure("first-order", small.SCALE)
    assert "standard deviation" in captions.caption(figure, [lines], "title", [])
    assert "standard deviation" not in captions.caption(figure, [lines[2:]], "title", [])


RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
def test_the_committed_figures_are_those_of_the_committed_runs(tmp_path: Path) -> None:
    """Every figure has its three files, no font of type 3, and the caption of its runs."""
    folder = RESULTS / "figures"
    for name in catalog.NAMES:
        assert (folder / f"{name}.png").is_file()
        assert (folder / f"{name}.md").is_file()
        assert b"/Type3" not in (folder / f"{name}.pdf").read_bytes()
    wanted = {"scale": PROTOCOL, "folders": (RESULTS,), "without": (), "only_existing": True}
    added = ("locoprop-spectral",)
    order = small.order(tmp_path, **wanted, added=added, images=Images(), seeds=(0, 1, 2))
    making = small.Making(order)
    made = [
        *making("standard", "relu"),
        *(m(making.maker) for m in (make_profile, make_time_to_loss)),
    ]
    for each in made:
        text = each.files[2].read_text().partition("Made by")[0]
        assert text
        assert text == (folder / f"{each.name}.md").read_text().partition("Made by")[0]
