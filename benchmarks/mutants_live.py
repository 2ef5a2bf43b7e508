"""Put a mutant into the functions of a running program, without importing its module again.

A function keeps its identity when its code object is replaced, so every table, subclass and closure
that holds the function sees the mutant. Changes outside of functions, such as constants of a module
or defaults of a dataclass, have effects only when the module is imported: for these, :func:`swaps`
returns None.
"""

from __future__ import annotations

import ast
import gc
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType

from benchmarks.mutants import Mutant, changed

Place = tuple[str, str, int]
"""A function's file, qualified name and first line."""

Swaps = list[tuple[Place, CodeType]]


def swaps(mutant: Mutant, source: str, file: str) -> Swaps | None:
    """Return the code objects that a mutant changes, with the places of their functions.

    Args:
        mutant: The change.
        source: The source of the module.
        file: The path of the module.

    Returns:
        All code objects of the changed function, nested ones too; None if the change is outside of
        functions.
    """
    old = compile(source, file, "exec")
    new = compile(changed(mutant, ast.parse(source)), file, "exec")
    if not _same_outside(old, new):
        return None
    pairs = zip(_functions(old), _functions(new), strict=True)
    return [
        (_place(inner), other)
        for before, after in pairs
        if before != after
        for inner, other in _with_nested(before, after)
    ]


def live_functions(folder: str) -> dict[Place, list[FunctionType]]:
    """Return all functions of the program whose source is below a folder, by place."""
    found = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(folder):
            found[_place(each.__code__)].append(each)
    return found


def put_in(changes: Swaps, functions: Mapping[Place, list[FunctionType]]) -> bool:
    """Replace the code objects of functions; return True if the outermost function is among them."""
    for place, code in changes:
        for function in functions.get(place, ()):
            function.__code__ = code
    return changes[0][0] in functions


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module and the methods of its classes, without nested functions."""
    for each in _inner(code):
        if _is_function(each):
            yield each
        else:
            yield from _functions(each)


def _with_nested(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    if len(_inner(old)) == len(_inner(new)):  # a call that is left out may have had a lambda in it
        for before, after in zip(_inner(old), _inner(new), strict=True):
            yield from _with_nested(before, after)


def _same_outside(old: CodeType, new: CodeType) -> bool:
    """Return True if two modules or classes differ at most inside of functions."""
    constants = [
        [(type(c), c) for c in code.co_consts if not isinstance(c, CodeType)] for code in (old, new)
    ]
    inner = list(zip(_inner(old), _inner(new), strict=False))
    return (
        old.co_code == new.co_code
        and old.co_names == new.co_names
        and repr(constants[0]) == repr(constants[1])
        and all(_is_function(before) or _same_outside(before, after) for before, after in inner)
    )
