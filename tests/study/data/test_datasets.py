"""Data sets by name: where files are searched, what is read, and errors for bad files."""

import gzip
import hashlib
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_idx import FILES, FakeSet
from scipy.io import savemat

from torch_locoprop.study.data import curves_files, datasets
from torch_locoprop.study.data.curves import curves
from torch_locoprop.study.data.datasets import NAMES, Dataset, DatasetError, load, status
from torch_locoprop.study.data.idx import IDX_SETS

TRAIN_IMAGES = FILES["train"]


@pytest.fixture(autouse=True)
def _nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache home"))
    monkeypatch.delenv("TORCH_LOCOPROP_DATA", raising=False)
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(curves_files, "COUNTS", {"bdata": 50, "bdatatest": 20})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSet:
    fake = FakeSet()
    monkeypatch.setitem(IDX_SETS, "mnist", fake.description())
    return fake


@pytest.fixture
def generated_cache(tmp_path: Path) -> Path:
    return tmp_path / "cache home/torch-locoprop/curves/generated.bin"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def check_is(data: Dataset, fake: FakeSet) -> None:
    for images, array in ((data.train, fake.arrays["train"]), (data.test, fake.arrays["test"])):
        assert images.dtype == torch.float32
        expected = [[pixel / 255 for row in image for pixel in row] for image in array.tolist()]
        assert torch.equal(images, torch.tensor(expected, dtype=torch.float32))


# Where files are found ------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["data dir", "data dir/mnist", "variable", "variable/mnist"])
def test_idx_files_are_found_plain_or_zipped_in_given_folders(
    fake: FakeSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, zipped: bool
) -> None:
    write(tmp_path / place, fake.zipped if zipped else fake.plain)
    root = tmp_path / place.split("/")[0]
    if root.name == "variable":
        monkeypatch.setenv("TORCH_LOCOPROP_DATA", str(root))
    data = load("mnist", data_dir=root if root.name == "data dir" else None, download=False)
    check_is(data, fake)
    assert data.train_labels is not None
    assert data.test_labels is not None
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.train_labels.tolist() == fake.arrays["train_labels"].tolist()
    assert data.test_labels.tolist() == fake.arrays["test_labels"].tolist()


@pytest.mark.parametrize("place", ["debian/mnist", "cache home/torch-locoprop/mnist"])
def test_idx_files_are_found_where_they_are_installed(
    fake: FakeSet, tmp_path: Path, place: str
) -> None:
    write(tmp_path / place, fake.zipped)
    check_is(load("mnist", download=False), fake)


def test_the_cache_is_in_the_home_folder_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.cache_dir() == tmp_path / ".cache" / "torch-locoprop"


def test_the_given_folder_is_asked_before_all_others(fake: FakeSet, tmp_path: Path) -> None:
    write(tmp_path / "debian/mnist", {**fake.plain, TRAIN_IMAGES: b"broken"})
    check_is(load("mnist", write(tmp_path / "given", fake.plain), download=False), fake)


def test_images_without_labels_are_enough(fake: FakeSet, tmp_path: Path) -> None:
    images = {name: data for name, data in fake.plain.items() if "images" in name}
    data = load("mnist", write(tmp_path / "given", images))
    check_is(data, fake)
    assert data.train_labels is None
    assert data.test_labels is None


def test_missing_files_are_named_where_downloads_are_not_allowed(
    fake: FakeSet, tmp_path: Path
) -> None:
    folder = write(tmp_path / "given", {TRAIN_IMAGES: fake.plain[TRAIN_IMAGES]})
    with pytest.raises(DatasetError) as error:
        load("mnist", folder, download=False)
    message = str(error.value)
    assert TRAIN_IMAGES not in message
    for part in (FILES["test"], str(folder), "debian", "cache home", "--data-dir"):
        assert part in message


def test_a_folder_that_is_none_and_an_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatasetError, match=r"nowhere, given by --data-dir, is not a folder"):
        load("curves", tmp_path / "nowhere")
    monkeypatch.setenv("TORCH_LOCOPROP_DATA", str(tmp_path / "gone"))
    with pytest.raises(DatasetError, match=r"gone, given by TORCH_LOCOPROP_DATA, is not"):
        load("mnist")
    with pytest.raises(
        ValueError, match=r"Unknown data set 'cifar'. Known: curves, mnist, fashion-m"
    ):
        load("cifar")


# Bad files ------------------------------------------------------------------------------------


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


