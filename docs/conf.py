"""How Sphinx makes the site: `make docs` writes it into `build/docs`, without a network."""

from __future__ import annotations

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
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "site_links",
    "site_math",
]

# -- text --------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"  # blocks without a language are what a terminal shows
copybutton_prompt_text = "$ "

# -- pages -------------------------------------------------------------------------------------------------------------

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names of modules, as if they were links
html_math_renderer = "mathml"
html_title = f"lightning_hybrid {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
