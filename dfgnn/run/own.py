"""Finds attention that a script computes itself: where it calls a library's softmax over each node's edges.

Only the softmax may run on dfgnn's kernels then (:mod:`dfgnn.switch.pieces`). When the script has ended, the
sources of its modules are parsed, and each name that stands for such a function is found, however it was
imported.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from .layers import shown

#: Function -> the page of the documentation with a fused replacement.
SOFTMAXES = {
    "torch_geometric.utils.softmax": "migrating_from_pyg.md",
    "torch_scatter.scatter_softmax": "migrating_from_pyg.md",
    "torch_scatter.composite.scatter_softmax": "migrating_from_pyg.md",
    "pyg_lib.ops.softmax_csr": "migrating_from_pyg.md",
    "dgl.ops.edge_softmax": "migrating_from_dgl.md",
    "dgl.nn.functional.edge_softmax": "migrating_from_dgl.md",
    "dgl.sparse.softmax": "migrating_from_dgl.md",
    "torch.sparse.softmax": "migrating_from_pyg.md",
}
#: Modules of dfgnn whose functions stand for a library's: while its names are patched, and where dgl is ours.
_STAND_INS = ("dfgnn.switch.pieces", "dfgnn.functional.ops", "dfgnn.compat.sparse.matrix")
# Libraries whose modules are not searched.
_LIBRARIES = {"torch", "torch_geometric", "torch_scatter", "torch_sparse", "pyg_lib", "dgl", "dfgnn"}

# Words in the function or class around a softmax -> the functions of dfgnn.functional that fit. The first
# entry of which a word occurs counts.
_KINDS: tuple[tuple[set[str], str], ...] = (
    ({"leaky_relu", "leakyrelu"}, "gat_attention or gatv2_attention"),
    (
        {"sqrt", "query", "key", "q", "k", "matmul", "bmm", "einsum", "u_dot_v", "v_dot_u", "e_dot_v"},
        "dot_attention",
    ),
    (set(), "score_attention"),
)


class Use(NamedTuple):
    """One place where a script calls such a function."""

    file: str
    line: int
    where: str  # the enclosing class and function; "" at module level
    function: str
    fits: str  # functions of dfgnn.functional that could replace it
    recipe: str  # a page of the documentation


def uses(started: str) -> list[Use]:
    """The uses in all loaded modules except those of the libraries and of Python. Files are named relative to
    the folder ``started``."""
    functions = dict(_functions())
    modules = {name.rpartition(".")[0] for name in SOFTMAXES} | _LIBRARIES - {"torch", "dfgnn"}
    telling = {*functions, *(id(sys.modules[name]) for name in modules if name in sys.modules)}
    places: set[Use] = set()
    for name, module in list(sys.modules.items()) if functions else ():
        root, file = name.partition(".")[0], getattr(module, "__file__", None)
        if root in _LIBRARIES or root in sys.stdlib_module_names or not isinstance(file, str):
            continue
        if name != "__main__" and not file.endswith(".py"):
            continue
        # Of thousands of installed modules, only those are parsed that hold one of these functions, or one of
        # the modules that contain them.
        if "site-packages" in file and telling.isdisjoint(map(id, list(vars(module).values()))):
            continue
        try:
            text = "".join(linecache.getlines(file, vars(module)))
            if "softmax" in text:
                places.update(_Reader(module, shown(file, started), functions).read(ast.parse(text)))
        except (OSError, ValueError, SyntaxError, RecursionError):  # the module's source cannot be read
            continue
    return sorted(places)


def _functions() -> Iterator[tuple[int, str]]:
    """(id, name) of the functions that are loaded."""
    for name in reversed(SOFTMAXES):  # reversed, so that a function's first name wins in a dict
        place, _, attribute = name.rpartition(".")
        function = getattr(sys.modules.get(place), attribute, None)
        if isinstance(function, ModuleType):  # dgl.ops.edge_softmax may be the module of that name
            function = getattr(function, attribute, None)
        home = str(getattr(function, "__module__", ""))
        if callable(function) and (not home.startswith("dfgnn") or home in _STAND_INS):
            yield id(function), name


class _Reader:
    """Finds the uses in the syntax tree of one module."""

    def __init__(self, module: ModuleType, file: str, functions: dict[int, str]):
        self.module, self.file, self.functions = module, file, functions
        self.imported: dict[str, Any] = {}  # names that are imported within functions

    def read(self, tree: ast.Module) -> Iterator[Use]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    place = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imported[alias.asname or place] = sys.modules.get(place)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    value = getattr(sys.modules.get(node.module), alias.name, None)
                    value = value or sys.modules.get(f"{node.module}.{alias.name}")
                    self.imported[alias.asname or alias.name] = value
        yield from self._in(tree, [], tree)

    def _in(self, node: ast.AST, path: list[str], around: ast.AST) -> Iterator[Use]:
        """The uses in a node. path: names of enclosing classes and functions; around: the outermost one."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from self._in(child, [*path, child.name], around if path else child)
                continue
            function = self._function(child)
            if function is None:
                yield from self._in(child, path, around)
            else:
                words = {word.lower() for word in _words(around)}
                fits = next(fits for kind, fits in _KINDS if not kind or kind & words)
                line = getattr(child, "lineno", 0)
                yield Use(self.file, line, ".".join(path), function, fits, SOFTMAXES[function])

    def _function(self, node: ast.AST) -> str | None:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            return None
        return self.functions.get(id(self._value(node)))

    def _value(self, node: ast.AST) -> Any:
        """The object for which a name, or a module's attribute, stands."""
        if isinstance(node, ast.Name):
            return vars(self.module).get(node.id, self.imported.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None


def _words(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        for name in ("id", "attr", "arg"):
            if isinstance(getattr(child, name, None), str):
                yield getattr(child, name)
