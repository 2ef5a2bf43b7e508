"""The page in a browser: what it shows is what the files say, and nothing leaves it.

One browser for all tests. Each test opens the page anew.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from study.report.made import MACHINE, data, made

from torch_locoprop.study import atomic_files
from torch_locoprop.study.data import datasets
from torch_locoprop.study.report import comparison, page
from torch_locoprop.study.report.gallery import gallery
from torch_locoprop.study.report.runs import Skipped, find, find_timings
from torch_locoprop.study.training.run_folder import RunFolder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    BINARY is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"
)
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Two seeds of one method, others that are worse, interrupted and diverged, and another task."""
    top = tmp_path_factory.mktemp("runs")
    elsewhere = {**MACHINE, "machine": EVIL}
    timed = [80.0, 70.0, 60.0]
    made(top / "timings" / "adam", timed, transfer="relu", seconds=0.3)
    together = {**MACHINE, "population": 2}
    made(top / "together", [80.0, 8.0], transfer="relu", seed=1, environment=together)
    return {
        "m0": made(top / "m0", [90.0, 40.0, 12.5, 10.0], "locoprop-m", checkpoint=True),
        "m1": made(top / "m1", [92.0, 44.0, 13.5, 11.0], "locoprop-m", seed=1),
        "adam": made(top / "adam", [90.0, 50.0, 20.0, 19.0], checkpoint=True),
        "kfac": made(top / "kfac", [90.0, 30.0, 15.0, 14.0], "kfac@3", environment=elsewhere),
        "half": made(top / "half", [90.0, 60.0], "rmsprop", epochs=3),
        "wild": made(top / "wild", [90.0, 9000.0], "sgd", epochs=3, diverged=True),
        "relu": made(top / EVIL.replace("/", "|"), [80.0, 8.0], transfer="relu"),
        "evil": made(top / "evil", [80.0, 9.0], transfer="relu", fields={"method": EVIL}),
    }


@pytest.fixture(scope="module")
def written(runs: dict[str, RunFolder]) -> Path:
    """The page over all runs."""
    top = runs["m0"].path.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load", lambda *_, **__: data())
        tasks = comparison.tasks(find([top])[0], find_timings([top]))
        galleries = [gallery(task, 4, None) for task in tasks]
    skipped = [Skipped(Path("broken"), "metrics.jsonl is empty")]
    atomic_files.write(
        top / "report.html", page.page("Methods & <more>", tasks, galleries, skipped)
    )
    return top / "report.html"


@pytest.fixture
def shown(browser: Any, written: Path) -> Iterator[Any]:
    """The open page; at the end, nothing was asked of a network and nothing went wrong in it."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(60_000)
    requests, troubles = [], []
    context.route(
        lambda url: not url.startswith(("file:", "data:", "blob:")),
        lambda route: (requests.append(route.request.url), route.abort()),
    )
    opened = context.new_page()
    opened.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
    opened.goto(written.as_uri())
    opened.wait_for_selector("#plot .scatterlayer")
    yield opened
    context.close()
    assert not requests
    assert not troubles


def curves(shown: Any) -> dict[str, Any]:
    """The lines that plotly has drawn, by name; bands and crosses are not lines."""
    traces = shown.evaluate(
        "document.getElementById('plot').data.filter(t => t.mode === 'lines' && !t.fill)"
        ".map(t => [t.name, Array.from(t.x), Array.from(t.y)])"
    )
    return {name: (x, y) for name, x, y in traces}


def axis(shown: Any, name: str) -> Any:
    return shown.evaluate(
        "name => { const a = document.getElementById('plot')._fullLayout[name];"
        " return {type: a.type, range: a.range, title: a.title.text}; }",
        name,
    )


def eventually(shown: Any, condition: str) -> None:
    """Wait for a condition; playwright's own wait evaluates text, which the policy forbids."""
    for _ in range(100):
        if shown.evaluate(condition):
            return
        shown.wait_for_timeout(50)
    pytest.fail(f"{condition} does not hold")


def press(shown: Any, name: str) -> None:
    button = shown.get_by_role("button", name=name, exact=True)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"


