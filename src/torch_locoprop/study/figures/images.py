"""Where a figure's images come from, small enough to send to another process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.curves_files import COUNTS
from torch_locoprop.study.data.datasets import Dataset, DatasetError

PUBLISHED = "published IDX files"
"""The source of data sets whose files are checked against their published sums: one set each."""

TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "curves": "CURVES"}
"""The names of data sets in captions."""

TRAINED_ON = {"mnist": 60_000, "fashion-mnist": 60_000, "curves": COUNTS["bdata"]}


@dataclass(frozen=True)
class Images:
    """The data sets by name, or so many embedded curves, to train and test on, for the one name."""

    data_dir: Path | None = None
    counts: tuple[int, int] | None = None

    def load(self, name: str) -> Dataset:
        """Return the data set, downloaded if need be."""
        return _loaded(self, name, True)

    def count(self, name: str) -> int:
        """Return how many images there are to train on; nothing is downloaded to tell."""
        if self.counts is not None:
            return self.counts[0]
        return TRAINED_ON[name]

    def is_of(self, name: str, metadata: dict[str, str]) -> bool:
        """Whether a run on data with this metadata is a run on our data set of that name.

        Nothing is downloaded to tell: without the files, their published contents are meant.
        """
        if metadata.get("name") != name:
            return False
        try:
            return metadata.get("fingerprint") == _loaded(self, name, False).fingerprint
        except DatasetError:
            return metadata.get("source") == PUBLISHED


@lru_cache(maxsize=2)
def _loaded(images: Images, name: str, download: bool) -> Dataset:
    if images.counts is None:
        return datasets.load(name, images.data_dir, download=download)
    return datasets.some_curves(*images.counts)
