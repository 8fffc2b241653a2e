"""The paper's tables with our results beside them, generated from result files.

``python -m keepk_paper.tables.pages README.md docs/*.md docs/decisions/*.md`` updates the tables of these
pages: the text between ``<!-- table: NAME -->`` and ``<!-- end -->`` is replaced.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from keepk.errors import DataError
from keepk.plan.names import nearest
from keepk.reports.tables import Table
from keepk_paper import densenet, results, vgg
from keepk_paper.tables import benchmarks as benchmark_tables
from keepk_paper.tables import budgets as budget_tables
from keepk_paper.tables import channels as channel_tables
from keepk_paper.tables import parity as parity_tables
from keepk_paper.tables import sparse as sparse_tables
from keepk_paper.tables import summary as summary_table
from keepk_paper.tables import zoo as zoo_tables
from keepk_paper.tables.papers import PAPER_ERRORS, PAPER_LAYERS, TABLE_2_KEPT

if TYPE_CHECKING:
    from keepk_paper.report.numbers import Grid

Records = Sequence[dict[str, Any]]


def error_table(experiment: str, records: Records) -> Table:
    """Table 1: the test error of each recipe at each number of weights, below the paper's rows."""
    printed = [(f"printed: {who}", kept, "", error, "", "", "", "") for who, error, kept in PAPER_ERRORS[experiment]]
    ours = [_error_row(recipe, asked, _of(records, recipe, asked)) for recipe, asked in _points(records)]
    columns = ("recipe", "asked", "kept", "test %", "spread", "best", "val %", "n")
    return Table(columns, (*printed, *ours), title=f"{experiment}: test error (Table 1)")


def layer_percent_table(experiment: str, records: Records) -> Table:
    """Table 2: the percentage of weights kept in each layer, averaged over the seeds, beside the paper's."""
    asked = TABLE_2_KEPT[experiment]
    recipes = [recipe for recipe, point in _points(records) if point == asked]
    rows = []
    for layer, (han, theirs) in PAPER_LAYERS[experiment].items():
        ours = [f"{mean(_layer_percent(r, layer) for r in _of(records, recipe, asked)):.1f}" for recipe in recipes]
        rows.append((layer, f"{han}", f"{theirs}", *ours))
    columns = ("layer", "Han et al. %", "paper's DSC-1 %", *(f"{recipe} %" for recipe in recipes))
    return Table(columns, tuple(rows), title=f"{experiment}: kept at {asked:,} (Table 2)", total_row=True)


def experiment_tables(path: Path) -> list[Table]:
    """The tables for the result file `path`."""
    if path.stem == "parity":
        return parity_tables.experiment_tables(path)
    records = results.read(path)
    if path.stem not in PAPER_ERRORS:
        return [make(path.stem, records) for make in (channel_tables.cost_table, channel_tables.layer_table)]
    return [make(path.stem, records) for make in (error_table, layer_percent_table)]


def verdict_table(result_folder: Path) -> Table:
    """The report's verdict for each claim of the paper."""
    from keepk_paper.report import claims, grids, lines  # noqa: PLC0415 - the other tables need none of it

    found = claims.claims(lines.read_folder(result_folder))
    return _markdown_table(grids.verdict_grid(found))


def programme_table(result_folder: Path) -> Table:
    """The runs that the report still waits for."""
    from keepk_paper.report import grids, lines  # noqa: PLC0415 - the other tables need none of it

    return _markdown_table(grids.programme_grid(lines.read_folder(result_folder)))


def _markdown_table(grid: "Grid") -> Table:
    from keepk_paper.report.numbers import text  # noqa: PLC0415 - the other tables need none of it

    rows = tuple(tuple(text(cell).replace("|", r"\|").replace("*", r"\*") for cell in row) for row in grid.rows)
    return Table(tuple(grid.columns), rows, title=grid.title)


def write_pages(pages: Iterable[Path], result_folder: Path) -> list[Path]:
    """Update the marked tables of Markdown pages, and return the pages that changed."""
    changed = []
    for page in pages:
        text = page.read_text()
        written = fill(text, result_folder)
        if written != text:
            page.write_text(written)
            changed.append(page)
    return changed


def fill(text: str, result_folder: Path) -> str:
    """Return a page with its marked tables regenerated from the results.

    Raises:
        DataError: If a mark is not paired or names an unknown table.
    """
    # Counted loosely and matched strictly: a misspelt mark would otherwise leave a stale table without a word.
    opened = len(re.findall(r"<!--\s*table", text))
    pairs = re.findall(r"<!-- table: \S+ -->\n(?:(?!<!--).)*<!-- end -->", text, flags=re.DOTALL)
    if opened != len(pairs) or opened != len(re.findall(r"<!--\s*end", text)):
        raise DataError("a page's marked tables: not every one is '<!-- table: NAME -->', a table, '<!-- end -->'.")

    def table(match: re.Match[str]) -> str:
        return f"{match['open']}\n{_named(match['name'], result_folder).markdown()}\n{match['close']}"

    return re.sub(r"(?P<open><!-- table: (?P<name>\S+) -->)\n.*?(?P<close><!-- end -->)", table, text, flags=re.DOTALL)


