"""Maps along the edges of a graph (products, sums, gathered rows), each defined once for every path.

An `EdgeMap` says how the map is computed on a Graph, in plain operations, and which shape its result has.
Each map is linear in its tensors, so that its gradients are other maps: they may be differentiated any number
of times. `apply` chooses among the paths; while a compiler records, a map is an operator on a traced graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..runtime import rules
from ..runtime import torch_internals as internals
from ..runtime.eager import in_plain_operations, transformed
from ..runtime.rules import Rule
from . import compiler_graph
from .compiler_graph import EdgeList, Traced, as_traced


class EdgeMap(NamedTuple):
    """A map along edges. Its functions take (graph, *tensors, *numbers). ``gradients`` has a function for
    each tensor, which takes (graph, grad, *tensors, *numbers), or without ``saves`` (graph, grad,
    *numbers)."""

    name: str  # its operators on traced graphs are edge_<name> and graph_<name>
    tensors: str  # the tensors in these operators' schema
    numbers: str  # the other arguments in that schema: numbers and flags
    run: Callable[..., Tensor]  # computes the map on a Graph
    plain: Callable[..., Tensor]  # computes it in PyTorch's operations, on any graph with an ``edge_index``
    empty: Callable[..., Tensor]  # for a compiler: an uninitialised result, from the graph's sizes
    gradients: tuple[Callable[..., Tensor], ...]  # for each tensor, the function that computes its gradient
    saves: bool = True  # whether the gradients depend on the tensors, which are then saved for backward
    of_edges: bool = False  # whether the result has a row per edge


class _Mapped(Rule):
    """A map on one graph, which may be a traced one."""

    __slots__ = "graph", "map", "numbers"

    def __init__(self, edge_map: EdgeMap, graph: Any, numbers: tuple):
        self.map, self.graph, self.numbers = edge_map, graph, numbers

    def forward(self, *tensors):
        graph = self.graph
        if type(graph) is Traced:
            return graph.operator(f"{self.map.name}_run")(*tensors, *graph.edges, *self.numbers)
        return self.map.run(graph, *tensors, *self.numbers)

    def saved(self, tensors, result):
        return tensors if self.map.saves else ()

    def gradients(self, need, saved, grad):
        graph, numbers = self.graph, self.numbers
        return tuple(
            gradient(graph, grad, *saved, *numbers) if needed else None
            for gradient, needed in zip(self.map.gradients, need)
        )


def apply(edge_map: EdgeMap, graph: Any, tensors: tuple[Tensor, ...], *numbers: Any) -> Tensor:
    """The map's result. graph: a Graph, an EdgeList or, in gradients, a Traced."""
    graph = compiler_graph.on_meta(compiler_graph.for_compiler(graph), tensors[0])
    plain = in_plain_operations()
    if isinstance(graph, (EdgeList, Traced)) and not plain:
        traced = graph if isinstance(graph, Traced) else as_traced(graph)
        return traced.operator(edge_map.name)(*tensors, *traced.edges, *numbers)
    if plain or transformed(*tensors):
        return edge_map.plain(graph, *tensors, *numbers)
    return rules.apply(_Mapped(edge_map, graph, numbers), *tensors)


def define(edge_map: EdgeMap) -> EdgeMap:
    """Defines the map's operators on traced graphs."""
    count = len(edge_map.gradients)
    end = count + len(compiler_graph.Arguments._fields)

    def kernel(*args):
        graph = compiler_graph.find(*args[count:end])
        with internals.BelowAutograd():
            result = edge_map.run(graph, *args[:count], *args[end:]).contiguous()
        return compiler_graph.in_use(graph.edge_mask, result) if edge_map.of_edges else result

    def fake(*args):
        return edge_map.empty(compiler_graph.Arguments(*args[count:end]), *args[:count], *args[end:])

    def rule_of(family, *args):
        graph = Traced(family, compiler_graph.Arguments(*args[count:end]))
        return _Mapped(edge_map, graph, args[end:]), args[:count]

    schema = f"({edge_map.tensors}, {compiler_graph.ARGUMENTS}, {edge_map.numbers}) -> Tensor"
    compiler_graph.define_differentiable(edge_map.name, schema, kernel, fake, rule_of)
    return edge_map
