"""`keepk paper report`: reads the results, writes the page, and updates the tables of the Markdown page."""

from collections import Counter
from pathlib import Path

from keepk.errors import DataError
from keepk_paper.report.claims import claims
from keepk_paper.report.lines import read_folder
from keepk_paper.report.page import page
from keepk_paper.report.verdicts import Verdict
from keepk_paper.tables.pages import write_pages

CHECKOUT = Path(__file__).resolve().parents[3]


def report(results: Path | None, out: Path, docs: Path | None) -> dict[str, int]:
    """Write the page and update the Markdown.

    Args:
        results: The folder with the result files; None is that of the checkout, or ``results`` if keepk is installed.
        out: The page.
        docs: The Markdown page; None is ``docs/results.md`` of the checkout if its own results are read.

    Returns:
        How many claims have each verdict.

    Raises:
        DataError: If there are no results, a line lacks something, or a file cannot be written.
    """
    own = CHECKOUT / "results"
    folder = results or (own if own.is_dir() else Path("results"))
    found = read_folder(folder)
    written = page(found)
    beside = CHECKOUT / "docs" / "results.md"
    if docs is None and folder.resolve() == own and beside.is_file():
        docs = beside
    if docs is not None and not docs.is_file():
        raise DataError(f"report: no file {docs}. Give --docs a Markdown page with marked tables, or leave it out.")
    try:
        out.write_text(written, encoding="utf-8")
    except OSError as error:
        raise DataError(f"report: cannot write {out}: {error.strerror}. Choose another --out.") from error
    if docs is not None:
        write_pages([docs], folder)
    tally = Counter(claim.verdict for claim in claims(found))
    return {verdict.value: tally[verdict] for verdict in Verdict}