def column(shown: Any, key: str) -> list[str]:
    return [
        text.strip() for text in shown.locator(f"#ranking td[data-key='{key}']").all_inner_texts()
    ]


def test_what_is_read_first(shown: Any) -> None:
    assert shown.title() == "Methods & <more>"
    summary = shown.locator("#summary").inner_text()
    assert summary.startswith("locoprop-m has the lowest train loss after 3 epochs: 10.50, 25.0 %")
    assert (
        "1 of 6 runs interrupted. 1 of 6 runs diverged." in shown.locator("#cautions").inner_text()
    )
    box = shown.locator("#plot").bounding_box()
    assert box["y"] + box["height"] < 900, "the curves are above the fold"


def test_curves_are_those_of_the_files(shown: Any, runs: dict[str, RunFolder]) -> None:
    pair = list(zip(runs["m0"].metrics(), runs["m1"].metrics(), strict=True))
    drawn = curves(shown)
    assert list(drawn) == ["locoprop-m", "kfac@3", "adam", "rmsprop", "sgd"]
    x, y = drawn["locoprop-m"]
    assert x == [0, 1, 2, 3]
    assert y == pytest.approx([mean(row.train_loss for row in rows) for rows in pair])
    press(shown, "Test")
    press(shown, "By seconds")
    x, y = curves(shown)["locoprop-m"]
    assert x == pytest.approx([mean(row.seconds for row in rows) for rows in pair])
    assert y == pytest.approx([mean(row.test_loss for row in rows) for rows in pair])
    assert axis(shown, "yaxis")["title"] == "test loss per image"
    assert axis(shown, "xaxis")["title"] == "seconds of training"
    press(shown, "Every run")
    lines = shown.evaluate(
        "document.getElementById('plot').data.filter(t => t.name === 'locoprop-m')"
        ".map(t => Array.from(t.y))"
    )
    assert lines == [[row.test_loss for row in runs[name].metrics()] for name in ("m0", "m1")]


def legend(shown: Any) -> list[tuple[str, ...]]:
    """The texts of each entry of the legend."""
    return [tuple(text.split("\n")) for text in shown.locator("#legend .entry").all_inner_texts()]


def test_a_hover_reads_all_series_in_the_legend_by_value(shown: Any) -> None:
    box = shown.locator("#plot .nsewdrag").first.bounding_box()
    at_first = legend(shown)
    shown.mouse.move(box["x"] + 0.33 * box["width"], box["y"] + box["height"] / 2)
    shown.locator("#legend .title", has_text="train loss at epoch 1").wait_for()
    assert legend(shown) == [
        ("kfac@3", "30.00"),
        ("locoprop-m", "40.00 to 44.00, 2 of 2 seeds", "42.00"),
        ("adam", "50.00"),
        ("rmsprop", "60.00"),
        ("sgd", "9000.00"),
    ]
    shown.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + box["height"] / 2)
    shown.locator("#legend .title", has_text="at epoch 3").wait_for()
    ends = legend(shown)
    assert [row[0] for row in ends] == ["locoprop-m", "kfac@3", "adam", "rmsprop", "sgd"]
    assert [row[-1] for row in ends] == ["10.50", "14.00", "19.00", "–", "–"]
    shown.mouse.move(5, 5)
    shown.locator("#legend .title", has_text="final train loss").wait_for()
    assert legend(shown) == at_first


def test_a_hover_by_seconds_reads_the_last_epoch_within_them(shown: Any) -> None:
    press(shown, "By seconds")
    box = shown.locator("#plot .nsewdrag").first.bounding_box()
    shown.mouse.move(box["x"] + 0.85 * box["width"], box["y"] + box["height"] / 2)
    shown.locator("#legend .title", has_text="train loss after 0.2").wait_for()
    assert [row[-1] for row in legend(shown)] == ["13.00", "15.00", "20.00", "60.00", "9000.00"]


