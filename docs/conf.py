"""The site that ``make docs`` builds of the pages in this folder and of docstrings. Warnings are errors."""

import importlib
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")

from sphinx.pycode import ModuleAnalyzer

import dfgnn
import dfgnn.nn
import dfgnn.nn.pyg

project = "dfgnn"
author = copyright = "The dfgnn developers"
release = version = dfgnn.__version__
html_title = f"dfgnn {release}"
html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/dfgnn/dfgnn/",
    "source_branch": "main",
    "source_directory": "docs/",
    # dfgnn's colour in the pictures (dfgnn/bench/palette.py), darker and lighter for text.
    "light_css_variables": {
        "color-brand-primary": "#b33a0a",
        "color-brand-content": "#b33a0a",
        "color-sidebar-link-text": "var(--color-foreground-secondary)",
        "color-sidebar-link-text--top-level": "var(--color-foreground-primary)",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ff8a4c",
        "color-brand-content": "#ff8a4c",
    },
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
pygments_dark_style = "github-dark"
templates_path = ["_templates"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",
]
copybutton_exclude = ".linenos, .gp, .go"
autosummary_ignore_module_all = False
myst_enable_extensions = ["dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages may begin with any level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# attention: the function that a layer calls, which has a page of its own.
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": "attention, extra_repr",
}
default_role = "literal"
napoleon_use_rtype = False


def _outside(app, name, source):
    """Links to files of the repository that are no pages lead to the repository."""
    page = Path(app.srcdir, name).parent

    def link(match):
        target = (page / match[1].partition("#")[0]).resolve()
        if target.is_relative_to(app.srcdir):
            return match[0]
        return f"](https://github.com/dfgnn/dfgnn/blob/main/{target.relative_to(Path(app.srcdir).parent)})"

    source[0] = re.sub(r"\]\((\.\./[^)]*)\)", link, source[0])


def _pictures(app, name, source):
    """A picture that has a dark variant is shown as the reader's theme asks."""
    page = Path(app.srcdir, name).parent

    def both(match):
        dark = match[2].replace(".png", "-dark.png")
        if not (page / dark).is_file():
            return match[0]
        return f"{match[0]}{{.only-light}}\n![{match[1]}]({dark}){{.only-dark}}"

    source[0] = re.sub(r"!\[([^\]]*)\]\(([^)]*\.png)\)", both, source[0])


def _public(app, what, name, obj, options, signature, returns):
    """Signatures without arguments for the tests."""
    return signature and re.sub(r", _\w+: [^,)]*", "", signature), returns


def _written_in(app, module, name):
    """The module with the source of a class that names the package which exports it as its own."""
    cls = getattr(importlib.import_module(module), name, None)
    modules = [
        c.__module__ for c in getattr(cls, "__mro__", ()) if c.__name__ == name
    ]
    return next((m for m in reversed(modules) if m.startswith("dfgnn.")), None)


def _one_signature(analyze):
    """Without overloads: a function is shown once, with what it accepts and returns in all."""

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads = {}

    return analyze_without_overloads


ModuleAnalyzer.analyze = _one_signature(ModuleAnalyzer.analyze)


def _errors(app):
    """Writes the page of what wrong arguments give, from the calls that the tests make."""
    import error_table

    page = Path(app.srcdir, "internals", "errors.md")
    text = error_table.page()
    if not page.is_file() or page.read_text() != text:
        page.write_text(text)


def setup(app):
    sys.path.insert(0, str(Path(app.srcdir).parent / "scripts"))
    app.connect("builder-inited", _errors)
    app.connect("autodoc-process-signature", _public)
    app.connect("source-read", _outside)
    app.connect("viewcode-follow-imported", _written_in)
    app.connect("source-read", _pictures)
