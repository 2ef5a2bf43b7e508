"""Long names in tables may break behind their dots, slashes and underscores.

A `<wbr>` is not copied with the name, as a zero-width space would be.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

LONG = 24


class BreakLongNames(SphinxPostTransform):
    """Put a place to break behind each part of a long name."""

    default_priority = 900
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for entry in list(self.document.findall(nodes.entry)):
            for literal in list(entry.findall(nodes.literal)):
                name = literal.astext()
                if len(name) > LONG and " " not in name:
                    parts = [html.escape(part) for part in re.findall(r"[^./_]*[./_]*", name)]
                    code = f'<code class="literal long-name">{"<wbr>".join(parts)}</code>'
                    literal.replace_self(nodes.raw("", code, format="html"))


def setup(app: Any) -> dict[str, bool]:
    app.add_post_transform(BreakLongNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
