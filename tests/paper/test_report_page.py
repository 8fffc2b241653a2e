"""The page: every number is computed again from the result files, nothing is fetched, and it works in Chromium."""

import json
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from functools import lru_cache
from html import escape, unescape
from html.parser import HTMLParser
from math import sqrt
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keepk.cli.commands import app
from keepk_paper.report import write as report_command
from keepk_paper.report.lines import read_folder
from keepk_paper.report.numbers import FORMULAS
from keepk_paper.report.page import CITATIONS, page
from made_results import line, write

pytestmark = pytest.mark.xdist_group("test_report")  # one process makes the pages

RESULTS = Path(__file__).parents[2] / "results"
VOID = {"meta", "link", "br"}
# Columns of words: names of recipes, networks and commands, whose digits are not measurements.
LABELS = {
    *(
        "recipe",
        "description",
        "setting",
        "run",
        "against",
        "over",
        "bound",
        "outcome",
        "decides",
        "chosen run",
        "rival",
    ),
    *("row", "recipes", "experiment", "wanted", "state", "command", "removed, %", "network"),
}


def matched(match):
    assert match is not None
    return match


class Node:
    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent, self.children = tag, dict(attributes), parent, []

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def find(self, tag, **wanted):
        return [it for it in self.walk() if it.tag == tag and wanted.items() <= it.attributes.items()]

    @property
    def text(self):
        return "".join(it if isinstance(it, str) else it.text for it in self.children)

    @property
    def classes(self):
        return (self.attributes.get("class") or "").split()


class Tree(HTMLParser):
    """A page as a tree; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, html):
        super().__init__()
        self.root = self.here = Node("root", {}, None)
        self.feed(html)
        self.close()
        assert self.here is self.root

    def handle_starttag(self, tag, attrs):
        node = Node(tag, attrs, self.here)
        self.here.children.append(node)
        if tag not in VOID:
            self.here = node

    def handle_startendtag(self, tag, attrs):
        self.here.children.append(Node(tag, attrs, self.here))

    def handle_endtag(self, tag):
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        self.here = self.here.parent

    def handle_data(self, data):
        self.here.children.append(data)


@pytest.fixture(scope="module")
def html():
    return page(read_folder(RESULTS))


@pytest.fixture(scope="module")
def tree(html):
    return Tree(html).root


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Names that would break a page that does not escape them, and a run that is not in the code."""
    recipes = ["one-run-dense", "<script>alert(1)</script>-70", 'a"b&c-60', "one-run-taylor-70", "ONE run: taylor 70"]
    made = [
        line("vgg16-cifar10", name, kept=1_056 if "dense" in name else 316, versions={"commit": "<b>x</b>"})
        for name in recipes
    ]
    return write(tmp_path_factory.mktemp("odd"), {"vgg16-cifar10": made})


@pytest.fixture(scope="module")
def odd_html(odd):
    return page(read_folder(odd))


# Numbers


@lru_cache
def file_of(path):
    return [json.loads(it) for it in path.read_text().splitlines()]


def raw(folder, names):
    """The lines that a number names, read without the package."""
    for name in names.split():
        file, number = name.split(":")
        yield file_of(folder / file)[int(number) - 1]


def average(values):
    values = list(values)
    return sum(values) / len(values)


def deviation(values):
    values = list(values)
    mean = average(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def interval(of, against):
    """The ends and the number of units, with pictures as a list of bits."""
    from base64 import b64decode

    if all("test_wrong" in it for it in (*of, *against)):
        bits = [
            [[int(bit) for byte in b64decode(it["test_wrong"]) for bit in f"{byte:08b}"] for it in lines]
            for lines in (of, against)
        ]
        differences = [
            100 * (average(one) - average(other))
            for one, other in zip(zip(*bits[0], strict=True), zip(*bits[1], strict=True), strict=True)
        ]
        quantile = 1.96
    else:
        differences = [one["test_error"] - other["test_error"] for one, other in zip(of, against, strict=True)]
        quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(differences)]
    half = quantile * deviation(differences) / sqrt(len(differences))
    return average(differences) - half, average(differences) + half, len(differences)


def left(record, layer):
    kept, total = (record["kept"], record["total"]) if layer == "total" else record["layers"][layer]
    return 100 * kept / total


def fewest(of):
    by_nodes = {it["asked"]: [other["at_floor"] for other in of if other["asked"] == it["asked"]] for it in of}
    return min(nodes for nodes, reached in by_nodes.items() if all(reached))


def last(record, number):
    return list(record["layers"].values())[-int(number) :]