BAD_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda plain: b"", "is empty"),
    "web page": (lambda plain: b"<html>404", "begins with 3c 68 74 6d, not with 00 00 08 03"),
    "labels": (lambda plain: b"\0\0\x08\x01" + plain[4:], "begins with 00 00 08 01, not"),
    "only a magic number": (lambda plain: plain[:4], "holds 0 × 0 × 0 numbers, not 6 × 28 × 28"),
    "wrong count": (
        lambda plain: struct.pack(">4I", 0x803, 5, 28, 28) + plain[16:-784],
        "holds 5 × 28 × 28 numbers, not 6 × 28 × 28",
    ),
    "wrong shape": (
        lambda plain: struct.pack(">4I", 0x803, 6, 32, 32) + plain[16:],
        "holds 6 × 32 × 32 numbers",
    ),
    "cut": (lambda plain: plain[:-1], "has only 4,719 bytes where 4,720 are expected"),
    "too long": (lambda plain: plain + b"!", "has more bytes where 4,720 are expected"),
    "one bit wrong": (lambda plain: flipped(plain, 999), "SHA-256 differs"),
    "cut gzip": (lambda plain: gzip.compress(plain)[:-600], "ends in the middle of its gzip data"),
    "broken gzip": (lambda plain: flipped(gzip.compress(plain), 10), "has broken gzip data"),
    "no gzip": (lambda plain: b"\x1f\x8b no gzip after all", "has broken gzip data"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_an_error_that_names_it(fake: FakeSet, tmp_path: Path, case: str) -> None:
    spoil, message = BAD_FILES[case]
    folder = write(tmp_path / "given", fake.plain)
    (folder / TRAIN_IMAGES).write_bytes(spoil(fake.plain[TRAIN_IMAGES]))
    with pytest.raises(DatasetError, match=re.escape(message)) as error:
        load("mnist", folder)
    assert str(error.value).startswith(str(folder / TRAIN_IMAGES))
    assert "delete it" in str(error.value)


def test_files_of_another_data_set_are_refused(fake: FakeSet, tmp_path: Path) -> None:
    folder = write(tmp_path / "given", FakeSet(seed=1).plain)
    with pytest.raises(DatasetError, match="It is not the published file of mnist"):
        load("mnist", folder)


def test_a_file_that_vanishes_cannot_be_read(fake: FakeSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        IDX_SETS["mnist"].files["train"].read(tmp_path / "gone")


# CURVES ---------------------------------------------------------------------------------------


def matrices(**replaced: object) -> dict[str, object]:
    rng = np.random.default_rng(0)
    whole: dict[str, object] = {"bdata": rng.random((50, 784)), "bdatatest": rng.random((20, 784))}
    return {name: matrix for name, matrix in (whole | replaced).items() if matrix is not None}


def test_curves_are_the_same_grey_levels_everywhere() -> None:
    images = curves_files.draw(100, seed=curves_files.SEED)
    assert images.shape == (100, 784)
    assert images.min() == 0
    assert images.max() == 255
    assert np.array_equal(curves_files.draw(40, seed=curves_files.SEED), images[:40])
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    assert digest[:16] == "04ba462e244c2cf8"


def test_curves_are_generated_once(generated_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("curves")
    assert first.source == "generated"
    assert first.train.shape == (50, 784)
    assert first.test.shape == (20, 784)
    assert first.train.max() == 1
    assert first.train_labels is None
    assert [path.name for path in generated_cache.parent.iterdir()] == ["generated.bin"]
    monkeypatch.setattr(curves_files, "_store", None)  # what is not called cannot fail
    again = load("curves")
    assert torch.equal(again.train, first.train)
    assert torch.equal(again.test, first.test)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: flipped(data, 1000),
        lambda data: flipped(data, 5),
        lambda data: data + b"\0",
    ],
)
def test_a_corrupt_cache_is_drawn_anew(
    generated_cache: Path, spoil: Callable[[bytes], bytes]
) -> None:
    first = load("curves")
    right = generated_cache.read_bytes()
    generated_cache.write_bytes(spoil(right))
    assert load("curves").fingerprint == first.fingerprint
    assert generated_cache.read_bytes() == right


def test_some_curves_are_the_first_of_the_generated_or_of_another_seed() -> None:
    few, others = datasets.some_curves(5, 2), datasets.some_curves(5, 2, seed=1)
    drawn = curves(7, seed=curves_files.SEED)
    assert torch.equal(torch.cat([few.train, few.test]), drawn)
    assert len(others.test) == 2
    assert others.fingerprint != few.fingerprint
    assert others.source != few.source


def test_the_cache_of_another_generator_is_drawn_anew(
    generated_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(curves_files, "SEED", 1)
        other = load("curves")
    assert generated_cache.exists()
    data = load("curves")
    assert data.fingerprint != other.fingerprint
    assert torch.equal(data.train, curves(50, seed=curves_files.SEED))


def test_a_cache_folder_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert load("curves").train.shape == (50, 784)


@pytest.mark.parametrize("folder", ["", "curves"])
def test_the_genuine_file_is_read_instead(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    images = matrices()
    savemat(tmp_path / folder / "digs3pts_1.mat", images)
    genuine, drawn = load("curves", tmp_path), load("curves")
    assert torch.equal(genuine.train, torch.tensor(images["bdata"]).float())
    assert torch.equal(genuine.test, torch.tensor(images["bdatatest"]).float())
    assert genuine.train.dtype == torch.float32
    assert (genuine.name, drawn.name) == ("curves", "curves")
    assert (genuine.source, drawn.source) == ("digs3pts_1.mat", "generated")
    assert (genuine.title, drawn.title) == ("curves (digs3pts_1.mat)", "curves (generated)")
    assert genuine.fingerprint != drawn.fingerprint


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"bdatatest": None}, "has no matrix bdatatest"),
        ({"bdata": np.zeros((3, 784))}, "matrix bdata of shape (3, 784), not (50, 784)"),
        ({"bdata": np.full((50, 784), 255.0)}, "other entries than numbers in [0, 1]"),
        ({"bdata": np.full((50, 784), np.nan)}, "other entries than numbers in [0, 1]"),
        ({"bdata": np.full((50, 784), 1j)}, "other entries than numbers in [0, 1]"),
    ],
)
def test_a_wrong_matlab_file_is_an_error(
    tmp_path: Path, replaced: dict[str, object], message: str
) -> None:
    path = tmp_path / "digs3pts_1.mat"
    savemat(path, matrices(**replaced))
    with pytest.raises(DatasetError, match=re.escape(message)) as error:
        load("curves", tmp_path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("keep", [0, 3, 200, 20000])
def test_a_cut_matlab_file_is_an_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "digs3pts_1.mat"
    savemat(path, matrices(), do_compression=True)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=r"digs3pts_1.mat .*Replace it"):
        load("curves", tmp_path)


