"""Checkpoints of :mod:`torch.distributed.checkpoint` that were cut off while they were written.

This package does not save or load checkpoints itself; PyTorch's tools do. These tools write the file
``.metadata`` last, so a new folder without this file was not written to its end. A folder that is
written to twice has the file all the time: give each checkpoint a folder of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_complete"]


def check_complete(folder: str | os.PathLike[str]) -> None:
    """Raise an error if the checkpoint in a folder is not complete.

    Call it before ``torch.distributed.checkpoint.load``, which reads into the tensors of the model and
    leaves some of them changed where it fails::

        check_complete(folder)
        dcp.load(state, checkpoint_id=folder)

    Args:
        folder: a folder that ``torch.distributed.checkpoint`` has written.

    Raises:
        RuntimeError: if files are missing, or shorter than they were written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder = Path(folder)
    if not (folder / ".metadata").exists():
        raise _incomplete(folder, "it has no file .metadata, which is written last")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # what a damaged pickle raises depends on where it ends
        raise _incomplete(folder, "its file .metadata cannot be read") from error
    sizes: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        size = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
        sizes[entry.relative_path] = size
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            raise _incomplete(folder, f"its file {name} is missing")
        if file.stat().st_size < size:
            found = file.stat().st_size
            raise _incomplete(folder, f"its file {name} has {found} bytes of at least {size}")


def _incomplete(folder: Path, reason: str) -> RuntimeError:
    return RuntimeError(
        f"The checkpoint {folder} is not complete: {reason}. It was cut off while it was saved or "
        "copied. Load an earlier one."
    )
