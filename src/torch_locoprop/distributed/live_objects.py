"""Finds live objects of a class, such as the DDP modules around a model, which does not know them."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def instances(kind: type[T]) -> list[T]:
    """Return all objects of a class, or of its subclasses, that this process has.

    All objects of the process are searched, so keep the result.
    """
    # isinstance() would ask the objects themselves, and proxies of deleted objects raise.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