def test_nothing_covers_the_plot_under_the_pointer(shown: Any) -> None:
    box = shown.locator("#plot .nsewdrag").first.bounding_box()
    shown.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2)
    shown.locator("#legend .title", has_text="at epoch").wait_for()
    assert shown.locator("#plot .hoverlayer text").count() == 0
    assert shown.locator("#plot .hoverlayer .spikeline").count() > 0, "where it points is drawn"
    side = shown.locator("#legend").bounding_box()
    assert side["x"] >= box["x"] + box["width"]


def test_the_band_spans_the_seeds(shown: Any, runs: dict[str, RunFolder]) -> None:
    (band,) = shown.evaluate(
        "document.getElementById('plot').data.filter(t => t.fill).map(t => Array.from(t.y))"
    )
    losses = [[row.train_loss for row in runs[name].metrics()] for name in ("m1", "m0")]
    assert band == [*losses[0], *reversed(losses[1])]


def test_scale_and_range(shown: Any) -> None:
    low, high = axis(shown, "yaxis")["range"]
    assert low < 10.5
    assert high < 90.0
    assert shown.locator("#out-of-view").inner_text().startswith("Ends above the view: ")
    press(shown, "Whole run")
    assert axis(shown, "yaxis")["range"][1] > 92.0
    press(shown, "Log")
    after = axis(shown, "yaxis")
    assert after["type"] == "log"
    assert 10 ** after["range"][1] > 92.0
    assert 10 ** after["range"][0] < 10.0


def test_axes_can_be_read(shown: Any) -> None:
    """Numbers of four digits do not overlap the title, and no tick is at half an epoch."""
    shown.evaluate("() => { Plotly.relayout('plot', {'yaxis.range': [0, 9000]}); }")
    edges = (
        "const right = document.querySelector('#plot .ytitle').getBoundingClientRect().right;"
        "const lefts = [...document.querySelectorAll('#plot .ytick text')]"
        ".map(text => text.getBoundingClientRect().left);"
    )
    shown.locator("#plot .ytick text", has_text="8000").wait_for()
    eventually(shown, f"(() => {{ {edges} return right <= Math.min(...lefts); }})()")
    assert shown.locator("#plot .xtick text").all_text_contents() == ["0", "1", "2", "3"]


def test_machines_that_differ_are_named_beside_the_seconds(shown: Any) -> None:
    clock = shown.locator("#clock")
    assert not clock.is_visible()
    press(shown, "By seconds")
    assert f"These runs differ in machine: {EVIL}, m1." in clock.inner_text()


def test_the_legend_hides_and_shows(shown: Any) -> None:
    entry = shown.locator("#legend button[data-label='adam']")
    assert "19.00" in entry.inner_text()
    assert "2 seeds" in shown.locator("#legend button[data-label='locoprop-m']").inner_text()
    entry.focus()
    shown.keyboard.press("Enter")
    assert entry.get_attribute("aria-pressed") == "false"
    assert "adam" not in curves(shown)
    assert shown.locator("#out-of-view").inner_text().startswith("Switched off: 1 of 5 series;")
    shown.keyboard.press("Space")  # the focus is where it was
    assert "adam" in curves(shown)
    shown.get_by_role("button", name="Hide all").click()
    assert curves(shown) == {}
    shown.get_by_role("button", name="Show all").click()
    assert len(curves(shown)) == 5


def test_lines_of_one_colour_are_told_apart_by_their_swatches(shown: Any, tmp_path: Path) -> None:
    for index in range(14):
        made(tmp_path / f"{index}", [9.0, 2.0 + index], settings={"lr": 0.001 * (index + 1)})
    tasks = comparison.tasks(find([tmp_path])[0])
    text = page.page("One method", tasks, [gallery(task, 4, None) for task in tasks], [])
    atomic_files.write(tmp_path / "report.html", text)
    shown.goto((tmp_path / "report.html").as_uri())
    shown.wait_for_selector("#plot .scatterlayer")
    look = (
        "const look = path => { const s = getComputedStyle(path);"
        " return [s.strokeDasharray, s.stroke, s.strokeWidth]; };"
    )
    drawn = (
        f"(() => {{ {look} return Object.fromEntries("
        "[...document.querySelectorAll('#plot .trace.scatter')]"
        ".map(g => [g.__data__[0].trace.name, look(g.querySelector('.js-line'))])); })()"
    )
    swatches = (
        f"place => {{ {look} return Object.fromEntries("
        "[...document.querySelectorAll(`${place} [data-label]:has(.swatch)`)]"
        ".map(e => [e.dataset.label, look(e.querySelector('.swatch path'))])); }"
    )
    light = shown.evaluate(drawn)
    assert len({dash for dash, _, _ in light.values()}) == 14
    for place in ("#legend", "#ranking"):
        assert shown.evaluate(swatches, place) == light
    shown.emulate_media(color_scheme="dark")
    (colour,) = {colour for _, colour, _ in light.values()}
    eventually(shown, f"Object.values({drawn}).every(([, colour]) => colour !== '{colour}')")
    for place in ("#legend", "#ranking"):
        assert shown.evaluate(swatches, place) == shown.evaluate(drawn)


