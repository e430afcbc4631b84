"""Links to files of the repository that are not pages, such as modules, become plain text.

The site has no copies of these files. On the repository's own pages the links work.
"""

from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx


def replace_links(_app: Sphinx, tree: nodes.document, _name: str) -> None:
    """Replace links to files by their text."""
    for link in list(tree.findall(download_reference)):
        link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transformation."""
    app.connect("doctree-resolved", replace_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
