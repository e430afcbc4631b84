"""Configuration of the documentation, which Sphinx builds from the READMEs and the pages in docs/.

The source folder is the root of the repository, so that links between READMEs work on the site too.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Modules of this folder, and the packages that `api_reference` documents.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

project = "Vitrine"
copyright = "the authors of Vitrine"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "api_reference",
    "source_links",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "**/README.md", "[A-Z]*.md"]
exclude_patterns = [".*", "build", "artifacts", "**/*.egg-info", "**/node_modules"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Sections may skip a level, and Pygments takes some shell commands of several lines for invalid.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
highlight_language = "text"

html_theme = "furo"
html_title = f"Vitrine {version}"
html_extra_path = ["start"]  # index.html, which leads to the first page
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_copy_source = False
html_use_index = html_domain_indices = False
html_show_sphinx = False
