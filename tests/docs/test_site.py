"""`make docs` builds without a warning, and the site has what it promises."""

import inspect
import re
import subprocess
from html import unescape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

import torch_locoprop

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "docs" / "gallery").glob("plot_*.py"))
PUBLIC = (
    "torch_locoprop",
    *(
        f"torch_locoprop.{name}"
        for name in torch_locoprop.__all__
        if inspect.ismodule(getattr(torch_locoprop, name))
    ),
)


def outputs(site: Path, script: str) -> list[str]:
    """Return what a script of the gallery printed."""
    page = (site / "auto_gallery" / f"{script}.html").read_text()
    blocks = re.findall(r"sphx-glr-script-out.*?<pre>(.*?)</pre>", page, re.DOTALL)
    return [unescape(re.sub(r"<[^>]+>", "", block)) for block in blocks]


def numbers(site: Path, script: str, row: str) -> list[float]:
    """Return the numbers of one row of the table that a script printed."""
    for line in "\n".join(outputs(site, script)).splitlines():
        if line.startswith(f"{row} "):
            return [float(number) for number in line.removeprefix(row).split()]
    raise AssertionError(f"{script} prints no row {row!r}")


def test_it_builds_without_a_warning(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    assert built[1].returncode == 0, built[1].stdout


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_has_every_public_name(site: Path, name: str) -> None:
    from sphinx.util.inventory import InventoryFile

    known = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {
        each for kind in known.data if kind.startswith("py:") for each in known.data[kind]
    }
    module = import_module(name)
    for member in module.__all__:
        value = getattr(module, member)
        if not inspect.ismodule(value):
            home = f"{getattr(value, '__module__', '')}.{member}"
            assert documented & {f"{name}.{member}", home}, f"{name}.{member} is not documented"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"(https?:[^\"]+)\"")
    for page in site.rglob("*.html"):
        assert not loaded.findall(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text()), style


class Page(HTMLParser):
    """The links of a page, and the places in it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    count = 0
    for path, page in pages.items():
        for link in page.links:
            target, _, place = unquote(link).partition("#")
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.relative_to(site)} links to {link}"
            if place and file.suffix == ".html":
                assert place in pages[file].places, f"{path.relative_to(site)} links to {link}"
            count += 1
    assert count > 1000


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "how-it-works.html").read_text()
    assert page.count("<math ") > 50
    assert "\\gamma" not in page


def test_every_package_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)/?` \|", page, re.MULTILINE)
    source = ROOT / "src" / "torch_locoprop"
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert packages <= set(rows)
    assert all((source / row).exists() for row in rows)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_printed_and_drawn(site: Path, script: str) -> None:
    assert any(outputs(site, script))
    picture = site / "_images" / f"sphx_glr_{script}_001.png"
    assert picture.stat().st_size > 5_000


def test_the_gallery_has_its_five_scripts() -> None:
    subjects = ("mlp", "cnn", "gpt", "variant", "diagnostics")
    assert all(any(subject in script for script in SCRIPTS) for subject in subjects)


def test_what_is_said_of_the_autoencoder(site: Path) -> None:
    """At equal epochs LocoProp ends far lower; Adam with 60 epochs and a tuned rate comes near."""
    script = "plot_1_first_mlp"
    loco, adam, longer = (
        numbers(site, script, row)[:2]
        for row in ("LocoProp, 12 epochs", "Adam, 12 epochs", "Adam, 60 epochs")
    )
    assert max(loco) < 140 < 170 < min(adam)
    assert loco[0] < longer[0] < 1.3 * loco[0]
    assert 0.8 * loco[1] < longer[1] < loco[1]


def test_what_is_said_of_the_cnn(site: Path) -> None:
    """By the epoch LocoProp fits far better; five times the epochs and a tuned rate fit as well."""
    loco, adam, longer = (
        numbers(site, "plot_2_cnn", row)[:2]
        for row in ("LocoProp, 10 epochs", "Adam, 10 epochs", "Adam, 50 epochs")
    )
    assert loco[0] < 0.3 * adam[0]
    assert loco[1] == pytest.approx(adam[1], rel=0.2)
    assert longer[0] == pytest.approx(loco[0], abs=2e-3)


def test_what_is_said_of_the_gpt(site: Path) -> None:
    """Without settings LocoProp is far ahead of AdamW, and level with Muon with a tuned rate."""
    loco, muon, adamw = (
        numbers(site, "plot_3_tiny_gpt", row)[:2] for row in ("LocoProp", "Muon and AdamW", "AdamW")
    )
    assert min(adamw) > max(loco) + 0.2
    assert loco == pytest.approx(muon, rel=0.03)
    assert max(loco) < 2.34


def test_what_is_said_of_a_rate_that_is_too_large(site: Path) -> None:
    """The gate limits the damage; the smaller rate is better."""
    good, bad, gated = (
        numbers(site, "plot_5_diagnostics", row)[0]
        for row in ("lr=3e-4", "lr=3e-3", "lr=3e-3, gate=True")
    )
    assert good < gated < bad