def test_scipy_missing_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savemat(tmp_path / "digs3pts_1.mat", matrices())
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DatasetError, match=r"needs scipy.*pip install 'torch-locoprop\[study\]'"):
        load("curves", tmp_path)


# What a result records, and the overview -------------------------------------------------------


def test_the_fingerprint_is_that_of_all_images_and_of_nothing_else() -> None:
    images = torch.rand(6, 784)
    data = Dataset("mnist", images[:4], images[4:], "here")
    assert re.fullmatch("[0-9a-f]{16}", data.fingerprint)
    same = Dataset("mnist", images[:4].clone(), images[4:], "there", torch.zeros(4).long())
    assert same.fingerprint == data.fingerprint
    changed = images.clone()
    changed[5, 783] += 1e-3
    assert Dataset("mnist", changed[:4], changed[4:], "here").fingerprint != data.fingerprint
    assert Dataset("mnist", images[:3], images[3:], "here").fingerprint != data.fingerprint
    assert data.title == "mnist"
    assert data.metadata == {"name": "mnist", "source": "here", "fingerprint": data.fingerprint}


def test_status_says_where_or_what_is_missing(fake: FakeSet, tmp_path: Path) -> None:
    before = {entry.name: entry for entry in status()}
    assert tuple(before) == NAMES == ("curves", "mnist", "fashion-mnist")
    assert before["curves"].ready
    assert before["curves"].detail == "generated: on first use"
    assert not before["mnist"].ready
    assert before["mnist"].detail.startswith("missing, downloaded on first use: train-images")

    load("curves")
    write(tmp_path / "given/mnist", fake.plain)
    after = {entry.name: entry for entry in status(tmp_path / "given")}
    assert after["curves"].detail.endswith("generated.bin")
    assert after["mnist"] == ("mnist", True, str(tmp_path / "given/mnist"))


@pytest.mark.parametrize("kind", ["plain", "zipped"])
@pytest.mark.parametrize("role", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_data_set_is_ready_only_if_its_files_are_the_published_ones(
    fake: FakeSet, tmp_path: Path, kind: str, role: str
) -> None:
    """Labels count too: a data set with broken labels cannot be loaded."""
    folder, ending = tmp_path / "mnist", ".gz" if kind == "zipped" else ""
    write(folder, getattr(fake, kind))
    assert status(tmp_path, ["mnist"]) == [("mnist", True, str(folder))]
    path = folder / f"{role}{ending}"
    whole = fake.plain[role]
    for content, reason in (
        (whole[:-1], "bytes where"),
        (whole + b"0", "more bytes"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "SHA-256 differs"),
        (b"", "is empty"),
    ):
        path.write_bytes(gzip.compress(content) if ending else content)
        (found,) = status(tmp_path, ["mnist"])
        assert not found.ready
        assert found.detail.startswith(f"{path} ")
        assert reason in found.detail


def test_the_genuine_curves_are_ready_only_if_they_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = tmp_path / "digs3pts_1.mat"
    genuine.touch()
    (found,) = status(tmp_path, ["curves"])
    assert (found.ready, found.detail.startswith(f"{genuine} is not a MATLAB file")) == (
        False,
        True,
    )
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "read_mat", lambda path: None)
        assert status(tmp_path, ["curves"]) == [("curves", True, f"genuine: {genuine}")]

    def without_scipy(path: Path) -> None:
        raise ImportError

    monkeypatch.setattr(datasets, "read_mat", without_scipy)
    assert status(tmp_path, ["curves"]) == [("curves", False, f"{genuine} needs scipy")]


def test_a_broken_cache_of_curves_is_not_shown_as_their_place() -> None:
    load("curves")
    cache = datasets._curves_cache()
    assert status(None, ["curves"])[0].detail == f"generated: {cache}"
    cache.write_bytes(cache.read_bytes()[:-1])
    assert status(None, ["curves"])[0].detail == "generated: on first use"