def with_starts(of, against, key):
    before = [[it[key] for it in against if it["recipe"] == recipe] for recipe in {it["recipe"] for it in against}]
    return sum(map(average, [[it[key] for it in of], *before]))


def uneven(of, _, word):
    shares = [kept / total for name, (kept, total) in of[0]["layers"].items() if word not in name]
    return 100 * deviation(shares) / average(shares)


# The same formulas as in the package, written again.
ORACLE = {
    "mean": lambda of, _, key: average(it[key] for it in of),
    "millions": lambda of, _, key: average(it[key] for it in of) / 1_000_000,
    "spread": lambda of, _, key: deviation(it[key] for it in of),
    "least": lambda of, _, key: sorted(it[key] for it in of)[0],
    "least_mean": lambda of, _, key: min(
        average(it[key] for it in of if it["asked"] == nodes) for nodes in {it["asked"] for it in of}
    ),
    "seeds": lambda of, _, __: len({it["seed"] for it in of}),
    "lines": lambda of, _, __: len(of),
    "exact": lambda of, _, __: len([it for it in of if it["asked"] == it["kept"]]),
    "difference": lambda of, against, key: average(it[key] for it in of) - average(it[key] for it in against),
    "units": lambda of, against, _: interval(of, against)[2],
    "low": lambda of, against, _: interval(of, against)[0],
    "high": lambda of, against, _: interval(of, against)[1],
    "percent": lambda of, against, key: 100 * average(it[key] for it in of) / average(it[key] for it in against),
    "sum_of_runs": with_starts,
    "thousands_of_runs": lambda of, against, key: with_starts(of, against, key) / 1_000,
    "share": lambda of, _, layer: average(left(it, layer) for it in of),
    "left": lambda of, _, layer: average(it["layers"][layer][0] for it in of),
    "last_layers": lambda of, _, number: average(
        100 * sum(pair[0] for pair in last(it, number)) / sum(pair[1] for pair in last(it, number)) for it in of
    ),
    "largest_of_last": lambda of, _, number: max(100 * pair[0] / pair[1] for pair in last(of[0], number)),
    "unevenness": uneven,
    "fewest_at_floor": lambda of, _, __: fewest(of),
    "draws_at_floor": lambda of, _, __: len([it for it in of if it["at_floor"]]),
    "starts_at_floor": lambda of, _, __: len(
        [error for it in of for error in it["test_errors"] if error <= it["noise_floor"] + 0.2]
    ),
}


def unbacked(root, folder):
    """The numbers of a page that the files do not give, and those that name no lines."""
    wrong = []
    for node in root.walk():
        if "data-formula" in node.attributes:
            wrong += _check_number(node, folder)
        elif "data-field" in node.attributes:
            (record,) = raw(folder, node.attributes["data-lines"])
            found = record.get(node.attributes["data-field"], "")
            if node.text.replace(",", "") != str(found):
                wrong.append(f"{node.attributes['data-lines']}: {node.text} is not {found}")
        elif node.tag in ("td", "dd") or "glance" in node.classes:
            wrong += [f"bare: {it}" for it in _bare(node)]
    return wrong


