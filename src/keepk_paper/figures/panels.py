"""Panels that show a run, drawn with matplotlib (the extra ``keepk[demo]``).

Figures are built without pyplot, so that no display is needed and no global state changes.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from keepk.reports.tables import EpochRecord, LayerCount

DPI = 160
BLUE, ORANGE = "#0072B2", "#D55E00"  # from the palette of Okabe and Ito, which colour-blind readers can tell apart
INK, SOFT, TRACK = "#222222", "#595959", "#E6E6E6"
PHASE_SHADES = ("#FFFFFF", "#E9EEF4", "#F7F3EA")
SMALL, LARGE = 11.5, 13


def draw_run(upper: Axes, lower: Axes, history: Sequence[EpochRecord], total: int, *, unit: str) -> None:
    """Draw accuracy in `upper` and kept units in `lower` over the same epochs, with the phases shaded and named."""
    draw_accuracy(upper, history)
    draw_kept(lower, history, total, unit=unit)
    for axes in (upper, lower):
        _shade_phases(axes, history)
        axes.set_xlim(0, len(history))
        tidy(axes)
    _name_phases(upper, history)
    upper.tick_params(labelbottom=False)


def draw_accuracy(axes: Axes, history: Sequence[EpochRecord]) -> None:
    """Draw the validation accuracy at the end of every epoch."""
    accuracies = [epoch.accuracy for epoch in history]
    axes.plot(range(1, len(history) + 1), accuracies, color=ORANGE, linewidth=2.2, label="validation accuracy")
    axes.set_ylabel("validation\naccuracy")
    axes.set_ylim(top=101)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))


def draw_kept(axes: Axes, history: Sequence[EpochRecord], total: int, *, unit: str) -> None:
    """Draw the number of units left as steps, because pruning happens at the end of an epoch."""
    epochs, kept = range(len(history) + 1), [total, *(epoch.kept for epoch in history)]
    axes.fill_between(epochs, kept, 1, step="post", color=BLUE, alpha=0.18, linewidth=0)
    axes.step(epochs, kept, where="post", color=BLUE, linewidth=2.2, label=f"{unit} kept")
    axes.set_yscale("log")  # a plan falls by shares, which a linear axis shows as a flat line near the end
    axes.set_ylim(kept[-1] / 2, total * 1.9)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel(f"{unit} kept\n(log scale)")
    axes.set_xlabel("epoch")
    _note(axes, f"{total:,}", 0, total, side="left")
    _note(axes, f"exactly {kept[-1]:,}", len(history), kept[-1], side="right")


def draw_layers(axes: Axes, layers: Sequence[LayerCount]) -> None:
    """Draw one bar per layer: the kept share on a grey track that represents the whole layer."""
    rows = range(len(layers), 0, -1)
    shares = [100 * layer.kept / layer.total for layer in layers]
    axes.barh(rows, [100] * len(layers), height=0.2, color=TRACK, label="total")
    axes.barh(rows, shares, height=0.2, color=BLUE, label="kept")
    for row, layer, share in zip(rows, layers, shares, strict=True):
        above = row + 0.17
        axes.text(0, above, layer.name, color=INK, fontsize=LARGE, fontweight="bold", va="bottom")
        axes.text(100, above, f"{share:.1f} %", color=INK, fontsize=LARGE, fontweight="bold", va="bottom", ha="right")
        below = f"{layer.kept:,} of {layer.total:,}"
        axes.text(0, row - 0.17, below, color=SOFT, fontsize=SMALL, va="top")
    axes.set_xlim(0, 100)
    axes.set_ylim(0.55, len(layers) + 0.5)
    axes.set_axis_off()


def write_png(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG."""
    figure.savefig(path, format="png", dpi=DPI)


def tidy(axes: Axes) -> None:
    """Apply the common style: two spines, grey labels, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=SMALL)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=SOFT, fontsize=SMALL)
    axes.grid(axis="y", color="#D5D5D5", linewidth=0.6)
    axes.set_axisbelow(True)


def _note(axes: Axes, words: str, epoch: int, kept: int, *, side: Literal["left", "right"]) -> None:
    away = (5 if side == "left" else -5, 3)
    style = {"color": BLUE, "fontsize": LARGE, "fontweight": "bold", "ha": side, "va": "bottom"}
    axes.annotate(words, (epoch, kept), xytext=away, textcoords="offset points").set(**style)


def _spans(history: Sequence[EpochRecord]) -> list[tuple[str, int, int]]:
    """The name, first and last epoch of each phase."""
    spans, start = list[tuple[str, int, int]](), 0
    for phase, epochs in groupby(history, key=lambda epoch: epoch.phase):
        end = start + len(list(epochs))
        spans.append((phase, start, end))
        start = end
    return spans


def _shade_phases(axes: Axes, history: Sequence[EpochRecord]) -> None:
    for position, (_, start, end) in enumerate(_spans(history)):
        axes.axvspan(start, end, color=PHASE_SHADES[position % len(PHASE_SHADES)], zorder=0, linewidth=0)


def _name_phases(axes: Axes, history: Sequence[EpochRecord]) -> None:
    for phase, start, end in _spans(history):
        place = (start + end) / 2
        axes.text(place, 1.04, phase, transform=axes.get_xaxis_transform(), ha="center", color=SOFT, fontsize=SMALL)
