"""Arrays of CURVES: the genuine images from `digs3pts_1.mat`, or generated images from a cache."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from torch_locoprop.study.data.curves import BLOCK, SIDE, Bytes, Floats, draw

GENUINE = "digs3pts_1.mat"
"""The original file; its matrices `bdata` and `bdatatest` hold the training and test images."""

COUNTS = {"bdata": 20000, "bdatatest": 10000}
"""The numbers of training and test images, by the names of the matrices in the original file."""

SEED = 2006
DIGEST = hashlib.sha256().digest_size


def read_mat(path: Path) -> tuple[Floats, Floats]:
    """Return the training and test images of the original file.

    Raises:
        ValueError: If the file is not the original one; the message continues its name.
        ImportError: If scipy is not installed.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        matrices = loadmat(path, variable_names=list(COUNTS))
    except Exception as error:  # scipy raises many kinds of errors for broken files
        raise ValueError(f"is not a MATLAB file that scipy can read ({error})") from error
    train, test = (_images(matrices, name) for name in COUNTS)
    return train, test


def _images(matrices: dict[str, npt.NDArray[np.generic]], name: str) -> Floats:
    if name not in matrices:
        raise ValueError(f"has no matrix {name}")
    matrix = np.asarray(matrices[name])
    shape = (COUNTS[name], SIDE * SIDE)
    if matrix.shape != shape:
        raise ValueError(f"has a matrix {name} of shape {matrix.shape}, not {shape}")
    if matrix.dtype.kind not in "buif" or not (matrix.min() >= 0 and matrix.max() <= 1):
        raise ValueError(f"has a matrix {name} with other entries than numbers in [0, 1]")
    return np.ascontiguousarray(matrix, dtype=np.float32)


def generated(cache: Path) -> tuple[Bytes, Bytes]:
    """Return the generated training and test images, from the cache if it has them.

    The cache file is the SHA-256 of the images, followed by the images. It is replaced if it is
    corrupt or from another version of the generator. A folder that cannot be written to is ignored.
    """
    train, test = COUNTS.values()
    images = _from_cache(cache, train + test)
    if images is None:
        images = draw(train + test, seed=SEED)
        _store(cache, images.tobytes())
    return images[:train], images[train:]


def is_in(cache: Path) -> bool:
    """Return True if the cache has the generated images of this version, complete and unchanged."""
    return _from_cache(cache, sum(COUNTS.values())) is not None


def _from_cache(cache: Path, count: int) -> Bytes | None:
    """Return the images of the cache, or None unless they are complete and drawn by this version."""
    try:
        content = cache.read_bytes()
    except OSError:
        return None
    digest, pixels = content[:DIGEST], content[DIGEST:]
    if len(pixels) != count * SIDE * SIDE or hashlib.sha256(pixels).digest() != digest:
        return None
    images = np.frombuffer(pixels, np.uint8).reshape(count, SIDE * SIDE)
    probe = min(count, BLOCK)
    return images if np.array_equal(images[:probe], draw(probe, seed=SEED)) else None


def _store(cache: Path, pixels: bytes) -> None:
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache.parent) as scratch:
            whole = Path(scratch, cache.name)
            whole.write_bytes(hashlib.sha256(pixels).digest() + pixels)
            os.replace(whole, cache)
