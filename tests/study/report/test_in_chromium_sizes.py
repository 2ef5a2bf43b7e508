"""The page at widths from 390 to 1600 pixels, light and dark, with 2 and with 40 runs."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study.report.made import data, made
from study.report.test_in_chromium import BINARY, NAMES, eventually, playwright

from torch_locoprop.study import atomic_files
from torch_locoprop.study.data import datasets
from torch_locoprop.study.report import comparison, page
from torch_locoprop.study.report.gallery import gallery
from torch_locoprop.study.report.runs import find

pytestmark = pytest.mark.skipif(
    BINARY is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"
)
WIDTHS = (390, 600, 861, 1100, 1600)
METHODS = (
    *("locoprop-m", "locoprop-s", "adam", "rmsprop", "sgd", "kfac@10", "shampoo@100", "muon"),
    *("exact-s-muon", "momentum"),
)
OTHER_TASKS = (
    *({"model": "16-3"}, {"transfer": "relu"}, {"batch_size": 6}, {"model": "16-8-8-8-4-2"}),
    *({"model": "16-4", "transfer": "relu"}, {"model": "16-5"}, {"model": "16-7"}),
    *({"batch_size": 2}, {"batch_size": 1}, {"model": "16-3", "batch_size": 6}),
    {"model": "16-8-8-8-4-2", "transfer": "relu", "batch_size": 6},
)


def falling(rate: float, end: float) -> list[float]:
    return [end + 90 * math.exp(-rate * epoch) for epoch in range(13)]


def few(top: Path) -> None:
    """Two runs."""
    made(top / "a", falling(0.5, 10.0), "locoprop-m", checkpoint=True)
    made(top / "b", falling(0.4, 12.0))


def many(top: Path) -> None:
    """Forty runs of ten methods with long labels, some interrupted or diverged, and twelve tasks."""
    made(top / "wild", [90.0, 60.0, 9e7], "adagrad", epochs=12, diverged=True, checkpoint=True)
    for index in range(3):
        made(top / f"done{index}", [90.0, *falling(0.1, 30.0)[1:]], "nesterov")
    for index in range(2):
        made(top / f"cut{index}", [90.0, 50.0, 49.0], "nesterov", epochs=12)
    for index in range(34):
        own = {"lr": 0.001234567 * (index + 1), "momentum": 0.9 + index / 1000}
        method = METHODS[index % len(METHODS)]
        settings = own if method != "sgd" and "shampoo" not in method else {"lr": own["lr"]}
        losses = falling(0.1 + index / 60, 10 + index / 4)
        made(top / f"{index}", losses, method, settings=settings, checkpoint=index < 3)
    for index, config in enumerate(OTHER_TASKS):
        made(top / f"task{index}", falling(0.5, 5.0), **config)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for make in (few, many):
        top = tmp_path_factory.mktemp(make.__name__)
        make(top)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets, "load", lambda *_, **__: data())
            tasks = comparison.tasks(find([top])[0])
            galleries = [gallery(task, 8, None) for task in tasks]
        found[make.__name__] = top / "report.html"
        atomic_files.write(found[make.__name__], page.page(make.__name__, tasks, galleries, []))
    assert len(OTHER_TASKS) == 11
    return found


@pytest.fixture
def opening(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a page; at the end, no script has failed."""
    contexts, troubles = [], []

    def opened(name: str, width: int = 1100, fragment: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900})
        context.set_default_timeout(60_000)
        contexts.append(context)
        shown = context.new_page()
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.goto(pages[name].as_uri() + fragment)
        shown.wait_for_selector("#plot .scatterlayer")
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert not troubles


def at_each_width(shown: Any) -> Iterator[int]:
    """Give the page each width, after its plot has followed."""
    for width in WIDTHS:
        shown.set_viewport_size({"width": width, "height": 844 if width < 861 else 900})
        fits = "(p => p._fullLayout.width <= p.clientWidth + 1)(document.getElementById('plot'))"
        eventually(shown, f"innerWidth === {width} && {fits}")
        yield width


