"""The images of a figure, described by where they come from so that processes can load them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.curves_files import COUNTS
from torch_locoprop.study.data.datasets import Dataset, DatasetError

PUBLISHED = "published IDX files"
"""The source of data sets whose files are checked against published hashes."""

TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "curves": "CURVES"}
"""The names of data sets in captions."""

TRAINED_ON = {"mnist": 60_000, "fashion-mnist": 60_000, "curves": COUNTS["bdata"]}


@dataclass(frozen=True)
class Images:
    """The images of all tasks.

    Args:
        data_dir: A folder with data sets.
        counts: The numbers of training and test images if they are generated curves; None for whole
            data sets.
    """

    data_dir: Path | None = None
    counts: tuple[int, int] | None = None

    def load(self, name: str) -> Dataset:
        """Return the data set of this name; download it if necessary."""
        return _loaded(self, name, True)

    def count(self, name: str) -> int:
        """Return the number of training images without loading or downloading them."""
        if self.counts is not None:
            return self.counts[0]
        return TRAINED_ON[name]

    def is_of(self, name: str, metadata: dict[str, str]) -> bool:
        """Return True if this metadata of a run describes the data set of this name.

        Nothing is downloaded: if files are missing, the published data set is assumed.
        """
        if metadata.get("name") != name:
            return False
        try:
            return metadata.get("fingerprint") == _loaded(self, name, False).fingerprint
        except DatasetError:
            return metadata.get("source") == PUBLISHED


def title_of(metadata: dict[str, str]) -> str:
    """Return the name of a run's data set in titles; generated curves are not the published ones."""
    name = TITLES.get(metadata["name"], metadata["name"])
    return f"{name} (generated)" if "generated" in metadata["source"] else name


@lru_cache(maxsize=2)
def _loaded(images: Images, name: str, download: bool) -> Dataset:
    if images.counts is None:
        return datasets.load(name, images.data_dir, download=download)
    return datasets.some_curves(*images.counts)
