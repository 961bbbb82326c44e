"""Sphinx builds the documentation from this: `make docs`. It downloads nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import brimful  # noqa: E402  # found in the tree above
from brimful.utils.field_docs import FIELDS  # noqa: E402

project = "brimful"
author = "the brimful authors"
project_copyright = "the brimful authors, Apache-2.0"
version = release = brimful.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = False
show_warning_types = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = False
autoclass_content = "class"
default_role = "code"  # docstrings write `name`, as Markdown does
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes_style")]

html_theme = "furo"
html_title = f"brimful {release}"
html_static_path = ["_static"]
html_css_files = ["brimful.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57d0", "color-brand-content": "#0b57d0"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"},
}
copybutton_prompt_text = "$ "
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _keep_colons, priority=1)
    app.connect("autodoc-process-docstring", _without_fields, priority=1)


def _keep_colons(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """A field's docstring may begin with "`split(batch)`: the samples"; napoleon takes that for a type."""
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")  # an escaped space: nothing, in the same paragraph


def _without_fields(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """A record's `__doc__` lists its fields for `help`; autodoc reads their docstrings from the source."""
    if what == "class" and FIELDS in lines:
        del lines[lines.index(FIELDS) :]
