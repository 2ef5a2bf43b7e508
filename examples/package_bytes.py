"""Source code and documentation of installed packages as bytes, for training and held out.

The text files of the standard library and of the installed packages are taken in the order of a hash of
their names, so any part of that order is a random sample of all packages. The first files are held out
and the next ones are for training: no file is in both. Files with equal contents are taken once.
Packages copy code from each other, so a held-out file can still have passages of a training file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.study import atomic_files

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST = 2**18  # larger files are mostly generated, and a few of them would fill the held-out part
OTHERS = ("__pycache__", "site-packages", "dist-packages")  # the last two belong to other folders
END = b"\0"  # after each file


class Source(NamedTuple):
    """A file of an installed package; the name is its path below the folder of packages."""

    name: str
    path: Path

    @property
    def place(self) -> bytes:
        """The place of the file among all files."""
        return hashlib.sha256(self.name.encode()).digest()


class PackageBytes(NamedTuple):
    """A file with the bytes for training, followed by the held-out bytes.

    Args:
        path: the file.
        sha256: digest of the file.
        train: number of bytes for training.
        held_out: number of held-out bytes.
        description: the digest, both numbers, the number of files and the bytes from each package.
    """

    path: Path
    sha256: str
    train: int
    held_out: int
    description: dict[str, Any]


def package_folders() -> list[Path]:
    """Return the folders of the standard library and of the packages of this interpreter."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")))


def collect(
    folder: Path, train: int, held_out: int, folders: Sequence[Path] | None = None
) -> PackageBytes:
    """Return a file of package bytes in `folder`; write it if it is not there.

    A file that is there is used as it is, even if packages were installed since.

    Args:
        folder: where the file and its description are.
        train: number of bytes for training.
        held_out: number of held-out bytes.
        folders: folders of packages. None: those of this interpreter.

    Raises:
        SystemExit: the packages have fewer bytes.
    """
    path = folder / f"train={train}-held_out={held_out}.bin"
    about = path.with_suffix(".json")
    if not (path.exists() and about.exists()):
        content, packages, files = _taken(folders or package_folders(), train, held_out)
        description = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "train": train,
            "held_out": held_out,
            "files": files,
            "packages": dict(sorted(packages.items(), key=lambda item: (-item[1], item[0]))),
        }
        atomic_files.write(path, content)
        atomic_files.write(about, json.dumps(description, indent=1) + "\n")
    description = json.loads(about.read_text())
    return PackageBytes(path, description["sha256"], train, held_out, description)


def read(path: Path, sha256: str) -> Tensor:
    """Return the bytes of a file as a tensor `[length]` of type uint8.

    Raises:
        SystemExit: the file has another digest.
    """
    content = bytearray(path.read_bytes())
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SystemExit(
            f"{path} has the SHA-256 {found} instead of {sha256}: it was changed. Delete it and run "
            "this again."
        )
    return torch.frombuffer(content, dtype=torch.uint8)


def _taken(
    folders: Sequence[Path], train: int, held_out: int
) -> tuple[bytes, Counter[str], dict[str, int]]:
    """Return the bytes for training and the held-out bytes as one, and where they are from.

    The last file of a part is cut off where the part is full.

    Returns:
        The bytes; the bytes from each package or module; the number of files of each part.
    """
    parts = {"held_out": bytearray(), "train": bytearray()}  # in the order in which they are filled
    lengths = {"held_out": held_out, "train": train}
    packages: Counter[str] = Counter()
    files: Counter[str] = Counter()
    seen: set[bytes] = set()
    for source in sorted(_sources(folders), key=lambda source: source.place):
        full = [name for name, part in parts.items() if len(part) == lengths[name]]
        if len(full) == len(parts):
            break
        content = source.path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not content or digest in seen:
            continue
        seen.add(digest)
        name = "train" if full else "held_out"
        room = lengths[name] - len(parts[name])
        parts[name] += (content + END)[:room]
        packages[Path(source.name).parts[0]] += min(len(content) + 1, room)
        files[name] += 1
    found = sum(map(len, parts.values()))
    if found < train + held_out:
        raise SystemExit(
            f"The installed packages have {found} bytes of text in {files.total()} different files of "
            f"at most {LARGEST} bytes, in {', '.join(map(str, folders))}. {train + held_out} are "
            f"needed: {train} for training and {held_out} held out. Ask for fewer with --train-bytes "
            "and --held-out-bytes, or run this with an interpreter that has more packages."
        )
    return bytes(parts["train"] + parts["held_out"]), packages, dict(files)


def _sources(folders: Sequence[Path]) -> Iterator[Source]:
    """Yield the text files in the folders that are not too large."""
    for folder in folders:
        for place, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in OTHERS]
            for name in names:
                path = Path(place, name)
                text = name.endswith(SUFFIXES) and path.is_file()
                if text and path.stat().st_size <= LARGEST:
                    yield Source(path.relative_to(folder).as_posix(), path)
