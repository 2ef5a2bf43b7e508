"""Optimizers of optional packages: the extra ``peers`` of torch-locoprop."""

from __future__ import annotations

from importlib import import_module
from typing import Any

INSTALL_PEERS = 'pip install "torch-locoprop[peers]"'


def pytorch_optimizer(name: str) -> Any:
    """Return the class of this name from the package ``pytorch_optimizer``.

    Raises:
        ImportError: If the package is missing, or too old to have the class.
    """
    try:
        package = import_module("pytorch_optimizer")
    except ImportError:
        package = None
    if not hasattr(package, name):
        raise missing_package(name, "pytorch_optimizer")
    return getattr(package, name)


def missing_package(name: str, package: str) -> ImportError:
    """Return the error for an optimizer whose package is missing or too old."""
    return ImportError(
        f"{name} needs the package {package}, which is not installed or too old. Install it with: "
        f"{INSTALL_PEERS}."
    )
