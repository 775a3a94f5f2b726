"""Configuration of the documentation site. `make docs` builds it; nothing is fetched while it is built."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

import npeff  # noqa: E402

reference.write_commands(HERE / "generated" / "commands.md")

project = "npeff"
author = "the npeff contributors"
copyright = author
version = release = npeff.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "generated"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # docstrings are plain text with code in single backquotes
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"AnyRun": "AnyRun", "AnyDecomposition": "AnyDecomposition"}
autosummary_generate = False
python_use_unqualified_type_names = True
nitpicky = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"npeff {version}"
html_copy_source = False
html_show_sourcelink = False