def test_seconds_of_runs_that_were_alone_are_told_from_own(shown: Any) -> None:
    shown.locator("#tasks button", has_text="relu").click()
    assert list(curves(shown)) == ["adam", "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;"]
    press(shown, "By seconds")
    clock = shown.locator("#clock").inner_text()
    assert "without other work on the machine: m1, 1 thread." in clock
    assert f"Not timed: {EVIL}." in clock
    assert shown.locator("#seconds").inner_text() == clock
    (adam, other) = curves(shown).values()
    assert adam == ([0, 0.3], [80.0, 8.0])
    assert other[0] == [None, None]
    assert axis(shown, "xaxis")["range"] == pytest.approx([0, 1.01 * 0.3])
    assert column(shown, "seconds") == ["0.3", "0.1\nown"]
    seconds = shown.get_by_role("button", name="seconds", exact=True)
    for _ in range(2):  # whichever way, after those that can be compared
        seconds.click()
        assert column(shown, "seconds") == ["0.3", "0.1\nown"]
    shown.locator("#level").fill("9")
    assert column(shown, "reach-seconds") == ["0.3", "–"]
    press(shown, "All details")
    told = shown.locator("#ranking .run p").all_inner_texts()
    (together,) = (text for text in told if text.startswith("seed 1:"))
    assert " in a population, environment " in together
    alone = [text for text in told if text != together]
    assert all(" 0.1 s, environment " in text for text in alone), "what the runs themselves took"


def test_the_ranking_sorts(shown: Any) -> None:
    names = ["locoprop-m", "kfac@3", "adam", "rmsprop", "sgd"]

    def rows() -> list[str]:
        return [row.get_attribute("data-label") for row in shown.locator("#ranking tbody tr").all()]

    assert rows() == names
    assert column(shown, "place") == ["1", "2", "3", "–", "–"]
    assert column(shown, "method")[3:] == [
        "rmsprop interrupted at epoch 1 of 3",
        "sgd diverged in epoch 1",
    ]
    assert column(shown, "train")[:3] == ["10.50\n10.00 to 11.00", "14.00", "19.00"]
    assert column(shown, "test")[4] == "–"
    test = shown.get_by_role("button", name="test loss")
    test.click()
    assert rows() == names
    test.click()
    assert rows() == ["rmsprop", "adam", "kfac@3", "locoprop-m", "sgd"]
    heading = shown.locator("#ranking th", has=test)
    assert heading.get_attribute("aria-sort") == "descending"
    shown.get_by_role("button", name="method", exact=True).click()
    assert rows() == sorted(names)


def test_epochs_to_a_level(shown: Any) -> None:
    shown.locator("#level").fill("20")
    assert column(shown, "reach") == ["2", "2", "2", "–", "–"]
    assert column(shown, "reach-seconds") == ["0.2", "0.2", "0.2", "–", "–"]
    shown.locator("#level").fill("14")
    assert column(shown, "reach") == ["2", "3", "–", "–", "–"]
    shown.locator("#level").fill("")
    assert set(column(shown, "reach")) == {"–"}


def test_the_filter(shown: Any) -> None:
    shown.locator("#filter").fill("PROP")
    assert [text.split("\n")[0] for text in column(shown, "train")] == ["10.50", "60.00"]
    shown.locator("#filter").fill("nothing like it")
    assert "No method matches." in shown.locator("#ranking").inner_text()


