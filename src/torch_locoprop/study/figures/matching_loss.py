"""The picture of the matching loss: an area under f, and losses by activation (Figures 1 and 2).

The loss has one symbol everywhere, that of Eq. 5: D_F(â, a).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from torch_locoprop.paper import transfers
from torch_locoprop.paper.divergences import bregman
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.catalog import entry_of
from torch_locoprop.study.figures.figure_request import FigureRequest, MadeFigure

TITLE = "The matching loss of a transfer function f"
CAPTION = (
    "Left: the matching loss D_F(â, a) of tanh is the area between f and f(a) from a to â. Middle and "
    "right: the loss by the activation â for four targets a, each with a marker at â = a, where the "
    "loss is zero. With ReLU the losses of the two negative targets are one line, which is flat for "
    "â ≤ 0. Losses above 4 are outside the frame."
)

TARGETS = (-2.0, -0.5, 0.5, 2.0)
"""The targets a whose losses are drawn; ReLU is flat at two of them."""

SHADES = ("#2d9bc7", "#0b3a66", "#c98500", "#b3431b")
LINES: tuple[Any, ...] = ("-", (0, (2.2, 1.6)), (0, (6, 1.5, 1.2, 1.5)), (0, (7, 2)))
MARKERS = ("o", "s", "^", "D")
SYMBOL = "$D_F$(â, a)"
AREA = "#0b5fa5"
POINTS = 400

A, A_HAT = -0.6, 1.3
"""The target and the activation at the ends of the area."""


def area(transfer: Transfer, a: float, a_hat: float) -> tuple[Tensor, Tensor]:
    """Return z from a to â, and f(z) − f(a); its integral over z is the matching loss (Eq. 1)."""
    z = torch.linspace(a, a_hat, POINTS, dtype=torch.float64)
    return z, transfer.f(z) - transfer.f(z[:1])


def losses(transfer: Transfer, a: float, a_hat: Tensor) -> Tensor:
    """Return D_F(â, a) for each â (Eq. 5)."""
    return bregman(transfer, a_hat, torch.full_like(a_hat, a))


def make_matching_loss(request: FigureRequest) -> MadeFigure:
    """Write the picture and its caption."""
    entry = entry_of("matching-loss")
    made = f"Made by: `{request.command_for(entry.name)}`"
    files = style.save(draw([made] if request.provenance else []), request.out, entry.name)
    text = f"# {TITLE}\n\n{CAPTION}\n\nAnswers to the paper's {entry.paper}.\n\n{made}\n"
    files.append(style.save_caption(text, request.out, entry.name))
    return MadeFigure(entry.name, tuple(files))


def draw(footer: Sequence[str] = ()) -> Figure:
    """Return the picture with these lines below it."""
    figure = style.new_figure(12.4, 4.6, TITLE)
    first, second, third = figure.subplots(1, 3)
    tanh, relu = transfers.get("tanh"), transfers.get("relu")
    _area(first, tanh)
    _losses(second, tanh, "tanh: zero at â = a only")
    _losses(third, relu, "ReLU: flat where â, a ≤ 0")
    third.legend(loc="upper left", bbox_to_anchor=(1.02, 1.03), frameon=False)
    style.add_footer(figure, footer)
    return figure


def _area(axes: Axes, transfer: Transfer) -> None:
    z = torch.linspace(-2.4, 2.4, POINTS, dtype=torch.float64)
    axes.plot(z, transfer.f(z), color=style.INK, lw=1.9)
    between, height = area(transfer, A, A_HAT)
    base = float(transfer.f(between[:1]))
    axes.fill_between(between, base, base + height, color=AREA, alpha=0.28, lw=0)
    top = float(transfer.f(between[-1:]))
    for x, y, name in ((A, base, "a"), (A_HAT, top, "â")):
        axes.plot([x, x], [-1.15, y], color=style.FAINT, lw=1, ls=(0, (3, 3)))
        axes.plot([x], [y], "o", ms=5, color=AREA)
        axes.text(x, -1.19, name, ha="center", va="top", fontsize=11, color=style.INK)
    axes.plot([A, A_HAT], [base, base], color=AREA, lw=1)
    loss = float(losses(transfer, A, between[-1:]))
    axes.text(0.62, -0.22, f"{SYMBOL}\n= {loss:.2f}", ha="center", color=AREA, fontsize=10)
    axes.text(-2.3, base + 0.05, "f(a)", color=style.FAINT, fontsize=9)
    axes.text(-2.3, top + 0.05, "f(â)", color=style.FAINT, fontsize=9)
    for y, x in ((base, A), (top, A_HAT)):
        axes.plot([-2.4, x], [y, y], color=style.FAINT, lw=1, ls=(0, (3, 3)))
    axes.set(xlim=(-2.4, 2.4), ylim=(-1.15, 1.15), xticks=[])
    axes.set_xlabel("z", labelpad=12)
    style.finish(axes, "The area between f and f(a): tanh")
    axes.set_ylabel("f(z)")


def _losses(axes: Axes, transfer: Transfer, title: str) -> None:
    a_hat = torch.linspace(-4, 4, 801, dtype=torch.float64)
    looks = zip(TARGETS, SHADES, LINES, MARKERS, (4, 1.9, 1.9, 1.9), strict=True)
    for a, shade, dashes, marker, width in looks:
        # The first line is wider, as the second one covers it where f is flat.
        look: dict[str, Any] = {"color": shade, "ls": dashes, "lw": width, "marker": marker}
        at = [int((a_hat - a).abs().argmin())]
        value = losses(transfer, a, a_hat)
        axes.plot(a_hat, value, **look, ms=6, markevery=at, label=f"a = {a:g}".replace("-", "−"))
    axes.set(xlim=(-4, 4), ylim=(-0.15, 4), xlabel="â", ylabel=SYMBOL)
    style.finish(axes, title)
