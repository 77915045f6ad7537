"""Sphinx's settings for ``make docs``; every warning is an error there.

Rules:
* The pages are plain Markdown that reads as well on a forge. Only ``docs/reference/api.md`` has directives in it.
* Nothing is fetched: no font, no script of another place, no inventory of another project. A built page that would
  fetch something when it is read is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.errors import ExtensionError

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HOME)]

import navigation  # noqa: E402 - the two modules beside this file
import pictures  # noqa: E402

project = "ckptmirror"
copyright = "the ckptmirror authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "deploy/README.md"]
exclude_patterns = [".*", "build", "dist", "ckptmirror", "tests", "docs/site", "**/__pycache__"]
root_doc = navigation.NAVIGATION.removesuffix(".md")

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "ckptmirror"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}


class Picture(Directive):
    """A Mermaid block, drawn while the site is built."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing; a line that cannot be drawn is an error of the build."""
        try:
            return [nodes.raw("", pictures.draw("\n".join(self.content)), format="html")]
        except ValueError as error:
            raise self.error(str(error)) from error


def _add_navigation(_app: Any, docname: str, source: list[str]) -> None:
    page = f"{docname}.md"
    if page == navigation.NAVIGATION or (docname.startswith("docs/") and docname.endswith("/README")):
        source[0] += navigation.toctrees(page, source[0])


def _fetches_nothing(app: Any, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        found = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"'](?:https?:)?//[^>]*>", page.read_text()
        )
        if found:
            raise ExtensionError(f"{page.name} would fetch {found[0]}")


def setup(app: Any) -> None:
    """Register the drawing and the navigation."""
    app.add_directive("mermaid", Picture)
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _fetches_nothing)
