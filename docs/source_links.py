"""Links and pictures of the READMEs, which the site does not have at the same place.

Links to files that are not pages, such as modules, become plain text. Pictures in HTML, which
Sphinx does not see, are copied.
"""

import shutil
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx


def replace_links(_app: Sphinx, tree: nodes.document, _name: str) -> None:
    """Replace links to files by their text."""
    for link in list(tree.findall(download_reference)):
        link.replace_self(link.children)


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy docs/images to the same place of the site."""
    if error is None:
        shutil.copytree(app.srcdir / "docs/images", app.outdir / "docs/images", dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both."""
    app.connect("doctree-resolved", replace_links)
    app.connect("build-finished", copy_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
