"""The timeline of a step: the parts of the benchmark that need no GPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import timeline
from benchmarks.timeline import Kernel

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KNOWN = sorted(RESULTS.glob("timeline-h200-*.json"))


def test_only_pauses_of_the_profiler_are_cut_out() -> None:
    long, short = timeline.PAUSE + 50, timeline.PAUSE - 5
    found = timeline.without_pauses(
        [
            Kernel("c", 1000 + 10 + long + 5 + short, 7, 2),
            Kernel("a", 1000, 10, 1),
            Kernel("b", 1000 + 10 + long, 5, 1),
            Kernel("beside", 1000 + 10 + long + 1, 2, 2),
        ]
    )
    starts = {kernel.name: kernel.start for kernel in found}
    assert starts == {"a": 0, "b": 10, "beside": 11, "c": 15 + short}
    assert timeline.span(found) == 15 + short + 7


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("residual", "local iterations: residual"),
        ("sm90_xmma_gemm_f32f32_tf32f32", "other matrix products"),
        ("void at::native::reduce_kernel<128, 4>", "sums"),
        ("encode_all", "all else"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert timeline.kind_of(name) == kind


def test_what_is_known_is_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(KNOWN) == 2
    options = ["--show", *map(str, KNOWN), "--figure", str(tmp_path / "timeline.png")]
    timeline.main(options)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all("kernels" in line for line in printed)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert (tmp_path / "timeline.pdf").exists()


def test_all_iterations_are_there() -> None:
    """Nine iterations have two kernels in each of seven layers, and one kernel in the code layer."""
    for path in KNOWN:
        names = [kernel[0] for kernel in json.loads(path.read_text())["kernels"]]
        squares = 1  # the same kernel computes XᵀX of the code layer's inputs
        assert names.count("residual") == 7 * 9 + squares
        assert names.count("step") == 8 * 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="--show"):
        timeline.main([])
