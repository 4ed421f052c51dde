"""The site that ``make docs`` builds of the pages in this folder and of docstrings. Warnings are errors."""

import os
import re

os.environ.setdefault("DGLBACKEND", "pytorch")

from sphinx.pycode import ModuleAnalyzer

import dfgnn

project = "dfgnn"
author = copyright = "The dfgnn developers"
release = version = dfgnn.__version__
html_title = f"dfgnn {release}"
html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/dfgnn/dfgnn/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "attrs_inline"]
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
    source[0] = re.sub(
        r"\]\((?:\.\./)+([^)]*)\)", r"](https://github.com/dfgnn/dfgnn/blob/main/\1)", source[0]
    )


def _public(app, what, name, obj, options, signature, returns):
    """Signatures without arguments for the tests."""
    return signature and re.sub(r", _\w+: [^,)]*", "", signature), returns


def _one_signature(analyze):
    """Without overloads: a function is shown once, with what it accepts and returns in all."""

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads = {}

    return analyze_without_overloads


ModuleAnalyzer.analyze = _one_signature(ModuleAnalyzer.analyze)


def setup(app):
    app.connect("autodoc-process-signature", _public)
    app.connect("source-read", _outside)
