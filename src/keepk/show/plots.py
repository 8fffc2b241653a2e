"""Pictures of a run, drawn with matplotlib (the extra ``keepk[demo]``) without a screen and without global state."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from keepk.run.report import EpochRecord, LayerCount

DPI = 160
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: told apart by every kind of eye
INK, SOFT, TRACK = "#222222", "#6B6B6B", "#E6E6E6"
PHASE_SHADES = ("#FFFFFF", "#F1F5F9")


def pruning_figure(
    history: Sequence[EpochRecord], layers: Sequence[LayerCount], *, whole: LayerCount, title: str, subtitle: str = ""
) -> Figure:
    """A run in two panels: accuracy and weights kept over the epochs; weights kept by layer, and of the whole."""
    figure = Figure(figsize=(10, 4.4), dpi=DPI, facecolor="white")
    figure.text(0.02, 0.945, title.replace("->", "→"), fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 0.875, subtitle, fontsize=10, color=SOFT, va="center")
    left = figure.add_gridspec(2, 1, left=0.105, right=0.61, top=0.76, bottom=0.12, height_ratios=(2, 3), hspace=0.14)
    right = figure.add_gridspec(1, 1, left=0.67, right=0.98, top=0.76, bottom=0.12)
    upper = figure.add_subplot(left[0])
    lower = figure.add_subplot(left[1], sharex=upper)
    draw_accuracy(upper, history)
    draw_kept(lower, history, whole.total)
    for axes in (upper, lower):
        _shade_phases(axes, history)
        _tidy(axes)
    _name_phases(upper, history)
    upper.tick_params(labelbottom=False)
    draw_layers(figure.add_subplot(right[0]), [*layers, whole])
    return figure


def draw_accuracy(axes: Axes, history: Sequence[EpochRecord]) -> None:
    """Validation accuracy at the end of every epoch."""
    accuracies = [epoch.accuracy for epoch in history]
    axes.plot(range(1, len(history) + 1), accuracies, color=ORANGE, linewidth=1.8, label="validation accuracy")
    axes.set_ylabel("validation\naccuracy")
    axes.set_ylim(top=101)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))


def draw_kept(axes: Axes, history: Sequence[EpochRecord], total: int) -> None:
    """How many weights are left, as steps: pruning happens at the end of an epoch."""
    epochs, kept = range(len(history) + 1), [total, *(epoch.kept for epoch in history)]
    axes.fill_between(epochs, kept, 1, step="post", color=BLUE, alpha=0.18, linewidth=0)
    axes.step(epochs, kept, where="post", color=BLUE, linewidth=1.8, label="weights kept")
    axes.set_yscale("log")
    axes.set_ylim(kept[-1] / 2.5, total * 1.9)
    axes.set_xlim(0, len(history))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("weights kept\n(log scale)")
    axes.set_xlabel("epoch")
    _note(axes, f"{total:,}", 0, total, side="left")
    _note(axes, f"exactly {kept[-1]:,}", len(history), kept[-1], side="right")


def draw_layers(axes: Axes, layers: Sequence[LayerCount]) -> None:
    """Kept of total by layer: the grey track is the whole layer."""
    rows = range(len(layers), 0, -1)
    shares = [100 * layer.kept / layer.total for layer in layers]
    axes.barh(rows, [100] * len(layers), height=0.26, color=TRACK, label="total")
    axes.barh(rows, shares, height=0.26, color=BLUE, label="kept")
    for row, layer, share in zip(rows, layers, shares, strict=True):
        axes.text(0, row + 0.22, layer.name, color=INK, fontsize=11, fontweight="bold", va="bottom")
        axes.text(
            50, row + 0.22, f"{layer.kept:,} of {layer.total:,}", color=SOFT, fontsize=10, va="bottom", ha="center"
        )
        axes.text(100, row + 0.22, f"{share:.1f} %", color=INK, fontsize=11, fontweight="bold", va="bottom", ha="right")
    axes.set_xlim(0, 100)
    axes.set_ylim(0.87, len(layers) + 0.6)
    axes.set_title("weights kept by layer", fontsize=10, color=SOFT, pad=8)
    axes.set_axis_off()


def write_png(figure: Figure, path: Path) -> None:
    """The figure as a PNG."""
    figure.savefig(path, format="png", dpi=DPI)


def _note(axes: Axes, words: str, epoch: int, kept: int, *, side: Literal["left", "right"]) -> None:
    away = (5 if side == "left" else -5, 3)
    style = {"color": BLUE, "fontsize": 10.5, "fontweight": "bold", "ha": side, "va": "bottom"}
    axes.annotate(words, (epoch, kept), xytext=away, textcoords="offset points").set(**style)


def _spans(history: Sequence[EpochRecord]) -> list[tuple[str, int, int]]:
    """By phase: its name and the epochs between which it lies."""
    spans, start = list[tuple[str, int, int]](), 0
    for phase, epochs in groupby(history, key=lambda epoch: epoch.phase):
        end = start + len(list(epochs))
        spans.append((phase, start, end))
        start = end
    return spans


def _shade_phases(axes: Axes, history: Sequence[EpochRecord]) -> None:
    for position, (_, start, end) in enumerate(_spans(history)):
        axes.axvspan(start, end, color=PHASE_SHADES[position % 2], zorder=0, linewidth=0)


def _name_phases(axes: Axes, history: Sequence[EpochRecord]) -> None:
    for phase, start, end in _spans(history):
        place = (start + end) / 2
        axes.text(place, 1.04, phase, transform=axes.get_xaxis_transform(), ha="center", color=SOFT, fontsize=10)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.xaxis.label.set_color(SOFT)
    axes.yaxis.label.set_color(SOFT)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
