"""The site in a browser: no errors, nothing from other hosts, search, readable on a phone."""

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    BINARY is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[390, 1300])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty page; at the end, no other host was asked and nothing was written to the console."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    context.set_default_timeout(15_000)
    requests, troubles = [], []
    context.route(
        lambda url: not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1")),
        lambda route: (requests.append(route.request.url), route.abort()),
    )
    opened = context.new_page()
    opened.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    yield opened
    context.close()
    assert not requests
    assert not troubles


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on a web server of its own."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_page_opens_and_fits_its_width(page: Any, site: Path) -> None:
    width = page.viewport_size["width"]
    paths = sorted(site.rglob("*.html"))
    assert len(paths) > 25
    for path in paths:
        page.goto(path.as_uri())
        shown = page.evaluate("document.documentElement.scrollWidth")
        assert shown <= width, f"{path.relative_to(site)} is {shown} pixels wide"
        broken = page.evaluate(
            "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        assert not broken


def test_text_is_large_enough_to_read(page: Any, site: Path) -> None:
    page.goto((site / "choosing-settings.html").as_uri())
    size = "parseFloat(getComputedStyle(document.querySelector('article p')).fontSize)"
    assert page.evaluate(size) >= 14


def test_formulas_are_drawn(page: Any, site: Path) -> None:
    page.goto((site / "how-it-works.html").as_uri())
    boxes = page.evaluate(
        "[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(boxes) > 50
    assert all(width > 3 and height > 3 for width, height in boxes)


def test_search_finds_pages_opened_from_files(page: Any, site: Path) -> None:
    page.goto((site / "search.html").as_uri() + "?q=regularizer")
    page.wait_for_selector("ul.search li a")
    found = page.locator("ul.search li a").all_inner_texts()
    assert any("regularizers" in title.lower() for title in found)
    page.goto((site / "search.html").as_uri() + "?q=LocalLoss")
    page.wait_for_selector("ul.search li a")
    page.locator("ul.search li a").first.click()
    page.wait_for_selector("article h1")
    assert "LocalLoss" in page.content()


def test_search_on_a_server_shows_a_part_of_the_page(page: Any, address: str) -> None:
    page.goto(f"{address}/search.html?q=dilogarithm")
    page.wait_for_selector("ul.search li p.context")
    assert "dilogarithm" in page.locator("ul.search li p.context").first.inner_text().lower()


def test_a_word_that_is_nowhere(page: Any, site: Path) -> None:
    page.goto((site / "search.html").as_uri() + "?q=xylophone")
    page.wait_for_selector("text=did not match any documents")
    assert page.locator("ul.search li a").count() == 0


def test_code_can_be_copied(page: Any, site: Path) -> None:
    page.goto((site / "getting-started.html").as_uri())
    page.wait_for_selector("button.copybtn", state="attached")
    assert page.locator("button.copybtn").count() >= 4


def test_the_menu_opens_on_a_phone(page: Any, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    link = page.locator(".sidebar-drawer a", has_text="Getting started")
    if page.viewport_size["width"] < 900:
        page.locator("label.nav-overlay-icon[for='__navigation']").first.click()
        page.wait_for_timeout(400)
    link.click()
    page.wait_for_selector("article h1:has-text('Getting started')")
