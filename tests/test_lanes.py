"""What waits for what when layers are solved side by side, with streams that only take notes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from torch_locoprop import lanes


class Event:
    def __init__(self) -> None:
        self.after: str | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.after = (stream or CUDA.now).name


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"all of {other.name}")

    def wait_event(self, event: Event) -> None:
        self.waits.append(f"an event of {event.after}")


class CUDA:
    """What ``lanes`` asks torch for."""

    now: Stream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.own = Stream("main"), [Stream(f"lane {i}") for i in range(lanes.LANES)]
        CUDA.now = self.main
        monkeypatch.setattr(lanes, "_is_capturing", lambda: True)
        monkeypatch.setattr(lanes, "_streams", lambda device: self.own)
        self.beside = [Stream(f"beside {i}") for i in range(lanes.BESIDE)]
        monkeypatch.setattr(lanes, "_streams_beside", lambda device: self.beside)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: CUDA.now)
        monkeypatch.setattr(torch.cuda, "stream", self._inside)
        monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextmanager
    def _inside(self, stream: Stream) -> Iterator[None]:
        before, CUDA.now = CUDA.now, stream
        yield
        CUDA.now = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CUDA:
    return CUDA(monkeypatch)


def test_lanes_wait_for_what_came_before_and_all_waits_for_them(cuda: CUDA) -> None:
    with lanes.lanes() as lane:
        for _ in range(2):
            with lane(None):
                assert CUDA.now is not cuda.main
    assert [stream.waits for stream in cuda.own[:3]] == [["all of main"], ["all of main"], []]
    assert cuda.main.waits == ["all of lane 0", "all of lane 1"]


def test_a_lane_that_is_used_again_waits_again(cuda: CUDA) -> None:
    """For what was made on the main stream in between, as a population does."""
    with lanes.lanes() as lane:
        for _ in range(lanes.LANES + 1):
            with lane(None):
                pass
    assert cuda.own[0].waits == ["all of main"] * 2


def test_work_that_need_not_wait_longer_than_for_its_mark(cuda: CUDA) -> None:
    assert lanes.mark() is None
    with lanes.as_gradients_come():
        mark = lanes.mark()
    assert mark is not None
    assert lanes.mark() is None
    with lanes.lanes() as lane, lane(mark):
        pass
    assert cuda.own[0].waits == ["an event of main"]


def test_fewer_lanes_where_they_cost_memory(cuda: CUDA) -> None:
    with lanes.lanes(2) as lane:
        for _ in range(3):
            with lane(None):
                pass
    assert [len(stream.waits) for stream in cuda.own[:3]] == [2, 1, 0]


def test_work_beside_waits_for_what_was_there_and_marks_for_both(cuda: CUDA) -> None:
    g = torch.ones(1)
    with lanes.as_gradients_come():
        lanes.open_beside(g)
        with lanes.beside():
            assert CUDA.now is cuda.beside[0]
        mark = lanes.mark()
        assert any(each is g for each in lanes._held)  # others' memory only when that is read
        lanes.open_beside()
        with lanes.beside():
            assert CUDA.now is cuda.beside[1]
        lanes.main_alone()
        with lanes.beside():
            assert CUDA.now is cuda.main
        alone = lanes.mark()
    assert not lanes._held
    assert mark is not None
    assert alone is not None
    assert (mark.after, alone.after) == ("beside 0", "main")
    assert cuda.beside[0].waits == ["all of main", "all of main"]  # at the beginning, at the mark
    assert cuda.beside[1].waits == ["all of main"]
    assert cuda.main.waits == ["all of beside 0", "all of beside 1"]  # at the end


def test_streams_beside_are_used_again(cuda: CUDA) -> None:
    with lanes.as_gradients_come():
        for _ in range(lanes.BESIDE + 1):
            lanes.open_beside()
    assert [len(stream.waits) for stream in cuda.beside] == [2] + [1] * (lanes.BESIDE - 1)


def test_nothing_is_beside_outside_of_such_a_step(cuda: CUDA) -> None:
    lanes.open_beside(torch.ones(1))
    with lanes.beside():
        assert CUDA.now is cuda.main
    assert not lanes._held


def test_a_step_that_fails_leaves_nothing_behind(cuda: CUDA) -> None:
    def failing() -> None:
        with lanes.as_gradients_come():
            lanes.open_beside(torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not lanes._held
    with lanes.beside():
        assert CUDA.now is cuda.main


def test_outside_a_recording_there_is_one_stream() -> None:
    with lanes.as_gradients_come():
        assert lanes.mark() is None
    with lanes.lanes() as lane, lane(None):
        pass
