"""The performance profile: shares by hand, no gap in what is compared, and its caption."""

from dataclasses import replace
from pathlib import Path

import pytest
import small
from drawn import FALLING, found, line

from torch_locoprop.study.figures import profile
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.profile import Compared
from torch_locoprop.study.training import runner


def ending(method: str, loss: float, *, diverged: bool = False) -> Drawn:
    return line(method, found(method, [*FALLING[:-1], loss], diverged=diverged))


LINES = {
    "one": {"adam": ending("adam", 50.0), "sgd": ending("sgd", 60.0), "muon": ending("muon", 40.0)},
    "two": {"adam": ending("adam", 30.0), "sgd": ending("sgd", 20.0)},
    "three": {"adam": ending("adam", 10.0), "sgd": ending("sgd", 10.0, diverged=True)},
}


def test_methods_are_compared_where_all_have_runs() -> None:
    assert profile.compared(LINES) == Compared(("one", "two", "three"), ("adam", "sgd"))
    assert profile.compared({"one": LINES["one"]}).methods == ("adam", "sgd", "muon")
    assert profile.compared({}) == Compared((), ())


def test_shares_are_those_by_hand() -> None:
    """The best of a task counts, even if the profile leaves its method out."""
    over = Compared(("one", "two", "three"), ("adam", "sgd"))
    values = profile.ratios(LINES, over, "train_loss")
    assert values["adam"] == pytest.approx([1.25, 1.5, 1.0])
    assert values["sgd"] == [1.5, 1.0, float("inf")]
    assert [profile.share(values["adam"], x) for x in (1, 1.25, 1.4, 2)] == pytest.approx(
        [1 / 3, 2 / 3, 2 / 3, 1]
    )
    assert profile.share(values["sgd"], 100) == pytest.approx(2 / 3)


def test_the_best_interval_of_a_task_counts() -> None:
    lines = [ending("kfac@1", 50.0), ending("kfac@10", 45.0), ending("kfac@100", 47.0)]
    assert profile.best_lines(lines)["kfac"].series.config.method == "kfac@10"


def test_the_drawn_steps_are_the_shares() -> None:
    over = Compared(("one", "two", "three"), ("adam", "sgd"))
    figure = profile.draw(LINES, over, "title", "subtitle")
    for axes, loss in zip(figure.axes, profile.LOSSES, strict=True):
        values = profile.ratios(LINES, over, loss)
        for at, (drawn, name) in enumerate(zip(axes.lines, over.methods, strict=True)):
            for x, y in zip(drawn.get_xdata(), drawn.get_ydata(), strict=True):
                factor = 1 + x / 100 + 1e-9
                apart = profile.APART * (at - 0.5)
                assert y == pytest.approx(profile.share(values[name], factor) + apart)
        assert len({drawn.get_marker() for drawn in axes.lines}) == 2
    names = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert names == ["Adam", "SGD"], "by the mean ratio of train losses"


def test_equal_shares_do_not_hide_each_other() -> None:
    tasks = {"one": {name: ending(name, 50.0) for name in ("adam", "sgd", "muon")}}
    over = profile.compared(tasks)
    for axes in profile.draw(tasks, over, "title", "subtitle").axes:
        ends = [round(float(drawn.get_ydata()[-1]), 6) for drawn in axes.lines]
        assert len(set(ends)) == 3
        assert max(ends) - min(ends) < 1 / 7, "less than the share of a task"


def test_it_is_made_from_existing_runs(tmp_path: Path) -> None:
    order = small.order(tmp_path, only_existing=True)
    nothing = profile.make_profile(small.Making(order).maker)
    assert nothing.files == ()
    images = small.IMAGES.load("curves")
    for task in ("standard", "relu"):
        for method in ("adam", "rmsprop"):
            config = small.SCALE.series(task, method).config
            runner.run(config, tmp_path / "runs" / f"{task}-{method}", data=images)
    made = profile.make_profile(small.Making(order).maker)
    assert [path.name for path in made.files] == ["profile.png", "profile.pdf", "profile.md"]
    assert len(made.runs) == 4
    caption = made.files[2].read_text()
    assert "| method | standard | relu |" in caption, "tasks with the same runs are one"
    assert "Made by: `locoprop figure profile`" in caption
    tuned = replace(order, without=(*order.without, "rmsprop"))
    assert profile.make_profile(small.Making(tuned).maker).files == ()
