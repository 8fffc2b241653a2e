"""The tables: small made-up results with numbers computed by hand, and the docs contain no other numbers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepk.errors import DataError
from keepk_paper import results
from keepk_paper.figures.growth import growth_figure
from keepk_paper.tables import zoo as zoo_tables
from keepk_paper.tables.benchmarks import growth
from keepk_paper.tables.pages import error_table, experiment_tables, fill, layer_percent_table, write_pages

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
COLUMNS = ("recipe", "asked", "kept", "test %", "spread", "best", "val %", "n")


def point(recipe, seed, asked, test_error, val_error, layers):
    shared = {"experiment": "lenet-300-100", "total": 266_610, "dense_test_error": 1.5, "seconds": 1.0, "versions": {}}
    made = {"recipe": recipe, "seed": seed, "asked": asked, "kept": asked, "test_error": test_error}
    return {**shared, **made, "val_error": val_error, "layers": layers}


DENSE = {"fc1": [235_500, 235_500], "fc2": [30_100, 30_100], "fc3": [1_010, 1_010]}
FIRST = {"fc1": [11_775, 235_500], "fc2": [4_816, 30_100], "fc3": [738, 1_010]}
SECOND = {"fc1": [14_130, 235_500], "fc2": [2_408, 30_100], "fc3": [791, 1_010]}
FEW = {"fc1": [2_000, 235_500], "fc2": [1_500, 30_100], "fc3": [499, 1_010]}
RECORDS = [
    point("paper", 1, 266_610, 1.60, 1.70, DENSE),
    point("paper", 1, 17_329, 1.70, 1.80, FIRST),
    point("keepk", 1, 3_999, 1.20, 1.30, FEW),
    point("keepk", 1, 17_329, 1.00, 1.11, SECOND),
    point("paper", 2, 17_329, 1.50, 1.60, SECOND),
    point("paper", 3, 17_329, 2.20, 2.00, SECOND),
]
# 1.7, 1.5, 2.2: mean 1.8, squares .01 + .09 + .16 = .26, and the root of .26 / 2 is .3606.
OURS = (
    ("paper, dense", "266,610", "266,610", "1.60", "-", "1.60", "1.70", "1"),
    ("paper", "17,329", "17,329", "1.80", "0.36", "1.50", "1.80", "3"),
    ("keepk", "17,329", "17,329", "1.00", "-", "1.00", "1.11", "1"),
    ("keepk", "3,999", "3,999", "1.20", "-", "1.20", "1.30", "1"),
)
PAPERS = (
    ("printed: baseline", "267K", "", "1.64", "", "", "", ""),
    ("printed: Han et al.", "22K", "", "1.59", "", "", "", ""),
    ("printed: DSC-1, best", "17.4K", "", "1.57", "", "", "", ""),
)


@pytest.fixture
def folder(tmp_path):
    results.append(tmp_path / "results" / "lenet-300-100.jsonl", RECORDS)
    return tmp_path / "results"


def test_errors_are_mean_sample_deviation_and_best():
    """The paper's rows come first, then recipes in the order of the file, with the larger number of weights first."""
    table = error_table("lenet-300-100", RECORDS)
    assert table.columns == COLUMNS
    assert table.rows == (*PAPERS, *OURS)
    assert table.title == "lenet-300-100: test error (Table 1)"


def test_seeds_that_kept_different_numbers_are_not_hidden():
    missed = {**RECORDS[1], "seed": 9, "kept": 17_330}
    row = error_table("lenet-300-100", [RECORDS[1], missed]).rows[-1]
    assert row[2] == "17,329 17,330"


def test_layer_percentages_are_means_at_the_papers_point():
    """fc1 of `paper`: 5, 6 and 6 percent of 235,500; the run with 3,999 weights is not in it."""
    table = layer_percent_table("lenet-300-100", RECORDS)
    assert table.columns == ("layer", "Han et al. %", "paper's DSC-1 %", "paper %", "keepk %")
    assert table.rows == (
        ("fc1", "8", "4.6", "5.7", "6.0"),
        ("fc2", "9", "20.1", "10.7", "8.0"),
        ("fc3", "26", "68.5", "76.6", "78.3"),
        ("total", "8.2", "6.5", "6.5", "6.5"),
    )
    assert table.total_row
    assert table.title == "lenet-300-100: kept at 17,329 (Table 2)"


@pytest.mark.parametrize("experiment", ["lenet-300-100", "lenet-5"])
def test_without_results_the_papers_rows_stand_alone(experiment):
    assert {row[0].partition(":")[0] for row in error_table(experiment, []).rows} == {"printed"}
    assert {len(row) for row in layer_percent_table(experiment, []).rows} == {3}


def test_the_paper_is_quoted_right_for_lenet_5():
    assert [row[:4] for row in error_table("lenet-5", []).rows] == [
        ("printed: baseline", "431K", "", "0.80"),
        ("printed: Han et al.", "36K", "", "0.77"),
        ("printed: DSC-1, best", "15.8K", "", "0.77"),
    ]
    assert layer_percent_table("lenet-5", []).rows == (
        ("conv1", "66", "75"),
        ("conv2", "12", "29.1"),
        ("fc1", "8", "1.8"),
        ("fc2", "19", "17.2"),
        ("total", "8.4", "3.6"),
    )


def test_the_command_shows_both_tables_of_a_file(folder):
    made = [error_table("lenet-300-100", RECORDS), layer_percent_table("lenet-300-100", RECORDS)]
    assert experiment_tables(folder / "lenet-300-100.jsonl") == made


