"""How Sphinx makes the site: `make docs` writes it into `build/docs`, without a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from lightning_hybrid import __version__  # noqa: E402

project = "lightning_hybrid"
author = "the authors of lightning_hybrid"
project_copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_parser",
    "sphinx_copybutton",
    "from_program",
    "site_links",
]

# -- text --------------------------------------------------------------------------------------------------------------

myst_heading_anchors = 4
default_role = "code"  # docstrings are written with single backticks
highlight_language = "none"  # blocks without a language are what a terminal shows
copybutton_prompt_text = "$ "

# -- the reference, from docstrings ------------------------------------------------------------------------------------

autodoc_typehints = "none"  # docstrings say it, and signatures stay readable
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nitpicky = True
# Classes of other projects, which are links with DOCS_INTERSPHINX=1, and types that are no pages here.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|torch|lightning|datetime|pathlib|typing)\..*"),
    (r"py:.*", r"Tensor|DeviceMesh|Any|ValueError.*|TypeError.*"),
]

# -- references of other projects, only where they can be had ----------------------------------------------------------

# Nothing is fetched while building. With DOCS_INTERSPHINX=1 names of torch, Lightning and Python become links.
_references = {
    "python": "https://docs.python.org/3",
    "torch": "https://docs.pytorch.org/docs/stable",
    "lightning": "https://lightning.ai/docs/pytorch/stable",
}
intersphinx_mapping = {name: (url, None) for name, url in _references.items()} if os.getenv("DOCS_INTERSPHINX") else {}

# -- pages -------------------------------------------------------------------------------------------------------------

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names of modules, as if they were links
html_title = f"lightning_hybrid {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
