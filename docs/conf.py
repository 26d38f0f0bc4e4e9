"""The HTML site of these pages and of the docstrings. ``make docs`` builds it, and warnings are errors."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import flash_ext

project = "flash_ext"
copyright = "the flash_ext authors"
version = release = flash_ext.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"flash_ext {version}"
html_copy_source = False
myst_heading_anchors = 4  # links to headings work as on GitHub
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute is described once, in the docstring of its class

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Names the path where a link leaves docs/ for a page or a folder, and gives the index its contents."""

    def path_or_link(link: re.Match[str]) -> str:
        target = (DOCS / page).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(DOCS) or (target.is_file() and target.suffix != ".md"):
            return link[0]
        name = target.relative_to(DOCS.parent).as_posix()
        return link[1] if name in link[1] else f"{link[1]} (`{name}`)"

    source[0] = LINK.sub(path_or_link, source[0])
    if page == "index":  # its links are the contents; a page that it leaves out is a warning
        pages = dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.(?:md|rst)\)", source[0]))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