def test_every_setting_can_be_read(shown: Any, runs: dict[str, RunFolder]) -> None:
    shown.get_by_role("button", name="Settings and runs of locoprop-m").click()
    opened = shown.locator("#ranking .unfolded")
    names, values = (opened.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
    read = dict(zip(names, values, strict=True))
    config = runs["m0"].config()
    for name, value in config.settings.items():
        if isinstance(value, float | int):
            assert float(read[name]) == value
        else:
            assert read[name] == ("null" if value is None else value)
    assert float(read["weight_decay"]) == config.weight_decay
    assert {"warmup_epochs", "schedule", "precision", "device"} <= set(read)
    commands = opened.locator(".command code").all_inner_texts()
    assert ["--seed 0" in commands[0], "--seed 1" in commands[1]] == [True, True]
    press(shown, "Settings as columns")
    assert column(shown, "setting every") == ["", "3", "", "", ""]
    press(shown, "All details")
    assert shown.locator("#ranking .unfolded").count() == 5


def test_a_command_is_copied(shown: Any) -> None:
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Settings and runs of adam").click()
    shown.get_by_role("button", name="Copy").click()
    shown.get_by_role("button", name="Copied").wait_for()
    copied = shown.evaluate("navigator.clipboard.readText()")
    assert copied == shown.locator(".command code").inner_text()
    assert copied.startswith("locoprop train --method adam ")


def test_pictures_are_drawn_sharp(shown: Any) -> None:
    rows = shown.locator("#gallery .row")
    assert [row.locator("b").inner_text() for row in rows.all()] == [
        "original",
        "locoprop-m",
        "adam",
        "sgd",
    ]
    images = shown.evaluate(
        "[...document.querySelectorAll('#gallery img')]"
        ".map(i => [i.naturalWidth, i.naturalHeight, getComputedStyle(i).imageRendering])"
    )
    assert images == [[4, 4, "pixelated"]] * 12
    assert rows.nth(3).locator(".strip").inner_text() == "diverged in epoch 1"
    assert "kfac@3: no checkpoint.pt." in shown.locator("#missing").inner_text()


def test_tasks_are_apart_and_text_stays_text(shown: Any) -> None:
    environments = shown.locator("#environments").inner_text()
    assert EVIL in environments
    assert "2.9" in environments
    shown.locator("#tasks button", has_text="relu").click()
    assert shown.locator("#tasks button[aria-pressed='true']").inner_text() == "relu · 1 epoch"
    assert column(shown, "train") == ["8.00", "9.00"]
    assert column(shown, "method")[1] == EVIL
    assert shown.locator("#legend .name").all_inner_texts() == ["adam\n2 seeds", EVIL]
    drawn = list(curves(shown))
    assert drawn == ["adam", "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;"]
    assert shown.locator("img[src='x']").count() == 0
    assert "broken metrics.jsonl is empty" in shown.locator("#skipped").inner_text()


def test_nothing_sticks_out(shown: Any) -> None:
    press(shown, "All details")
    for width in (1400, 420):
        shown.set_viewport_size({"width": width, "height": 900})
        eventually(shown, f"document.documentElement.scrollWidth <= {width}")


def test_dark_and_printed(shown: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('plot')._fullLayout.font.color"
    light = shown.evaluate(paper), shown.evaluate(ink)
    shown.emulate_media(color_scheme="dark")
    eventually(shown, f"{ink} !== '{light[1]}'")
    assert shown.evaluate(paper) != light[0]
    shown.emulate_media(color_scheme="dark", media="print")
    eventually(shown, f"{ink} === '{light[1]}'")
    assert shown.evaluate(paper) == light[0]
    assert not shown.locator("#choices").is_visible()
    width = "document.querySelector('#plot .main-svg').getBoundingClientRect().width"
    assert shown.evaluate(width) == 680, "it fits A4 upright with margins of 12 mm"
    shown.emulate_media(media="screen")
    eventually(shown, f"{width} > 900")