def _named(name: str, result_folder: Path) -> Table:
    makers: dict[str, Callable[[], Table]] = {
        "benchmarks/select_event": lambda: benchmark_tables.select_event(result_folder / "benchmarks"),
        "benchmarks/hold_masks": lambda: benchmark_tables.hold_masks(result_folder / "benchmarks"),
        "benchmarks/collect_statistics": lambda: benchmark_tables.collect_statistics(result_folder / "benchmarks"),
        "benchmarks/annealed_run": lambda: benchmark_tables.annealed_run(result_folder / "benchmarks"),
        "benchmarks/inference": lambda: benchmark_tables.inference(result_folder / "benchmarks"),
        "benchmarks/paper_sizes": lambda: benchmark_tables.paper_sizes(result_folder / "benchmarks"),
        "benchmarks/compact_files": lambda: benchmark_tables.compact_files(result_folder / "benchmarks"),
        "benchmarks/shrink_files": lambda: benchmark_tables.shrink_files(result_folder / "benchmarks"),
        "benchmarks/growth": lambda: benchmark_tables.growth(result_folder / "benchmarks"),
        "benchmarks/compact": lambda: benchmark_tables.compact(result_folder / "benchmarks"),
        "benchmarks/shrink_event": lambda: benchmark_tables.shrink_event(result_folder / "benchmarks"),
        "benchmarks/shrink_event_half": lambda: benchmark_tables.shrink_event_half(result_folder / "benchmarks"),
        "benchmarks/budget_event": lambda: benchmark_tables.budget_event(result_folder / "benchmarks"),
        "benchmarks/shrink_trace": lambda: benchmark_tables.shrink_trace(result_folder / "benchmarks"),
        "benchmarks/default_metric": lambda: budget_tables.default_metric(result_folder / "benchmarks"),
        "benchmarks/round_to_auto": lambda: budget_tables.round_to_auto(result_folder / "benchmarks"),
        "benchmarks/fit": lambda: budget_tables.fit(result_folder / "benchmarks"),
        "benchmarks/sparse_layers": lambda: sparse_tables.layers(result_folder / "benchmarks"),
        "benchmarks/sparse_layers_beside": lambda: sparse_tables.sparse_layers(result_folder / "benchmarks"),
        "benchmarks/sparse_networks": lambda: sparse_tables.networks(result_folder),
        "examples/crepe": lambda: budget_tables.crepe(result_folder / "examples"),
        "examples/minilm": lambda: budget_tables.minilm(result_folder / "examples"),
        "summary/results": lambda: summary_table.summary_table(result_folder),
        "zoo/summary": lambda: zoo_tables.summary(result_folder / "zoo"),
        "zoo/score": lambda: zoo_tables.score(result_folder / "zoo"),
        "parity/errors": lambda: parity_tables.error_table(results.read(result_folder / "parity.jsonl")),
        "zoo/files": lambda: zoo_tables.files(result_folder / "zoo"),
        "benchmarks/first_trace": lambda: benchmark_tables.first_trace(result_folder / "benchmarks"),
    }
    for name_of, make in (("report/verdicts", verdict_table), ("report/programme", programme_table)):
        makers[name_of] = partial(make, result_folder)
    for experiment in dict.fromkeys((*channel_tables.PRINTED, *vgg.EXPERIMENTS, *densenet.EXPERIMENTS)):
        found = results.read(result_folder / f"{experiment}.jsonl")
        makers[f"{experiment}/costs"] = partial(channel_tables.cost_table, experiment, found)
        makers[f"{experiment}/layers"] = partial(channel_tables.layer_table, experiment, found)
    for experiment in PAPER_ERRORS:
        records = results.read(result_folder / f"{experiment}.jsonl")
        makers[f"{experiment}/errors"] = partial(error_table, experiment, records)
        makers[f"{experiment}/layers"] = partial(layer_percent_table, experiment, records)
    if name not in makers:
        raise DataError(f"table {name!r}: unknown. Nearest names: {nearest(name, list(makers))}.")
    return makers[name]()


def _points(records: Records) -> list[tuple[str, int]]:
    """The pairs of a recipe's label and a count, in the order of the file, larger counts first within a recipe."""
    recipes = list(dict.fromkeys(map(results.label, records)))
    found = {(results.label(record), record["asked"]) for record in records}
    return sorted(found, key=lambda point: (recipes.index(point[0]), -point[1]))


def _of(records: Records, recipe: str, asked: int) -> Records:
    return [record for record in records if (results.label(record), record["asked"]) == (recipe, asked)]


def _error_row(recipe: str, asked: int, records: Records) -> tuple[str, ...]:
    errors = [record["test_error"] for record in records]
    kept = sorted({record["kept"] for record in records})
    dense = all(record["asked"] == record["total"] for record in records)
    return (
        f"{recipe}, dense" if dense else recipe,
        f"{asked:,}",
        " ".join(f"{number:,}" for number in kept),
        f"{mean(errors):.2f}",
        f"{stdev(errors):.2f}" if len(errors) > 1 else "-",
        f"{min(errors):.2f}",
        f"{mean(record['val_error'] for record in records):.2f}",
        str(len(records)),
    )


def _layer_percent(record: dict[str, Any], layer: str) -> float:
    kept, total = (record["kept"], record["total"]) if layer == "total" else record["layers"][layer]
    return 100 * float(kept) / float(total)


if __name__ == "__main__":
    for page in write_pages(map(Path, sys.argv[1:]), Path("results")):
        print(f"updated: {page}")