def _check_number(node, folder):
    name, _, argument = node.attributes["data-formula"].partition(":")
    of, against = (list(raw(folder, node.attributes.get(key) or "")) for key in ("data-lines", "data-against"))
    value = ORACLE[name](of, against, argument)
    written = matched(re.match(r"[-+]?[\d,]+(\.\d+)?", node.text))[0]
    digits = len(written.partition(".")[2])
    # Half of the last digit, and a little for sums in another order and 1.96 for the quantile.
    near = abs(float(written.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-4 * max(1, abs(value))
    return [] if of and near else [f"{node.attributes['data-formula']} of {len(of)} lines: {node.text}, not {value}"]


def _bare(node):
    """Digits of a cell that are neither a number with a formula, nor the paper's, nor a label's."""
    if node.tag == "td" and ({"printed", "code", "version"} & {*node.classes} or _column(node) in LABELS):
        return []
    own = "".join(_own_text(node))
    pattern = r"\d" if node.tag == "td" else r"[-+]?\d+\.\d+"
    return re.findall(pattern, own)


def _own_text(node):
    for child in node.children:
        if isinstance(child, str):
            yield child
        elif not {"data-formula", "data-plan"} & {*child.attributes} and "printed" not in child.classes:
            yield from _own_text(child)


def _column(cell):
    row = [it for it in cell.parent.children if isinstance(it, Node)]
    table = cell.parent.parent.parent
    heads = table.find("thead")[0].find("th")
    return heads[row.index(cell)].text


def test_every_number_follows_from_the_lines_that_it_names(tree):
    numbers = [it for it in tree.walk() if "data-formula" in it.attributes]
    assert len(numbers) > 300
    assert unbacked(tree, RESULTS) == []


def test_the_oracle_knows_every_formula():
    assert ORACLE.keys() == FORMULAS.keys()


def test_a_number_that_no_result_backs_is_found(odd, odd_html, tmp_path):
    """Three ways: another number, a number without lines, and other results under the same page."""
    pattern = r'<td data-sort="[^"]*"><a [^>]*data-formula="mean:test_error"[^>]*>(\d+\.\d\d)</a></td>'
    cell = matched(re.search(pattern, odd_html))
    wrong = cell[0].replace(f">{cell[1]}<", f">{float(cell[1]) + 0.01:.2f}<")
    assert len(unbacked(Tree(odd_html.replace(cell[0], wrong, 1)).root, odd)) == 1
    assert unbacked(Tree(odd_html.replace(cell[0], "<td>12</td>", 1)).root, odd) == ["bare: 1", "bare: 2"]
    file = shutil.copytree(odd, tmp_path / "other") / "vgg16-cifar10.jsonl"
    file.write_text(re.sub(r'"test_error": [\d.]+', '"test_error": 1.5', file.read_text()))
    assert len(unbacked(Tree(odd_html).root, file.parent)) > 10


def test_the_plan_is_the_papers_formula(tree):
    """Exactly, in fractions: M_e for e <= N1, then steps of nu."""
    cells = [it for it in tree.walk() if "data-plan" in it.attributes]
    assert len(cells) == 60
    for cell in cells:
        p0, n1, nu, mu, p, e = (Fraction(it.partition("=")[2]) for it in cell.attributes["data-plan"].split())
        first = (1 - p0) + p0 * (n1 - e) / (mu * e + n1)
        share = first if e <= n1 else 1 - min(p, p0 + (e - n1) * nu)
        assert float(cell.text) == pytest.approx(100 * float(share), abs=0.0051)


def test_every_number_leads_to_its_runs_with_recipe_versions_and_command(tree):
    anchors = {it.attributes["id"]: it for it in tree.find("details") if "run" in it.classes}
    for number in tree.walk():
        if "data-formula" in number.attributes:
            target = anchors[number.attributes["href"][1:]]
            first = number.attributes["data-lines"].split()[0]
            assert first in target.text
    run = anchors["run-vgg16-cifar10-one-run-dense"]
    assert "keepk paper run vgg16-cifar10 --recipe one-run-dense --seeds 1" in run.text
    assert "2dadfa2883eba33131177c88f73b27cff6cf777f" in run.text
    assert "VGG16 (width 0.25), batches of 128" in run.text
    for words in ("2.13.0+cpu", "3.11.7", "6486.8", "2447.4"):
        assert words in run.text


def test_ids_are_unique_and_links_within_the_page_lead_somewhere(tree):
    ids = [it.attributes["id"] for it in tree.walk() if "id" in it.attributes]
    assert len(ids) == len({*ids})
    targets = {it.attributes["href"][1:] for it in tree.find("a") if it.attributes["href"].startswith("#")}
    assert targets <= {*ids}


def test_the_papers_rows_are_beside_ours(tree):
    table = tree.find("table", id="lenet-300-100-errors")[0]
    rows = [it.text for it in table.find("tr")]
    assert "the paper: DSC-1, best17.4K1.57" in rows
    assert any(it.startswith("paper, dense266,6101.72") for it in rows)
    for name, printed in (("vgg16-svhn", "2.06"), ("vgg16-half-cifar100", "26.55"), ("densenet40-cifar10", "5.48")):
        assert printed in tree.find("table", id=f"{name}-costs")[0].text


def test_runs_that_are_missing_are_named_with_their_commands(tree):
    text = tree.find("section", id="programme")[0].text
    assert "not yet run" in text
    assert "keepk paper run vgg16-full-cifar10 --recipe one-run-taylor-70 --seeds 1" in text


def test_svhn_and_cifar_100_carry_their_caveat(tree):
    for name, words in (
        ("vgg16-svhn", "SVHN, re-created, with 15,000"),
        ("vgg16-half-cifar100", "with 15,000 training"),
    ):
        region = tree.find("table", id=f"{name}-costs")[0].parent
        beside = region.parent.children
        note = next(it for it in beside[beside.index(region) + 1 :] if isinstance(it, Node))
        assert words in note.text


def test_runs_in_mixed_precision_are_labelled_with_their_command(tree, tmp_path):
    run = next(
        it for it in tree.find("details") if it.attributes.get("id") == "run-vgg16-cifar10-one-run-dense-bfloat16"
    )
    assert run.find("summary")[0].text.endswith("bfloat16 mixed precision")
    assert "Trained in bfloat16 mixed precision; errors are evaluated in float32." in run.text
    assert "keepk paper run vgg16-cifar10 --recipe one-run-dense --seeds 3 --amp" in run.text
    other = next(it for it in tree.find("details") if it.attributes.get("id") == "run-vgg16-cifar10-one-run-dense")
    assert "bfloat16" not in other.text
    assert "--amp" not in other.text
    titles = [it.text for it in tree.find("h3")]
    assert "VGG-16, width 1/4, CIFAR-10, bfloat16 mixed precision (Table 3)" in titles
    odd = line("vgg16-cifar10", "one-run-dense", device="<b>gpu</b>", amp=True)
    made = page(read_folder(write(tmp_path, {"vgg16-cifar10": [odd]})))
    assert "<b>gpu" not in made
    assert "bfloat16 mixed precision on &lt;b&gt;gpu" in made


def test_a_run_without_a_control_of_its_precision_says_so(tmp_path):
    amp = {"device": "cpu", "amp": True}
    made = [line("vgg16-cifar10", "control"), line("vgg16-cifar10", "trained-taylor-70", kept=316, **amp)]
    text = Tree(page(read_folder(write(tmp_path, {"vgg16-cifar10": made})))).root.text
    assert (
        "Not compared, because the dense network control has not been trained in bfloat16 mixed precision: "
        "trained-taylor-70. To run: keepk paper run vgg16-cifar10 --recipe control --seeds 1 --amp." in text
    )


# Safety


def test_nothing_is_fetched(html, tree, odd_html):
    """Only plain links lead out, to the citations; the policy refuses everything else."""
    for text in (html, odd_html):
        allowed = {address for _, address in CITATIONS} | {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert {*re.findall(r'https?://[^\s"<>\']+', text)} <= allowed
        assert not re.search(r"@import|url\((?!#)|<(img|iframe|object|embed|base|audio|video|source|form)\b", text)
        assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    for node in tree.walk():
        outside = [it for it in ("src", "srcset", "poster", "action", "data") if it in node.attributes]
        assert not outside
        if node.tag in ("link", "use", "image"):
            assert (node.attributes.get("href") or node.attributes.get("xlink:href")).startswith(("data:,", "#"))
    policy = tree.find("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    assert policy.startswith("default-src 'none'")


def test_odd_names_are_escaped(odd, odd_html):
    root = Tree(odd_html).root
    assert len(root.find("script")) == 1
    assert not root.find("b", id="x")
    assert "<script>alert(1)" not in odd_html
    assert "<b>x" not in odd_html
    assert "<script>alert(1)</script>-70" in root.text
    assert 'a"b&c-60' in root.text
    assert unbacked(root, odd) == []
    ids = [it.attributes["id"] for it in root.walk() if "id" in it.attributes]
    assert len(ids) == len({*ids})  # two recipes differ in signs alone


def test_a_recipe_that_is_not_in_the_code_says_so(odd_html):
    assert "This recipe is no longer in the code." in odd_html


def test_the_same_results_give_the_same_page(odd, odd_html):
    assert page(read_folder(odd)) == odd_html


# The command


def test_the_command_writes_the_page_and_the_markdown(odd, tmp_path):
    out, docs = tmp_path / "r.html", tmp_path / "results.md"
    docs.write_text("<!-- table: report/verdicts -->\nold\n<!-- end -->\n")
    result = CliRunner().invoke(app, ["paper", "report", "--results", str(odd), "--out", str(out), "--docs", str(docs)])
    assert result.exit_code == 0, result.output
    assert "not yet run" in result.stdout
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "| The pruned network depends on exactly K" in docs.read_text()


def test_new_lines_are_picked_up_without_a_change_of_code(odd_html):
    """The run appears in the table, in the figure's numbers and in the programme."""
    assert odd_html.count("one-run-taylor-70") > 5
    assert 'id="macs-vgg16-cifar10"' in odd_html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--results", "empty"], "no results in empty. Run an experiment first"),
        (["--results", "odd", "--out", "missing/r.html"], "cannot write missing/r.html: No such file or directory."),
        (["--results", "odd", "--docs", "missing.md"], "no file missing.md. Give --docs a Markdown page"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, words, odd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report_command, "page", lambda _: "")  # the page is not what is tested
    (tmp_path / "empty").mkdir()
    shutil.copytree(odd, tmp_path / "odd")
    result = CliRunner().invoke(app, ["paper", "report", *arguments])
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch, tmp_path):
    # Only the modules that cannot be imported without it, so that no class exists twice afterwards.
    for package, name in (("report", "write"), ("report", "page"), ("figures", "report")):
        monkeypatch.delitem(sys.modules, f"keepk_paper.{package}.{name}")
        monkeypatch.delattr(f"keepk_paper.{package}.{name}")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["paper", "report", "--out", str(tmp_path / "r.html")])
    assert result.exit_code == 1
    assert 'matplotlib is not installed. Run: pip install "keepk[demo]"' in " ".join(result.stderr.split())


def test_help_shows_an_example_and_every_option():
    result = CliRunner().invoke(app, ["paper", "report", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0
    words = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    for it in ("Example: keepk paper report", "--results", "--out", "--docs", "report.html"):
        assert it in words


# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom"),
]
PROBE = """
const seen = {};
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow, found = (seen[frame.id] = {});
    for (const it of page.querySelectorAll("details")) it.open = true;
    found.overflow = page.documentElement.scrollWidth - page.documentElement.clientWidth;
    found.charts = [...page.querySelectorAll("figure svg")].map((svg) => {
      const box = svg.getBoundingClientRect();
      const sizes = [...svg.querySelectorAll("text")].map((text) => parseFloat(view.getComputedStyle(text).fontSize));
      const scale = box.width / svg.viewBox.baseVal.width;
      return [box.width, box.height, svg.querySelectorAll("path").length, scale * Math.min(...sizes)];
    });
    const table = page.getElementById("lenet-5-errors"), body = table.tBodies[0];
    const column = [...table.tHead.rows[0].cells].findIndex((it) => it.textContent === "test %");
    const heading = table.tHead.rows[0].cells[column], button = heading.querySelector("button");
    const read = () => [...body.rows].map((row) => row.cells[column].textContent);
    found.before = read();
    button.focus();
    found.focused = page.activeElement === button;
    button.click();
    found.up = [heading.getAttribute("aria-sort"), read()];
    button.click();
    found.down = [heading.getAttribute("aria-sort"), read()];
    const last = table.tHead.rows[0].cells[8];
    last.querySelector("button").click();
    found.empty = [heading.getAttribute("aria-sort"), [...body.rows].map((row) => row.cells[8].textContent)];
    for (const it of page.querySelectorAll("details.run")) it.open = false;
    const number = page.querySelector("#lenet-5-errors a.n");
    view.location.hash = number.getAttribute("href");
    view.dispatchEvent(new view.HashChangeEvent("hashchange"));
    found.revealed = page.querySelector(number.getAttribute("href")).open;
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
"""


@pytest.fixture(scope="module")
def browser(html, tmp_path_factory):
    """The page in Chromium as wide as a phone and as wide as a desktop, and what the browser complained about."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe id="{name}" style="width:{width}px;height:900px" srcdoc="{escape(html)}"></iframe>'
        for name, width in (("phone", 390), ("desktop", 1280))
    )
    harness = folder / "harness.html"
    harness.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="seen"></pre>{frames}<script>{PROBE}</script>', encoding="utf-8"
    )
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", harness.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seen = matched(re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout, re.DOTALL))[1]
    return json.loads(unescape(seen)), [it for it in ran.stderr.splitlines() if "CONSOLE" in it]


def test_the_browser_has_nothing_to_complain_about(browser):
    assert browser[1] == []


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_charts_are_there_legible_and_inside_the_page(browser, width):
    found = browser[0][width]
    assert found["overflow"] == 0
    assert len(found["charts"]) >= 8
    for across, high, paths, letters in found["charts"]:
        assert across > 250
        assert high > 60
        assert paths >= 3
        assert letters >= 9.5  # pixels


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_a_heading_sorts_its_table(browser, width):
    found = browser[0][width]
    assert found["focused"]
    numbers = sorted(found["before"], key=float)
    assert found["before"] != numbers
    assert found["up"] == ["ascending", numbers]
    assert found["down"][0] == "descending"
    assert [*map(float, found["down"][1])] == [*map(float, numbers)][::-1]
    headed, cells = found["empty"]
    assert headed == "none"  # only one column is marked as sorted
    assert [bool(it) for it in cells] == sorted(map(bool, cells), reverse=True)  # empty cells are last
    assert found["revealed"]
