"""Small changes of a Python source, each of which some test should notice.

A mutant has another operator, comparison, constant or function in one place, or lacks one call.
Annotations, docstrings, decorators, the messages of errors and warnings and lists of exported names are
left alone: they have no effect on a result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_NAMES = {"min": "max", "any": "all", "sum": "mean", "clamp_min": "clamp_max", "amin": "amax"}
_NAMES |= {other: name for name, other in _NAMES.items()}
_MESSAGES = {"warn", "unknown", "__repr__"}


@dataclass(frozen=True)
class Mutant:
    """One change in one source, which :func:`applied` makes."""

    place: int  # which of the changes of this source
    line: int
    last_line: int
    was: str
    becomes: str


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a source."""
    found = []
    for place, (node, field, new) in enumerate(_changes(ast.parse(source))):
        was, old = ast.unparse(node), getattr(node, field)
        setattr(node, field, new)
        becomes = ast.unparse(node)
        setattr(node, field, old)
        found.append(Mutant(place, node.lineno, node.end_lineno or node.lineno, was, becomes))
    return found


def applied(mutant: Mutant, source: str) -> str:
    """Return the source with one change."""
    return ast.unparse(changed(mutant, ast.parse(source)))


def changed(mutant: Mutant, tree: ast.Module) -> ast.Module:
    """Return the tree of a source with one change; all other nodes keep their lines."""
    node, field, new = list(_changes(tree))[mutant.place]
    setattr(node, field, new)
    return ast.fix_missing_locations(tree)


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """Yield all changes as a node, the name of its field, and the new value of the field."""
    for node in _effective(tree):
        match node:
            case ast.BinOp() | ast.AugAssign() | ast.BoolOp() | ast.UnaryOp():
                if type(node.op) in _OPERATORS:
                    yield node, "op", _OPERATORS[type(node.op)]()
                if isinstance(node.op, ast.Not):
                    yield node, "operand", ast.UnaryOp(ast.Not(), node.operand)
            case ast.Compare():
                yield node, "ops", [_OPERATORS[type(node.ops[0])](), *node.ops[1:]]
            case ast.Constant(value=bool()):
                yield node, "value", not node.value
            case ast.Constant(value=int() | float()):
                yield node, "value", node.value + 1
                yield node, "value", node.value - 1
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                yield node, "func", ast.Name(_NAMES[name], ast.Load())
            case ast.Call(func=ast.Attribute(attr=name)) if name in _NAMES:
                yield node, "func", ast.Attribute(node.func.value, _NAMES[name], ast.Load())
            case ast.Expr(value=ast.Call()):
                yield node, "value", ast.Constant(None)


def _effective(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it that have an effect on results."""
    if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign) and not _sets_value(node):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.FunctionDef) and node.name in _MESSAGES:
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _MESSAGES:
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _effective(child)


def _sets_value(node: ast.AST) -> bool:
    """Return True for an annotated name with a value."""
    return isinstance(node, ast.AnnAssign) and node.value is not None