def test_the_short_table_of_the_zoo_counts_by_source(tmp_path):
    def verdicts(pruner, *found):
        lines = [json.dumps({"source": source, "outcome": outcome}) for source, outcome in found]
        (tmp_path / f"{pruner}.jsonl").write_text("\n".join(lines))

    verdicts("keepk", ("vision", "passed"), ("vision", "refused"), ("timm", "passed"))
    verdicts("torch-pruning", ("vision", "wrong"), ("vision", "passed"), ("timm", "failed"))
    table = zoo_tables.summary(tmp_path)
    assert table.columns[2:] == tuple(
        f"{pruner}: {word}" for pruner in ("keepk", "Torch-Pruning 1.6.1") for word in ("correct", "wrong")
    )
    assert table.rows == (
        ("torchvision", "2", "1", "0", "1", "1"),
        ("timm", "1", "1", "0", "0", "0"),
        ("all", "3", "2", "0", "1", "1"),
    )


def marked(name, content=""):
    return f"<!-- table: {name} -->\n{content}<!-- end -->"


def test_a_page_is_filled_between_its_marks_and_nowhere_else(folder):
    def page(layers, errors):
        both = marked("lenet-300-100/layers", layers), marked("lenet-300-100/errors", errors)
        return "# Title\n\n{} after\n\n{}\n\nend\n".format(*both)

    made = [make("lenet-300-100", RECORDS).markdown() + "\n" for make in (layer_percent_table, error_table)]
    assert fill(page("old\n\n| 7 |\n", ""), folder) == page(*made)
    assert fill(page(*made), folder) == page(*made)


def test_a_filled_table_is_markdown(folder):
    lines = fill(marked("lenet-300-100/errors"), folder).splitlines()
    assert lines[1] == f"| {' | '.join(COLUMNS)} |"
    assert lines[2] == "|---|---:|---:|---:|---:|---:|---:|---:|"
    assert lines[7] == "| paper | 17,329 | 17,329 | 1.80 | 0.36 | 1.50 | 1.80 | 3 |"
    assert lines[-1] == "<!-- end -->"
    assert len(lines) == 4 + len(PAPERS) + len(OURS)


@pytest.mark.parametrize("name", ["lenet-5/error", "lenet-6/errors", "errors", "lenet-5"])
def test_an_unknown_table_is_refused_with_the_nearest_name(folder, name):
    with pytest.raises(DataError, match=rf"table '{name}': unknown\. Nearest names: .*'lenet-5/errors'"):
        fill(marked(name), folder)


def test_pages_are_written_only_where_a_table_changed(tmp_path, folder):
    plain, table = tmp_path / "plain.md", tmp_path / "table.md"
    plain.write_text("no table\n")
    table.write_text(marked("lenet-300-100/errors", "old\n"))
    assert write_pages([plain, table], folder) == [table]
    assert "| 0.36 |" in table.read_text()
    assert write_pages([plain, table], folder) == []


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: lenet-5/errors -->\nprose\n",
        "<!-- table: lenet-5/errors -->\nprose\n<!-- table: lenet-5/layers -->\n<!-- end -->\n",
        "<!-- table:lenet-5/errors -->\n<!-- end -->\n",
        "<!-- table: lenet-5/errors -->\r\n<!-- end -->\r\n",
        "<!-- end -->\n",
    ],
)
def test_marks_that_are_not_paired_are_refused(folder, text):
    with pytest.raises(DataError, match="marked tables: not every one"):
        fill(text, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_tables_of_the_docs_are_those_of_the_committed_results(page):
    """`make tables` reproduces every page, so no number was edited by hand."""
    text = page.read_text()
    assert fill(text, REPOSITORY / "results") == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_mark_of_the_docs_is_one_that_is_filled(page):
    """A misspelt marker would leave its table stale, and a missing end marker would delete the text below."""
    marks = re.findall(r"^.*<!--\s*(?:table|end)\b.*$", page.read_text(), re.MULTILINE | re.IGNORECASE)
    assert all(re.match(r"<!-- table: \S+ -->$", mark) for mark in marks[::2])
    assert all(mark.startswith("<!-- end -->") for mark in marks[1::2])
    assert len(marks) % 2 == 0


SLOPES = {"trace_cpu_seconds": 1.0, "event_cpu_seconds": 0.0, "trace_bytes": 0.0, "event_bytes": 0.0}
GROWTH: dict[str, Any] = {
    over: [
        {"layers": size, "width": 64, "units": 10, "trace_cpu_seconds": 2.0 * size, "event_cpu_seconds": 1.0}
        | {over: size, "trace_bytes": 3e6, "event_bytes": 0}
        for size in (1, 2, 4)
    ]
    for over in ("layers", "width")
}
GROWTH |= {"slopes": {"layers": SLOPES, "width": SLOPES}}


def test_growth_is_a_row_per_size_and_a_slope(tmp_path):
    (tmp_path / "growth.json").write_text(json.dumps(GROWTH))
    rows = growth(tmp_path).rows
    assert rows[2] == ("4 layers of width 64", "10", "8.0", "3", "1.0", "0")
    assert rows[3] == ("slope over depth", "", "1.00", "0.00", "0.00", "0.00")
    assert len(rows) == 8


def test_the_figure_of_growth_has_times_and_proportional_lines():
    depth, _ = growth_figure(GROWTH).axes
    trace, proportional, event, _ = (np.asarray(line.get_xydata()).tolist() for line in depth.get_lines())
    assert trace == proportional == [[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]]
    assert event == [[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]]
