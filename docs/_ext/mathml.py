"""Formulas as MathML, written when the site is built: browsers draw them without any script."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.math import get_node_equation_number


def mathml(formula: str, display: str) -> str:
    """Return a formula as MathML; a transpose sign is a letter, not a relation with space around it."""
    return convert(formula, display=display).replace("<mo>&#x022A4;</mo>", "<mi>&#x022A4;</mi>")


def visit_inline(translator: Any, node: nodes.Element) -> None:
    """Write a formula within a line."""
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    """Write a formula on a line of its own, with its number where it has one."""
    translator.body.append(translator.starttag(node, "div", CLASS="math notranslate"))
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})</span>')
    translator.body.append(mathml(node.astext(), "block"))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
