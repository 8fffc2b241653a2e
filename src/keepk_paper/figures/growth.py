"""The figure of docs/large_models.md: time and memory of a trace and of an event by depth and width.

``python -m keepk_paper.figures.growth`` draws it from `results/benchmarks/growth.json` into `docs/images`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from keepk_paper.figures.panels import BLUE, DPI, INK, ORANGE, SOFT, tidy, write_png

# By key of a row: its name, colour and marker. Markers differ, so that a print in grey is readable.
TIMES = {"trace_cpu_seconds": ("trace", BLUE, "o"), "event_cpu_seconds": ("event", ORANGE, "s")}
OVER = {"layers": "layers (log scale)", "width": "width (log scale)"}


def growth_figure(report: Mapping[str, Any]) -> Figure:
    """CPU seconds over depth and over width, with lines of slope 1 for comparison."""
    figure = Figure(figsize=(8, 3.8), dpi=DPI, facecolor="white")
    for place, (over, label) in enumerate(OVER.items()):
        rows = report[over]
        axes = figure.add_axes((0.1 + 0.48 * place, 0.16, 0.4, 0.66))
        sizes = [row[over] for row in rows]
        for key, (name, colour, marker) in TIMES.items():
            seconds = [row[key] for row in rows]
            slope = report["slopes"][over][key]
            axes.plot(sizes, seconds, color=colour, marker=marker, linewidth=2, label=f"{name}, slope {slope:.2f}")
            proportional = [seconds[0] * size / sizes[0] for size in sizes]
            axes.plot(sizes, proportional, color=SOFT, linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel(label, color=SOFT)
        if not place:
            axes.set_ylabel("CPU seconds (log scale)", color=SOFT)
        tidy(axes)
        axes.legend(loc="upper left", frameon=False, labelcolor=INK)
    figure.text(
        0.02, 0.93, "Time of a trace and of an event of a Llama (dotted: proportional)", fontsize=13,
        fontweight="bold", color=INK, va="center",
    )  # fmt: skip
    return figure


if __name__ == "__main__":
    found = json.loads(Path("results/benchmarks/growth.json").read_text())
    write_png(growth_figure(found), Path("docs/images/growth.png"))
