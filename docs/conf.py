"""How Sphinx builds the site: `make docs`.

The pages are the Markdown files that GitHub shows as well, so links are written for GitHub: relative to the file. Here
they are turned into links between pages, or into links to the repository where there is no page.
"""

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import keepk

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
# No tomllib: Python 3.10 has none.
URL = re.findall(r'^Source = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[0]

project = "keepk"
author = "The keepk authors"
copyright = "2026, The keepk authors"  # noqa: A001 - Sphinx's name
release = keepk.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = "keepk"
html_static_path = ["_static"]
html_css_files = ["keepk.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_repository": URL, "source_branch": "main", "source_directory": "docs/"}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_heading_anchors = 4
default_role = "code"  # docstrings write `name` as Markdown does
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

# Pages whose text is a file at the root of the repository.
AT_THE_ROOT = {
    "index": "README.md",
    "project/architecture": "ARCHITECTURE.md",
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def with_links_of_the_site(text: str, file: Path, docname: str) -> str:
    """The text of a file, with links as seen from the page that shows it."""

    def link(found: re.Match[str]) -> str:
        target, anchor = (file.parent / found[1]).resolve(), found[2] or ""
        pages = {(REPOSITORY / source).resolve(): page for page, source in AT_THE_ROOT.items()}
        if target in pages:
            return _from(docname, f"{pages[target]}.md") + anchor
        if target.is_file() and target.is_relative_to(DOCS):
            return _from(docname, target.relative_to(DOCS).as_posix()) + anchor
        if target == DOCS / "decisions":
            return _from(docname, "decisions/index.md") + anchor
        if not target.exists():
            return found[0]  # Sphinx says that it leads nowhere
        return f"{URL}/{'tree' if target.is_dir() else 'blob'}/main/{target.relative_to(REPOSITORY).as_posix()}{anchor}"

    prose = FENCE.split(text)
    return "".join(part if FENCE.fullmatch(part) else LINK.sub(link, part) for part in prose)


def _from(docname: str, path: str) -> str:
    return posixpath.relpath(path, posixpath.dirname(docname) or ".")


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the text of the file at the root in front of a page's own, and rewrite links."""
    own = with_links_of_the_site(source[0], DOCS / f"{docname}.md", docname)
    if docname not in AT_THE_ROOT:
        source[0] = own
        return
    file = REPOSITORY / AT_THE_ROOT[docname]
    app.env.note_dependency(str(file))
    source[0] = with_links_of_the_site(file.read_text(), file, docname) + "\n" + own


def refuse_undocumented(_: Sphinx, environment: BuildEnvironment) -> None:
    """Warn, which fails the build, about public names that the reference lacks."""
    documented = environment.domaindata["py"]["objects"]
    modules: dict[str, Any] = {name: import_module(name) for name in ("keepk", "keepk.metrics")}
    for module, found in modules.items():
        for name in found.__all__:
            if f"{module}.{name}" not in documented:
                logging.getLogger(__name__).warning("reference.md: %s.%s is public and not there", module, name)


def escape_bars(*event: Any) -> None:
    """Keep |w| in a docstring an absolute value: reStructuredText would substitute it."""
    lines = event[-1]
    lines[:] = [re.sub(r"(?<![`\\\w])\|(\w+)\|", r"\\|\1\\|", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("source-read", read_source)
    app.connect("env-check-consistency", refuse_undocumented)
