"""Show when each kernel of a training step runs, and on which stream of the GPU.

    python -m benchmarks.timeline --method locoprop-m --model standard --out timeline.json
    python -m benchmarks.timeline --show before.json after.json --figure timeline.png   # no GPU needed

The step is a CUDA graph, recorded by PyTorch's profiler. The profiler causes pauses in which no kernel
runs. A step without the profiler has no such pauses, so they are removed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks import step_table
from benchmarks.contestants import Task, get
from benchmarks.options import add_options
from benchmarks.steps import graphed
from torch_locoprop.study.figures import style
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.training.config import PRECISIONS

PAUSE = 20.0  # a time without kernels of more microseconds is a pause of the profiler

KINDS = {  # words in a kernel's name, and a colour; the first kind that fits counts
    "local iterations: residual": ("residual", "#0b5fa5"),
    "local iterations: step": ("step", "#4fb3d9"),
    "other matrix products": ("gemm gemv cutlass splitK dot_kernel", "#c8401a"),
    "sums": ("reduce", "#eaa221"),
    "all else": ("", "#9a9a9a"),
}


class Kernel(NamedTuple):
    """One execution of a kernel; times are in microseconds."""

    name: str
    start: float
    duration: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.duration


def without_pauses(kernels: list[Kernel]) -> list[Kernel]:
    """Remove the pauses of the profiler, and let the first kernel start at time zero."""
    found: list[Kernel] = []
    cut, busy_until = 0.0, None
    for kernel in sorted(kernels, key=lambda each: each.start):
        if busy_until is None or kernel.start - busy_until > PAUSE:
            cut += kernel.start - (busy_until or 0.0)
        busy_until = max(busy_until or 0.0, kernel.end)
        found.append(kernel._replace(start=kernel.start - cut))
    return found


def span(kernels: list[Kernel]) -> float:
    """Return the time from the start of the first kernel to the end of the last."""
    return max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)


def kind_of(name: str) -> str:
    """Return the kind of a kernel: a key of `KINDS`."""
    return next(
        kind
        for kind, (words, _) in KINDS.items()
        if not words or any(word in name for word in words.split())
    )


def recorded(method: str, model: str, precision: str) -> list[Kernel]:
    """Record the kernels of one step of a method on the GPU."""
    with matmul_precision(precision):
        step = graphed(get(method), Task(model, device="cuda"))
        if step is None:
            raise SystemExit(f"A step of {method} cannot be a CUDA graph.")
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return without_pauses(
        [
            Kernel(event["name"], event["ts"], event["dur"], event["args"]["stream"])
            for event in events
            if event.get("cat") == "kernel"
        ]
    )


def draw(contents: list[dict[str, Any]]) -> Figure:
    """Return a figure with a panel for each recording, all with the same time scale."""
    own = [[Kernel(*each) for each in content["kernels"]] for content in contents]
    where = contents[0]["environment"]
    rows = [sorted({kernel.stream for kernel in kernels}) for kernels in own]
    figure = style.new_figure(
        10, 1.6 + 0.24 * sum(map(len, rows)) + 0.7 * len(own),
        "The kernels of one training step as a CUDA graph",
        f"{where['machine']}, PyTorch {where['torch']}; times measured by the profiler",
    )  # fmt: skip
    ratios = [len(streams) + 1 for streams in rows]
    panels = figure.subplots(len(own), 1, squeeze=False, sharex=True, height_ratios=ratios)[:, 0]
    for axes, content, kernels, streams in zip(panels, contents, own, rows, strict=True):
        for kernel in kernels:
            paint = KINDS[kind_of(kernel.name)][1]
            place = streams.index(kernel.stream)
            axes.barh(place, kernel.duration, 0.8, kernel.start, color=paint, linewidth=0)
        axes.set_yticks(range(len(streams)), [f"stream {i + 1}" for i in range(len(streams))])
        axes.invert_yaxis()
        about = f"{content['method']}, {content['model']}, {content['precision']}"
        axes.set_title(
            f"{content.get('title', about)}: {span(kernels) / 1000:.2f} ms", fontsize=9, loc="left"
        )
    panels[-1].set_xlabel("microseconds")
    used = {kind_of(kernel.name) for kernels in own for kernel in kernels}
    patches = [Patch(color=paint, label=kind) for kind, (_, paint) in KINDS.items() if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="locoprop-m")
    parser.add_argument("--model", default="standard")
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS)
    parser.add_argument("--title", help="title of the panel in the figure")
    add_options(parser, "out", "figure")
    add_options(parser, "show", nargs="+")
    options = parser.parse_args(arguments)
    if options.show:
        contents = [json.loads(path.read_text()) for path in options.show]
    elif not torch.cuda.is_available():
        raise SystemExit("No GPU found. Use --show and --figure to draw recordings that exist.")
    else:
        known = {name: getattr(options, name) for name in ("method", "model", "precision", "title")}
        kernels = recorded(options.method, options.model, options.precision)
        content = {name: value for name, value in known.items() if value is not None}
        contents = [{**content, "environment": environment("cuda"), "kernels": kernels}]
        if options.out:
            step_table.write(options.out, contents[0])
    for content in contents:
        kernels = [Kernel(*each) for each in content["kernels"]]
        busy = sum(kernel.duration for kernel in kernels) / span(kernels)
        print(
            f"{content.get('title', content['method'])}: {len(kernels)} kernels, "
            f"{span(kernels) / 1000:.3f} ms, {busy:.1f} at a time on average"
        )
    if options.figure:
        style.save(draw(contents), options.figure.parent, options.figure.stem)


if __name__ == "__main__":
    main()
