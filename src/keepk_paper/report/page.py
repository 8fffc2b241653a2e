"""The report as one HTML page that needs no network, no server and no other file."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from keepk_paper.figures.report import Drawing, drawings, svg
from keepk_paper.report import grids, runs
from keepk_paper.report.claims import claims
from keepk_paper.report.lines import Line, Results, seeds
from keepk_paper.report.numbers import Cell, Commands, Grid, Number, Planned, Printed, Span, interval, number, text
from keepk_paper.report.verdicts import Claim, Comparison, Verdict
from keepk_paper.results import USUAL, Training

TITLE = "Pruning by annealing: the paper's claims, tested"
PAPER = "Network Pruning via Annealing and Direct Sparsity Control (Guo, She, Barbu)"
CITATIONS = (
    (PAPER, "https://arxiv.org/abs/2002.04301"),
    ("Network Slimming (Liu et al. 2017)", "https://arxiv.org/abs/1708.06519"),
    ("Pruning filters (Li et al. 2017)", "https://arxiv.org/abs/1608.08710"),
    ("Learning weights and connections (Han et al. 2015)", "https://arxiv.org/abs/1506.02626"),
)
# Nothing may be fetched, whatever a result file contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SECTIONS = {
    "verdicts": "Verdicts",
    "tables": "Tables",
    "figures": "Figures",
    "programme": "Runs, done and to come",
    "runs": "Behind the numbers",
    "method": "How to read this",
}
RUN_COLUMNS = (
    *("line", "seed", "asked", "kept", "test %", "val %", "epochs", "seconds", "CPU s", "threads"),
    *("precision", "keepk", "torch", "python", "commit"),
)
MANY = 3  # more commands than these are folded
Runs = tuple[str, str, Training]  # an experiment, a recipe, and the device and precision


def page(results: Results) -> str:
    """The whole page."""
    anchors = run_anchors(results)
    render = Renderer(anchors)
    found, drawn = claims(results), drawings(results)
    sections = {
        "verdicts": render.verdicts(found),
        "tables": render.tables(results),
        "figures": render.figures(drawn),
        "programme": render.programme(results),
        "runs": render.runs(results),
        "method": _method(),
    }
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in SECTIONS.items())
    body = "".join(f'<section id="{key}"><h2>{SECTIONS[key]}</h2>{html}</section>' for key, html in sections.items())
    number_of_lines = sum(len(lines) for lines in results.by_experiment.values())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<style>{_asset('page.css')}</style></head><body>"
        f"<header><h1>{TITLE}</h1><p>Each claim of <cite>{escape(PAPER)}</cite> with a verdict from our own runs, made "
        f"with the library keepk on two CPU cores. The page is generated from {number_of_lines} lines of results; "
        f"every underlined number leads to the runs behind it, their versions and the command that repeats them.</p>"
        f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main>'
        f"<footer>{_citations()}</footer><script>{_asset('page.js')}</script></body></html>\n"
    )


def run_anchors(results: Results) -> dict[Runs, str]:
    """An id for the runs of each recipe and precision; names that differ only in odd characters get a number."""
    anchors = dict[Runs, str]()
    for experiment in results.by_experiment:
        for recipe in results.recipes(experiment):
            for training in results.trainings(experiment, recipe):
                words = f"{experiment}-{recipe}{'' if training == USUAL else f'-{training.short}'}"
                plain = "run-" + re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
                taken = sum(re.sub(r"--\d+$", "", other) == plain for other in anchors.values())
                anchors[experiment, recipe, training] = f"{plain}--{taken}" if taken else plain
    return anchors


class Renderer:
    """Turns tables, claims and figures into HTML, with links to the runs."""

    def __init__(self, anchors: Mapping[Runs, str]) -> None:
        self.anchors = anchors

    def verdicts(self, found: Sequence[Claim]) -> str:
        """The tally, and each claim with its numbers."""
        tally = Counter(claim.verdict for claim in found)
        counts = "".join(
            f'<li class="{_slug(verdict)}"><b>{tally[verdict]}</b>{verdict.value}</li>' for verdict in Verdict
        )
        return f'<ul class="tally">{counts}</ul>{"".join(map(self.claim, found))}'

    def claim(self, claim: Claim) -> str:
        """A claim: the verdict and the main numbers, and behind a click everything else."""
        slug = _slug(claim.verdict)
        summary = (
            f'<summary><span class="badge {slug}">{claim.verdict.value}</span>'
            f'<span class="statement">{escape(claim.statement)}</span><span class="glance">'
            f'Paper, {escape(claim.where)}: <span class="printed">{escape(claim.printed)}</span>. '
            f"{self._glance(claim)}</span></summary>"
        )
        parts = [f"<p>Criterion: {escape(claim.rule)}</p>" if claim.rule else ""]
        parts += [f"<p>{escape(claim.reason)}</p>" if claim.reason else ""]
        parts += [f'<p class="caveat">{escape(claim.caveat)}</p>' if claim.caveat else ""]
        facts = [(name, cell, unit) for name, cell, unit in claim.facts if text(cell)]
        if facts:
            terms = "".join(f"<dt>{escape(name)}</dt><dd>{self.cell(cell)} {unit}</dd>" for name, cell, unit in facts)
            parts.append(f"<dl>{terms}</dl>")
        grid = grids.claim_grid(claim)
        parts.append(self.grid(grid) if grid else "")
        if claim.commands:
            parts.append(f"<p>To run:</p>{_commands(claim.commands)}")
        return f'<details class="claim" id="claim-{claim.key}">{summary}<div>{"".join(parts)}</div></details>'

    def _glance(self, claim: Claim) -> str:
        if shown := grids.main_comparisons(claim):
            return "Here: " + "; ".join(map(self._difference, shown)) + "."
        facts = claim.facts[:3]
        known = [f"{escape(name)}: {self.cell(cell)} {unit}".rstrip() for name, cell, unit in facts if text(cell)]
        return f"Here: {'; '.join(known)}." if known else ""

    def _difference(self, it: Comparison) -> str:
        difference, span = interval(it.of, it.against)
        ends = f" (95&nbsp;%: {self.cell(span)})" if text(span) else " (no interval)"
        words = f"{escape(it.setting)}, {escape(it.recipe)}"
        seeds_run = self.cell(number("seeds", it.of, form="{:.0f}"))
        return f"{words} against {escape(it.other)}: {self.cell(difference)} points{ends}, n&nbsp;=&nbsp;{seeds_run}"

    def tables(self, results: Results) -> str:
        """All tables of the paper with ours beside them."""
        note = (
            "Rows in italics are the paper's own numbers, its best of several trials. Ours are means over n seeds of "
            "the test error at the last epoch; spread is the sample standard deviation. CPU seconds include those of "
            "the network that a run started from."
        )
        parity = grids.parity_grid(results)
        every = [*grids.mnist_grids(results), *([parity] if parity else [])]
        every += [*grids.channel_grids(results), *grids.rival_grids(results)]
        return f'<p class="soft">{note}</p>' + "".join(self.grid(grid, level=3) for grid in every)

    def figures(self, drawn: Iterable[Drawing]) -> str:
        """All figures, each with its numbers."""
        return f'<div class="figures">{"".join(map(self.figure, drawn))}</div>'

    def figure(self, drawing: Drawing) -> str:
        """A figure; without results, what produces them."""
        parts = [f"<h3>{escape(drawing.title)}</h3>"]
        if drawing.figure is not None:
            parts.append(svg(drawing.figure, drawing.name, drawing.title))
        if drawing.caption:
            parts.append(f"<figcaption>{escape(drawing.caption)}</figcaption>")
        if drawing.figure is None:
            words = "Not yet run. These commands produce the results:" if drawing.commands else "Not yet run."
            missing = "" if drawing.commands else " This version has no recipe for it."
            parts.append(f"<p>{words}{missing}</p>")
        elif drawing.commands:
            parts.append("<p>To run the missing points:</p>")
        parts.append(_commands(drawing.commands))
        if drawing.grid is not None:
            parts.append(f"<details><summary>The numbers</summary>{self.grid(drawing.grid)}</details>")
        return f'<figure id="{drawing.name}">{"".join(parts)}</figure>'

    def programme(self, results: Results) -> str:
        """The runs that are planned, in a table for each row of the programme."""
        return "".join(self.grid(grid, level=3) for grid in grids.programme_grids(results))

    def runs(self, results: Results) -> str:
        """Behind the numbers: the recipe, command, versions and lines of every run."""
        parts = list[str]()
        for (experiment, recipe, training), anchor in self.anchors.items():
            lines = results.of(experiment, recipe, training=training)
            repeat = runs.command(experiment, recipe, max(seeds(lines)), training)
            precision = "" if training == USUAL else f"Trained in {training}; errors are evaluated in float32."
            notes = [precision, _commits(lines), runs.caveat(experiment)]
            body = "".join(
                [
                    f"<p>{escape(runs.describe(experiment, recipe))}</p>",
                    *(f"<p>{escape(note)}</p>" for note in notes if note),
                    _commands((repeat,)),
                    _line_table(lines),
                ]
            )
            words = f"{escape(experiment)}: {escape(recipe)}, {_count(len(seeds(lines)), 'seed')}"
            words += "" if training == USUAL else f", {escape(str(training))}"
            parts.append(f'<details class="run" id="{anchor}"><summary>{words}</summary>{body}</details>')
        return "".join(parts)

    def grid(self, grid: Grid, level: int = 0) -> str:
        """A table whose headings sort it."""
        # Columns of words are aligned to the left, like their cells.
        columns = [*zip(*grid.rows, strict=True)] or [()] * len(grid.columns)
        sides = [
            ' class="words"' if any(isinstance(cell, str | Commands) and cell for cell in cells) else ""
            for cells in columns
        ]
        heads = "".join(
            f'<th scope="col" aria-sort="none"{side}><button type="button">{escape(column)}</button></th>'
            for column, side in zip(grid.columns, sides, strict=True)
        )
        body = "".join(map(self._row, grid.rows))
        title = f"<h3>{escape(grid.title)}</h3>" if level and grid.title else ""
        caption = f"<caption>{escape(grid.title)}</caption>" if grid.title and not level else ""
        note = f'<p class="note">{escape(grid.note)}</p>' if grid.note else ""
        label = escape(grid.title or "comparisons")
        return (
            f'{title}<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table id="{grid.name}">'
            f"{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{note}"
        )

    def _row(self, row: Sequence[Cell]) -> str:
        name, *cells = row
        printed = ' class="printed"' if any(isinstance(cell, Printed) for cell in cells) and _is_paper(name) else ""
        return f'<tr{printed}><th scope="row">{self.cell(name)}</th>{"".join(map(self._td, cells))}</tr>'

    def _td(self, cell: Cell) -> str:
        if isinstance(cell, Span):
            return f'<td data-sort="{cell.high.value!r}">{self.cell(cell)}</td>'
        if isinstance(cell, Number | Planned):
            return f'<td data-sort="{cell.value!r}">{self.cell(cell)}</td>'
        if isinstance(cell, Printed):
            sort = "" if cell.value is None else f' data-sort="{cell.value!r}"'
            return f'<td class="printed"{sort}>{escape(cell.text)}</td>'
        if isinstance(cell, Commands):
            return f'<td class="code">{_commands(cell.lines)}</td>'
        if not cell:
            return "<td></td>"
        return f'<td class="words{" long" if len(cell) > 20 else ""}">{escape(cell)}</td>'

    def cell(self, cell: Cell) -> str:
        """The contents of a cell: numbers say what they were computed from and lead there."""
        if isinstance(cell, Span):
            return f"{self.cell(cell.low)} to {self.cell(cell.high)}"
        if isinstance(cell, Planned):
            return f'<span data-plan="{escape(cell.plan)}">{escape(cell.text)}</span>'
        if not isinstance(cell, Number):
            return escape(text(cell))
        anchor = self.anchors[cell.of[0].experiment, cell.of[0]["recipe"], cell.of[0].training]
        lines, against = (" ".join(line.name for line in found) for found in (cell.of, cell.against))
        attributes = {"href": f"#{anchor}", "data-formula": cell.formula, "data-lines": lines, "data-against": against}
        said = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value)
        return f'<a class="n"{said}>{escape(cell.text)}</a>'


def _is_paper(name: Cell) -> bool:
    return isinstance(name, str) and name.startswith("the paper")


def _line_table(lines: Sequence[Line]) -> str:
    heads = "".join(f'<th scope="col">{column}</th>' for column in RUN_COLUMNS)
    body = "".join(f"<tr>{''.join(_line_cells(line))}</tr>" for line in lines)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="result lines">{table}</div>'


def _line_cells(line: Line) -> Iterator[str]:
    """The fields of a line as they are in the file."""
    yield f'<th scope="row"><code>{escape(line.name)}</code></th>'
    keys = ("seed", "asked", "kept", "test_error", "val_error", "epochs", "seconds", "cpu_seconds", "threads")
    versions = line["versions"] if isinstance(line["versions"], dict) else {}
    for key in keys:
        found = line.record.get(key, "")
        yield f'<td data-field="{key}" data-lines="{escape(line.name)}">{escape(_plain(key, found))}</td>'
    yield f'<td class="version" title="{escape(str(line.training))}">{escape(line.training.short)}</td>'
    for key in ("keepk", "torch", "python", "commit"):
        found = str(versions.get(key, "not recorded"))
        short = found[:10] if key == "commit" and re.match("[0-9a-f]{40}", found) else found
        changed = "+changes" if key == "commit" and found.endswith("+changes") else ""
        yield f'<td class="version" title="{escape(found)}">{escape(short + changed)}</td>'


def _plain(key: str, value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and key in ("asked", "kept") else str(value)


def _commits(lines: Sequence[Line]) -> str:
    """How to get the code that made the lines."""
    found = [line["versions"].get("commit") for line in lines if isinstance(line["versions"], dict)]
    known = list(dict.fromkeys(commit for commit in found if commit))
    if not known:
        return "These lines are older than the record of commits; the versions are in the table."
    words = ", ".join(known)
    return f"Made by commit {words}; check it out to repeat the run with the same code."


def _commands(lines: Sequence[str]) -> str:
    """The commands; a long list is folded."""
    codes = "".join(f'<code class="command">{escape(line)}</code>' for line in lines)
    return f"<details><summary>{len(lines)} commands</summary>{codes}</details>" if len(lines) > MANY else codes


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _slug(verdict: Verdict) -> str:
    return verdict.value.replace(" ", "-")


def _citations() -> str:
    items = "; ".join(f'<a href="{address}" rel="noreferrer">{escape(name)}</a>' for name, address in CITATIONS)
    return f"<p>{items}.</p><p>Made by <code>keepk paper report</code>.</p>"


def _method() -> str:
    """The rules by which the page was made."""
    paragraphs = (
        "Test errors are those of the last epoch. Networks are trained on 45,000 pictures of CIFAR-10, recipes are "
        "chosen on 5,000 others, and the test set is used once.",
        "A difference is the mean, over the seeds that both runs have, of one test error minus the other, in points of "
        "a percent. Its 95 % interval is paired over the test pictures where both runs recorded which pictures they "
        "got wrong: it says how the difference would vary with other pictures, not with other seeds. For older results "
        "it is paired over the seeds, by Student's t; a single older run has none.",
        "A comparison is confirmed if the upper end of the interval is at most the target plus 0.3 points (0.1 on "
        "MNIST, whose errors are a tenth as large; 0 where one method is said to be better). The bound is in the "
        "column “bound”.",
        "Runs are trained in float32 on a CPU unless they are labelled bfloat16: these were trained in bfloat16 mixed "
        "precision, which is faster where the CPU supports it, and evaluated in float32. A run is compared "
        "only with runs of the same precision and device, and no mean is taken over both. If a recipe was run "
        "in both, both are shown.",
        "Among several recipes of ours, the one with the lowest validation error decides. VGG-16 at a quarter of the "
        "width has little to spare: its results are reported, but do not decide about claims for the full network.",
        "CIFAR-100 and SVHN rest on 15,000 training pictures, and SVHN was re-created from the pictures of full house "
        "numbers; errors are therefore not comparable with the printed ones, only with our own dense networks.",
        "Parameters are counted as in the paper: without BatchNorms and biases of convolutions for VGG-16.",
    )
    return "".join(f"<p>{escape(words)}</p>" for words in paragraphs)


def _asset(name: str) -> str:
    return files("keepk_paper.report").joinpath(name).read_text(encoding="utf-8")
