"""Links that work on a code host and on the site.

The pages are Markdown that a code host shows too, so their links are relative paths. On the site

- a link to a gallery script, `gallery/plot_2_cnn.py`, leads to its page;
- a link out of `docs/`, such as `../examples/README.md`, leads to that file in the repository.

A link to a file that does not exist is a warning, which `make docs` takes for an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.util import logging

DOCS = Path(__file__).parents[1]
LINK = re.compile(
    r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./|gallery/)[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
)
logger = logging.getLogger(__name__)


def resolve(app: Any, page: str, source: list[str]) -> None:
    """Rewrite the links of a page before it is parsed."""
    folder = (DOCS / page).parent
    repository = app.config.html_theme_options["source_repository"]

    def replaced(match: re.Match[str]) -> str:
        text, path, anchor = match["text"], match["path"], match["anchor"] or ""
        target = (folder / path).resolve()
        if not target.exists():
            logger.warning("%s links to %s, which does not exist", page, path)
        if target.parent == DOCS / "gallery":
            return f"[{text}](auto_gallery/{target.stem}.rst)"
        if target == DOCS / "gallery":
            return f"[{text}](auto_gallery/index.rst)"
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/main/{target.relative_to(DOCS.parent)}{anchor})"

    source[0] = LINK.sub(replaced, source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