def box(shown: Any, selector: str) -> dict[str, float]:
    return dict(shown.locator(selector).first.bounding_box())


@pytest.mark.parametrize("name", ["few", "many"])
def test_the_page_fits(opening: Any, name: str) -> None:
    shown = opening(name)
    shown.get_by_role("button", name="Settings as columns").click()
    shown.get_by_role("button", name="All details").click()
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        for width in at_each_width(shown):
            eventually(shown, f"document.documentElement.scrollWidth <= {width}")
            # What is wider than the page scrolls inside it.
            wide = shown.evaluate(
                "[...document.querySelectorAll('body *')]"
                ".filter(e => !e.closest('.scroll, #tasks, #plot')"
                f" && e.getBoundingClientRect().right > {width} + 1).map(e => e.tagName + e.id)"
            )
            assert wide == [], (scheme, width)
            wider, overflow = shown.evaluate(
                "(s => [s.scrollWidth > s.clientWidth, getComputedStyle(s).overflowX])"
                "(document.querySelector('#ranking').parentElement)"
            )
            assert overflow == "auto"
            assert wider or name == "few", "the table with all settings is wider than the page"


def test_the_method_stays_beside_its_settings(opening: Any) -> None:
    shown = opening("many")
    shown.get_by_role("button", name="Settings as columns").click()
    for width in at_each_width(shown):
        shown.evaluate("document.querySelector('#ranking').parentElement.scrollLeft = 400")
        region, name = box(shown, ".scroll"), box(shown, "#ranking td[data-key='method']")
        assert name["x"] == pytest.approx(region["x"], abs=1), width
        assert name["width"] < 0.62 * region["width"], width


def test_twelve_tasks_take_little_room(opening: Any) -> None:
    shown = opening("many")
    names = shown.locator("#tasks button").all_inner_texts()
    assert len(set(names)) == len(names) == 12
    assert not [name for name in names if "curves" in name or "epochs" in name]
    for width in at_each_width(shown):
        assert box(shown, "#tasks")["height"] < (60 if width < 861 else 120), width
        shown.locator("#tasks button").first.click()
        assert box(shown, "#plot")["y"] < 844, "the curves begin on the first screen"
        shown.locator("#tasks button").last.click()
        chosen = shown.locator("#tasks button[aria-pressed='true']").bounding_box()
        assert chosen["x"] >= 0, "what is chosen is in view"
        assert chosen["x"] + chosen["width"] <= width


@pytest.mark.parametrize("name", ["few", "many"])
def test_the_legend_is_whole_and_beside_or_below_the_plot(opening: Any, name: str) -> None:
    shown = opening(name)
    assert shown.locator("#curves .entry").count() == (2 if name == "few" else 36)
    for width in at_each_width(shown):
        cut = shown.evaluate(
            "(l => [l.scrollHeight - l.clientHeight, l.scrollWidth - l.clientWidth,"
            " ...[...l.querySelectorAll('.entry, .name, .value')]"
            ".map(e => e.scrollWidth - e.clientWidth)])(document.getElementById('curves'))"
        )
        assert max(cut) <= 1, width
        plot, legend = box(shown, "#plot .nsewdrag"), box(shown, "#legend")
        if width < 861:
            assert legend["y"] >= plot["y"] + plot["height"], width
        else:
            assert legend["x"] >= plot["x"] + plot["width"], width
        if name == "many":
            others = box(shown, "#others")
            assert others["y"] >= max(each["y"] + each["height"] for each in (plot, legend))


