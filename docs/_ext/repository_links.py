"""Links to files of the repository that are not pages of the site.

README, CONTRIBUTING and CHANGELOG are read on a code host and here. A relative link in them to a file
such as `benchmarks/steps.py` becomes a link to that file in the repository, and the file must exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
logger = logging.getLogger(__name__)


def file_role(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Any,
    options: Any = None,
    content: Any = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """`` {file}`benchmarks/steps.py` ``: a link to that file, or folder, in the repository."""
    path = ROOT / text
    if not path.exists():
        message = inliner.reporter.error(f"{text} is not in the repository", line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    repository = inliner.document.settings.env.config.html_theme_options["source_repository"]
    kind = "tree" if path.is_dir() else "blob"
    link = nodes.reference("", "", internal=False, refuri=f"{repository}/{kind}/main/{text}")
    link += nodes.literal(text, text)
    return [link], []


def setup(app: Any) -> dict[str, bool]:
    app.add_role("file", file_role, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
