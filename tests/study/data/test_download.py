"""Downloads from local servers that lose connections, refuse, hang and send wrong bytes."""

import gzip
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_idx import FakeSet

from torch_locoprop.study.data import datasets, download
from torch_locoprop.study.data.datasets import DatasetError, load
from torch_locoprop.study.data.download import DownloadError, fetch
from torch_locoprop.study.data.idx import IDX_SETS

CONTENT = bytes(range(256)) * 1000
RIGHT = {"file.gz": CONTENT}


class Mirror(ThreadingHTTPServer):
    """Serves `files`; each of `cuts` ends one answer after so many bytes, though more were promised."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.cuts: list[int] = []
        self.knows_ranges = True
        self.tells_length = True
        self.silent_after_cut = False
        self.over = threading.Event()
        self.requests: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        mirror, name, asked = self.server, self.path.strip("/"), self.headers["Range"]
        mirror.requests.append((name, asked))
        if name not in mirror.files:
            self.send_error(404)
            return
        data, start = mirror.files[name], 0
        if asked and mirror.knows_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if mirror.tells_length:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        cut = mirror.cuts.pop(0) if mirror.cuts else len(data)
        self.wfile.write(data[start : start + cut])
        if cut < len(data) and mirror.silent_after_cut:
            self.wfile.flush()
            mirror.over.wait(10)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirrors() -> Iterator[tuple[Mirror, Mirror]]:
    pair = Mirror(dict(RIGHT)), Mirror(dict(RIGHT))
    threads = [threading.Thread(target=mirror.serve_forever, args=(0.01,)) for mirror in pair]
    for thread in threads:
        thread.start()
    yield pair
    for mirror, thread in zip(pair, threads, strict=True):
        mirror.over.set()
        mirror.shutdown()
        mirror.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _direct_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "file.gz"


def part(path: Path) -> Path:
    return path.with_name("file.gz.part")


def urls(*mirrors: Mirror) -> list[str]:
    return [mirror.address + "file.gz" for mirror in mirrors]


def address_where_nobody_listens() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def check(path: Path) -> None:
    if path.read_bytes() != CONTENT:
        raise ValueError("is wrong")


def left_behind(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir() if file.name != ".lock")


def test_a_file_arrives_under_its_name_and_progress_is_told(
    mirrors: tuple[Mirror, Mirror], path: Path
) -> None:
    told: list[tuple[str, int, int | None]] = []
    fetch(urls(*mirrors), path, check, lambda *step: told.append(step))
    assert path.read_bytes() == CONTENT
    assert left_behind(path) == ["file.gz"]
    assert mirrors[1].requests == []
    assert told[-1] == ("file.gz", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})


def test_without_a_length_the_check_decides(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    mirrors[0].tells_length = False
    mirrors[0].cuts = [1000]
    told: list[int | None] = []
    fetch(urls(*mirrors), path, check, lambda name, done, total: told.append(total))
    assert path.read_bytes() == CONTENT
    assert told[0] is None
    assert mirrors[1].requests == [("file.gz", None)], "the short file was no beginning to go on"


def test_a_cut_connection_is_resumed(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    mirrors[0].cuts = [100_000, 50_000]
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT
    ranges = [asked for _, asked in mirrors[0].requests]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert mirrors[1].requests == []


def test_an_earlier_call_is_resumed(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    path.parent.mkdir()
    part(path).write_bytes(CONTENT[:77_777])
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT
    assert mirrors[0].requests == [("file.gz", "bytes=77777-")]


def test_the_second_mirror_goes_on_where_the_first_gave_up(
    mirrors: tuple[Mirror, Mirror], path: Path
) -> None:
    mirrors[0].cuts = [10] * download.ATTEMPTS
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT
    assert mirrors[1].requests == [("file.gz", f"bytes={10 * download.ATTEMPTS}-")]


def test_a_mirror_that_falls_silent_is_resumed(
    mirrors: tuple[Mirror, Mirror], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 1.0)
    monkeypatch.setattr(download, "CHUNK", 1000)
    mirrors[0].cuts = [200_000]
    mirrors[0].silent_after_cut = True
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT
    assert mirrors[0].requests[1:] == [("file.gz", "bytes=200000-")]


def test_a_mirror_without_ranges_begins_anew(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    mirrors[0].knows_ranges = False
    mirrors[0].cuts = [100_000]
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "wrong", [b"\0" * 1000, CONTENT[:-1] + b"\0", b"\0" * len(CONTENT), CONTENT + b"\0"]
)
def test_a_part_of_something_else_is_thrown_away(
    mirrors: tuple[Mirror, Mirror], path: Path, wrong: bytes
) -> None:
    path.parent.mkdir()
    part(path).write_bytes(wrong)
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT
    assert mirrors[0].requests == [("file.gz", f"bytes={len(wrong)}-"), ("file.gz", None)]


def test_a_complete_part_is_only_renamed(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    path.parent.mkdir()
    part(path).write_bytes(CONTENT)
    fetch(urls(*mirrors), path, check)
    assert left_behind(path) == ["file.gz"]
    assert len(mirrors[0].requests) == 1


def test_a_wrong_file_is_asked_of_the_next_mirror(
    mirrors: tuple[Mirror, Mirror], path: Path
) -> None:
    mirrors[0].files["file.gz"] = b"something else"
    fetch(urls(*mirrors), path, check)
    assert path.read_bytes() == CONTENT


def test_wrong_files_everywhere_leave_nothing_behind(
    mirrors: tuple[Mirror, Mirror], path: Path
) -> None:
    for mirror in mirrors:
        mirror.files["file.gz"] = b"something else"
    with pytest.raises(DownloadError, match=r"the file is wrong.*the file is wrong"):
        fetch(urls(*mirrors), path, check)
    assert left_behind(path) == []


def test_cuts_without_end_are_given_up(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    mirrors[0].cuts = [10] * 100
    with pytest.raises(DownloadError, match=r"the connection was lost after 40 of 256,000 bytes"):
        fetch(urls(mirrors[0]), path, check)
    assert part(path).read_bytes() == CONTENT[:40], "kept for the next call"


def test_processes_wait_for_each_other(mirrors: tuple[Mirror, Mirror], path: Path) -> None:
    """Threads simulate processes: the lock belongs to an open file, not to a process."""
    threads = [threading.Thread(target=fetch, args=(urls(*mirrors), path, check)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == CONTENT
    assert len(mirrors[0].requests) == 1


# The same through load --------------------------------------------------------------------------


@pytest.fixture
def fake(
    mirrors: tuple[Mirror, Mirror], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> FakeSet:
    fake = FakeSet()
    for mirror in mirrors:
        mirror.files = dict(fake.zipped)
    monkeypatch.setitem(IDX_SETS, "mnist", fake.description(*(m.address for m in mirrors)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_LOCOPROP_DATA", raising=False)
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "debian")
    return fake


def test_load_downloads_once_images_last(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, tmp_path: Path
) -> None:
    first, second = load("mnist"), load("mnist", download=False)
    assert first.fingerprint == second.fingerprint
    assert second.train_labels is not None
    assert second.train_labels.tolist() == fake.arrays["train_labels"].tolist()
    asked = [name for name, _ in mirrors[0].requests]
    assert sorted(asked) == sorted(fake.zipped)
    assert ["images" in name for name in asked] == [False, False, True, True]
    cached = sorted(file.name for file in (tmp_path / "torch-locoprop/mnist").glob("[!.]*"))
    assert cached == sorted(fake.zipped)


@pytest.mark.parametrize("compress", [lambda plain: plain, lambda plain: gzip.compress(plain, 1)])
def test_mirrors_may_compress_as_they_like(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, compress: Callable[[bytes], bytes]
) -> None:
    mirrors[0].files = {f"{name}.gz": compress(data) for name, data in fake.plain.items()}
    assert load("mnist").train.shape == (6, 784)
    assert mirrors[1].requests == []


def test_only_what_a_folder_lacks_is_downloaded(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, tmp_path: Path
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    for name, data in fake.plain.items():
        if "t10k-images" not in name:
            (folder / name).write_bytes(data)
    assert load("mnist", folder).test.shape == (4, 784)
    assert [name for name, _ in mirrors[0].requests] == ["t10k-images-idx3-ubyte.gz"]


def test_the_second_mirror_is_used_when_the_first_is_down(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = fake.description(address_where_nobody_listens(), mirrors[1].address)
    monkeypatch.setitem(IDX_SETS, "mnist", description)
    assert load("mnist").train.shape == (6, 784)


def test_no_mirror_is_one_sentence_with_what_to_do(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors[1].files = {}
    description = fake.description(address_where_nobody_listens(), mirrors[1].address)
    monkeypatch.setitem(IDX_SETS, "mnist", description)
    expected = r"mnist: train-labels-.*\.gz could not be downloaded \(127.0.0.1:\d+: Connection "
    expected += r"refused; 127.0.0.1:\d+: HTTP status 404\)\. Try again .* with --data-dir or "
    with pytest.raises(DatasetError, match=expected):
        load("mnist")


def test_wrong_contents_are_not_kept(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet, tmp_path: Path
) -> None:
    for mirror in mirrors:
        mirror.files = dict(FakeSet(seed=1).zipped)
    with pytest.raises(DatasetError, match="has other contents than the published file"):
        load("mnist")
    assert list((tmp_path / "torch-locoprop/mnist").glob("[!.]*")) == []


def test_a_folder_that_cannot_be_written_is_named(
    fake: FakeSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    expected = re.escape(str(tmp_path / "a file")) + r".*cannot be written \(Not a directory\)"
    with pytest.raises(DatasetError, match=expected):
        load("mnist")


def test_a_full_disk_is_not_the_mirrors_fault(
    mirrors: tuple[Mirror, Mirror], fake: FakeSet
) -> None:
    """A limit on the size of files simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(DatasetError, match=r"cannot be written \(File too large\). Set XDG"):
            load("mnist")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert mirrors[1].requests == []
    assert load("mnist").train.shape == (6, 784)
