"""The README's table of results: units kept, test error, and how much smaller the network is.

Its rows are chosen by rule, so that new results need no edit: for each network and percentage, the run with the lowest
validation error that has a dense control of the same precision, beside that control. The pretrained networks of
`examples/` follow.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from keepk.reports.tables import Table
from keepk_paper.tables.budgets import pretrained_rows

if TYPE_CHECKING:
    from keepk_paper.report.lines import Line, Lines, Results
    from keepk_paper.report.runs import Setting

# Experiments and percentages of removed units, the networks of the paper's width first.
ROWS = (
    *(("vgg16-full-cifar10", 60), ("vgg16-full-cifar10", 70), ("vgg16-svhn", 60)),
    *(("vgg16-half-cifar10", 60), ("vgg16-half-cifar10", 70), ("vgg16-cifar10", 60), ("vgg16-cifar10", 70)),
    *(("densenet40-cifar10", 60), ("vgg16-half-cifar100", 50), ("densenet40-cifar100", 60), ("densenet40-svhn", 60)),
)
COLUMNS = ("network", "kept", "test error %", "dense %", "seeds", "parameters", "MACs")


def summary_table(result_folder: Path) -> Table:
    """The table, with test errors averaged over the seeds that a run and its control both have."""
    from keepk_paper.report import lines, runs  # noqa: PLC0415 - the other tables need none of it

    results = lines.read_folder(result_folder)
    rows = list[tuple[str, ...]]()
    for experiment, percent in ROWS:
        settings = [it for it in runs.settings(results) if it.experiment == experiment]
        # Of several widths of one experiment, the largest.
        sizes = sorted({it.size or 0 for it in settings}, reverse=True)
        found = (_row(results, [it for it in settings if (it.size or 0) == size], percent) for size in sizes)
        rows += [row for row in found if row][:1]
    rows += pretrained_rows(result_folder / "examples")
    return Table(COLUMNS, tuple(rows), title="kept units and test error")


def _row(results: "Results", settings: "Sequence[Setting]", percent: int) -> tuple[str, ...] | None:
    """The row of the best run with a control; None without one."""
    from keepk_paper.report import lines, runs  # noqa: PLC0415 - the other tables need none of it
    from keepk_paper.report.chosen import subject, validation  # noqa: PLC0415 - the other tables need none of it

    compared: list[tuple[float, Setting, Lines, Lines]] = []
    for setting in settings:
        name = subject(results, setting, percent)
        of = setting.of(results, name) if name else ()
        pair = lines.in_common(of, runs.dense_lines(results, of[0])) if of else ((), ())
        compared += [(validation(of), setting, *pair)] if pair[0] else []
    if not compared:
        return None
    _, setting, of, dense = min(compared, key=lambda it: it[0])
    unit = "channels" if setting.experiment.startswith("vgg16") else "reads"
    (kept,), (total,) = ({line[key] for line in of} for key in ("kept", "total"))
    errors = (f"{fmean(line['test_error'] for line in found):.2f}" for found in (of, dense))
    smaller = (_smaller(of, dense, key) for key in ("parameters", "macs"))
    return (setting.title, f"{kept:,} of {total:,} {unit}", *errors, str(len(of)), *smaller)


def _smaller(of: "Sequence[Line]", dense: "Sequence[Line]", key: str) -> str:
    """The pruned network's cost as a fraction of the dense one's."""
    return f"1/{fmean(line[key] for line in dense) / fmean(line[key] for line in of):.1f}"
