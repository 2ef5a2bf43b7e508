"""Digests of tensors and numbers, and the comparison of two files of them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Prints = dict[str, dict[str, str]]
"""The digests of each run: run name -> `weights`, `state`, `losses`, ... -> hexadecimal digest."""


def digest(value: Any) -> str:
    """Return the SHA-256 digest of nested dictionaries and lists of tensors, numbers and strings.

    Tensors count with their dtype, shape and raw bytes. The order of a dictionary's keys does not
    count, the keys do.
    """
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{{{key}:".encode())
            _add(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"[{len(value)}".encode())
        for entry in value:
            _add(found, entry)
    elif isinstance(value, float):
        found.update(struct.pack("<d", value))
    else:
        found.update(repr(value).encode())


def differences(one: Prints, other: Prints) -> list[str]:
    """Return one line for each run that differs, or that only one of the two files has."""
    lines = []
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            lines.append(f"{name}: only in the {'first' if name in one else 'second'} file")
            continue
        parts = sorted({*one[name], *other[name]})
        unequal = [part for part in parts if one[name].get(part) != other[name].get(part)]
        if unequal:
            lines.append(f"{name}: {', '.join(unequal)}")
    return lines
