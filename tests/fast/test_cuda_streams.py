"""Which stream waits for which when layers are solved side by side, with emulated streams."""

import pytest
import torch
from streams import CUDA

from torch_locoprop.fast import cuda_streams


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CUDA:
    return CUDA(monkeypatch)


def test_lanes_wait_for_what_came_before_and_all_waits_for_them(cuda: CUDA) -> None:
    with cuda_streams.side_streams() as side:
        for _ in range(2):
            with side(None):
                assert CUDA.now is not cuda.main
    assert [stream.waits for stream in cuda.side[:3]] == [["all of main"], ["all of main"], []]
    assert cuda.main.waits == ["all of side 0", "all of side 1"]


def test_a_side_stream_that_is_used_again_waits_again(cuda: CUDA) -> None:
    """It waits for new work on the main stream, as a population needs it."""
    with cuda_streams.side_streams() as side:
        for _ in range(cuda_streams.MANY_STREAMS + 1):
            with side(None):
                pass
    assert cuda.side[0].waits == ["all of main"] * 2


def test_work_that_need_not_wait_longer_than_for_its_mark(cuda: CUDA) -> None:
    assert cuda_streams.ready_event() is None
    with cuda_streams.overlapping_backward():
        mark = cuda_streams.ready_event()
    assert mark is not None
    assert cuda_streams.ready_event() is None
    with cuda_streams.side_streams() as side, side(mark):
        pass
    assert cuda.side[0].waits == ["an event of main"]


def test_fewer_lanes_where_they_cost_memory(cuda: CUDA) -> None:
    with cuda_streams.side_streams(2) as side:
        for _ in range(3):
            with side(None):
                pass
    assert [len(stream.waits) for stream in cuda.side[:3]] == [2, 1, 0]


def test_the_stream_of_a_recording_is_never_one_of_its_side_streams(
    cuda: CUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has few streams and may record on one of these: all others would wait for it."""
    for now in (cuda.side[0], cuda.gradient[0]):
        monkeypatch.setattr(CUDA, "now", now)
        with cuda_streams.side_streams() as side, side(None):
            assert CUDA.now is not now
        with cuda_streams.overlapping_backward():
            cuda_streams.enter_gradient_stream()
            with cuda_streams.on_gradient_stream():
                assert CUDA.now is not now


def test_work_beside_waits_for_what_was_there_and_marks_for_both(cuda: CUDA) -> None:
    g = torch.ones(1)
    with cuda_streams.overlapping_backward():
        cuda_streams.enter_gradient_stream(g)
        with cuda_streams.on_gradient_stream():
            assert CUDA.now is cuda.gradient[0]
        mark = cuda_streams.ready_event()
        assert any(
            each is g for each in cuda_streams._read
        )  # others' memory only when that is read
        cuda_streams.enter_gradient_stream()
        with cuda_streams.on_gradient_stream():
            assert CUDA.now is cuda.gradient[1]
        cuda_streams.leave_gradient_stream()
        with cuda_streams.on_gradient_stream():
            assert CUDA.now is cuda.main
        alone = cuda_streams.ready_event()
    assert not cuda_streams._read
    assert mark is not None
    assert alone is not None
    assert (mark.after, alone.after) == ("gradient 0", "main")
    assert cuda.gradient[0].waits == ["all of main", "all of main"]  # at the beginning, at the mark
    assert cuda.gradient[1].waits == ["all of main"]
    assert cuda.main.waits == ["all of gradient 0", "all of gradient 1"]  # at the end


def test_streams_beside_are_used_again(cuda: CUDA) -> None:
    with cuda_streams.overlapping_backward():
        for _ in range(cuda_streams.GRADIENT_STREAMS + 1):
            cuda_streams.enter_gradient_stream()
    assert [len(stream.waits) for stream in cuda.gradient] == [2] + [1] * (
        cuda_streams.GRADIENT_STREAMS - 1
    )


def test_nothing_is_beside_outside_of_such_a_step(cuda: CUDA) -> None:
    cuda_streams.enter_gradient_stream(torch.ones(1))
    with cuda_streams.on_gradient_stream():
        assert CUDA.now is cuda.main
    assert not cuda_streams._read


def test_a_step_that_fails_leaves_nothing_behind(cuda: CUDA) -> None:
    def failing() -> None:
        with cuda_streams.overlapping_backward():
            cuda_streams.enter_gradient_stream(torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not cuda_streams._read
    with cuda_streams.on_gradient_stream():
        assert CUDA.now is cuda.main


def test_outside_a_recording_there_is_one_stream() -> None:
    with cuda_streams.overlapping_backward():
        assert cuda_streams.ready_event() is None
    with cuda_streams.side_streams() as side, side(None):
        pass
