"""A tiny data set in the format of MNIST."""

import gzip
import hashlib
import struct

import numpy as np

from torch_locoprop.study.data.idx import IdxFile, IdxSet

SHAPES = {"train": (6, 28, 28), "test": (4, 28, 28), "train_labels": (6,), "test_labels": (4,)}
FILES = {
    "train": "train-images-idx3-ubyte",
    "test": "t10k-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx_bytes(array: np.ndarray) -> bytes:
    """Return the array in the IDX format."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


class FakeSet:
    """Return the arrays by role, and plain and gzip files by name."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.arrays = {role: rng.integers(0, 256, SHAPES[role], np.uint8) for role in SHAPES}
        self.plain = {FILES[role]: idx_bytes(array) for role, array in self.arrays.items()}
        self.zipped = {f"{name}.gz": gzip.compress(data) for name, data in self.plain.items()}

    def description(self, *mirrors: str) -> IdxSet:
        files = {
            role: IdxFile(name, SHAPES[role], hashlib.sha256(self.plain[name]).hexdigest())
            for role, name in FILES.items()
        }
        return IdxSet(files, mirrors)