@pytest.mark.parametrize("name", ["few", "many"])
@pytest.mark.parametrize("width", [390, 1600])
def test_the_losses_under_the_pointer_are_by_value_and_outside(
    opening: Any, name: str, width: int
) -> None:
    shown = opening(name, width)
    shown.evaluate("document.getElementById('plot').scrollIntoView()")
    plot = box(shown, "#plot .nsewdrag")
    shown.mouse.move(plot["x"] + 0.5 * plot["width"], plot["y"] + plot["height"] / 2)
    shown.locator("#legend .title", has_text="train loss at epoch 6").wait_for()
    visible = "#curves .entry[aria-pressed='true'] .value"
    values = [float(text) for text in shown.locator(visible).all_inner_texts()]
    assert values == sorted(values)
    assert len(values) == (2 if name == "few" else 16)
    assert shown.locator("#plot .hoverlayer text").count() == 0
    first = shown.locator("#legend .entry").first.bounding_box()
    assert first["y"] + first["height"] <= shown.viewport_size["height"], "on the same screen"


def test_method_names_wrap_under_themselves(opening: Any) -> None:
    shown = opening("many")
    for width in at_each_width(shown):
        rows = shown.evaluate(
            "[...document.querySelectorAll('#ranking td[data-key=method] .named')].map(n => {"
            " const range = document.createRange(); range.selectNodeContents(n.lastElementChild);"
            " const lines = [...range.getClientRects()];"
            " const swatch = n.firstElementChild.getBoundingClientRect();"
            " const free = n.closest('td').getBoundingClientRect().right"
            " - Math.max(...lines.map(r => r.right));"
            " return [swatch.right, Math.min(...lines.map(r => r.left)), free, lines.length]; })"
        )
        assert len(rows) == 36
        assert all(left >= swatch for swatch, left, *_ in rows), width
        assert all(free >= 0 for *_, free, _ in rows), f"names reach into the losses at {width}"
        if width < 861:
            assert max(lines for *_, lines in rows) > 1, "some names have several lines"


@pytest.mark.parametrize("name", ["few", "many"])
def test_no_word_of_a_name_is_broken_at_its_hyphen(opening: Any, name: str) -> None:
    shown = opening(name)
    shown.evaluate(
        "document.querySelector('#ranking .word:last-of-type').textContent = 'gamma=1.234e-05'"
    )
    for width in at_each_width(shown):
        lines = shown.evaluate(
            "[...document.querySelectorAll('#ranking .word')].map(word => {"
            " const range = document.createRange(); range.selectNodeContents(word);"
            " return new Set([...range.getClientRects()].map(r => r.top)).size; })"
        )
        assert set(lines) == {1}, width


def test_rows_of_the_ranking_can_be_read_on_a_phone(opening: Any) -> None:
    shown = opening("many")
    shown.evaluate(
        "const origin = [...document.querySelectorAll('#ranking td[data-key=origin]')][2];"
        "origin.textContent = 'tuned on mnist, 18 trials with every=100, 13 of them unfinished';"
        "origin.classList.add('long');"
    )
    for width in at_each_width(shown):
        loss = box(shown, "#ranking td[data-key=train]")
        assert loss["x"] + loss["width"] <= width, "the first loss is on the screen"
        row, name, text = shown.evaluate(
            "[document.querySelector('#ranking tr:has(.long)'),"
            " document.querySelector('#ranking tr:has(.long) .named'),"
            " document.querySelector('#ranking .long').firstChild]"
            ".map(e => { const range = document.createRange(); range.selectNode(e);"
            " return range.getBoundingClientRect().height; })"
        )
        assert text > 0
        if width < 861:
            assert row < name + 40, f"where settings come from makes a row tall at {width}"


def test_every_line_can_be_seen_on_the_page(opening: Any) -> None:
    """A contrast of at least 3 with the paper, as WCAG asks for graphics; 2.9 allows for rounding."""
    paths = "[...document.querySelectorAll('#curves .swatch path')]"
    strokes = f"{paths}.map(p => getComputedStyle(p).stroke)"
    shown = opening("many")
    found = {}
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        # The plot and its legend follow the scheme a moment later than the page.
        for _ in range(200):
            paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
            found[scheme] = shown.evaluate(strokes)
            weak = [colour for colour in found[scheme] if _contrast(colour, paper) < 2.9]
            if found[scheme] and not weak:
                break
            shown.wait_for_timeout(50)
        assert found[scheme], scheme
        assert not weak, (scheme, weak)
    assert found["light"] != found["dark"]


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(_luminance(each) for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_finished_is_ranked_and_the_rest_is_called_interrupted(opening: Any) -> None:
    shown = opening("many")
    assert "has the lowest train loss" in shown.locator("#summary").inner_text()
    row = shown.locator("#ranking tr[data-label='nesterov']")
    assert row.locator("td[data-key='place']").inner_text().isdecimal()
    assert row.locator("td[data-key='seeds']").inner_text() == "0"
    assert row.locator(".remark").inner_text() == "2 of 5 runs interrupted"


def test_a_diverged_run_has_words_instead_of_images(opening: Any) -> None:
    shown = opening("many")
    row = shown.locator("#gallery .row", has_text="adagrad")
    assert row.locator("img").count() == 0
    assert row.locator(".strip").inner_text() == "diverged in epoch 2"
    assert shown.locator("#gallery .row img").count() == 4 * 8
    for _ in at_each_width(shown):
        assert row.locator(".strip").is_visible()


def test_choices_are_kept_in_the_address(opening: Any) -> None:
    shown = opening("many")
    for name in ("Test", "By seconds", "Log", "Whole run", "Settings as columns"):
        shown.get_by_role("button", name=name, exact=True).click()
    entries = shown.locator("#curves .entry")
    first, last = (entries.nth(at).get_attribute("data-label") for at in (0, -1))
    for entry in (first, last):
        shown.locator(f"#curves .entry[data-label='{entry}']").click()
    shown.locator("#filter").fill("prop")
    shown.locator("#level").fill("33")
    shown.locator("#ranking th[data-key='test'] button").click()
    shown.locator("#ranking th[data-key='test'] button").click()
    state = (
        "() => [[...document.querySelectorAll('[aria-pressed=true]')].map(e => e.textContent),"
        " document.getElementById('filter').value, document.getElementById('level').value,"
        " [...document.querySelectorAll('#ranking tbody tr')].map(e => e.dataset.label)]"
    )
    before = shown.evaluate(state)
    fragment = shown.evaluate("location.hash")
    again = opening("many", fragment=fragment)
    assert again.evaluate(state) == before
    assert again.evaluate("location.hash") == fragment
    again.locator("#tasks button", has_text="batches of 1").click()
    task = again.evaluate("location.hash")
    assert "task=" in task
    assert "loss=test" in task, "the axes stay as they were"
    assert "sort" not in task
    other = opening("many", fragment=task)
    assert other.locator("#tasks button[aria-pressed='true']").inner_text() == "batches of 1"


def test_an_address_that_the_page_does_not_know_is_ignored(opening: Any) -> None:
    shown = opening("few", fragment="#task=gone&loss=none&hide=nobody&x=seconds&sort=nothing")
    assert shown.locator("#legend .entry").count() == 2
    assert shown.locator("#choices button[aria-pressed='true']").all_inner_texts()[:2] == [
        "Train",
        "By seconds",
    ]
    shown.evaluate("() => { location.hash = '#loss=test'; }")
    shown.locator("#legend .title", has_text="final test loss").wait_for()


def test_without_choices_the_address_has_no_fragment(opening: Any) -> None:
    shown = opening("few")
    assert shown.evaluate("location.hash") == ""
    shown.get_by_role("button", name="Log", exact=True).click()
    assert shown.evaluate("location.hash") == "#y=log"
    shown.get_by_role("button", name="Linear", exact=True).click()
    assert shown.evaluate("location.hash") == ""
