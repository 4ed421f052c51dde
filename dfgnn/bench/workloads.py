"""The calls to measure: the attention of a layer on a graph, with random inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from .. import functional
from .. import plan as schedule
from ..graph import Graph
from . import accuracy

MODES = ("forward", "train")


@dataclass(frozen=True)
class Layer:
    """A layer's attention and its inputs. passes: neighbour rows gathered per edge, by mode; a mode's
    baseline is passes x the time of a plain sum."""

    name: str  # the layer's name in plans
    attention: Callable  # (graph, **inputs, kernel_options=...) -> out
    exact: Callable  # (graph, **inputs, grad_out=...) -> {"out" or name of an input: value or gradient}
    passes: dict[str, int]
    features: tuple[str, ...]  # inputs [N, H, D]
    by_dst: str  # the input that has a row per destination; all others have one per source
    terms: tuple[str, ...] = ()  # inputs [N, H], which are float32 under autocast
    vectors: tuple[str, ...] = ()  # inputs [H, D], scaled so that scores are about 1


LAYERS = {
    "gat": Layer(
        "gat",
        functional.gat_attention,
        accuracy.gat,
        {"forward": 1, "train": 2},
        ("value",),
        "score_dst",
        terms=("score_src", "score_dst"),
    ),
    "gatv2": Layer(
        "gatv2",
        functional.gatv2_attention,
        accuracy.gatv2,
        {"forward": 1, "train": 4},
        ("key", "query"),
        "query",
        vectors=("att",),
    ),
    "dot": Layer(
        "dot",
        functional.dot_attention,
        accuracy.dot,
        {"forward": 2, "train": 6},
        ("query", "key", "value"),
        "query",
    ),
}


@dataclass(frozen=True)
class Workload:
    """A layer's inputs on a graph, by name, and the gradient of its output."""

    layer: Layer
    graph: Graph
    heads: int
    head_dim: int
    dtype: torch.dtype
    inputs: dict[str, Tensor]
    grad_out: Tensor

    @classmethod
    def make(cls, layer: Layer, graph, heads: int, head_dim: int, dtype: torch.dtype) -> "Workload":
        """Standard normal inputs, the same ones at every call."""
        generator = torch.Generator(graph.device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=graph.device).to(dtype)

        acc = torch.promote_types(dtype, torch.float32)
        rows = {name: graph.num_src for name in (*layer.features, *layer.terms)}
        rows[layer.by_dst] = graph.num_dst
        inputs = {name: normal(rows[name], heads, head_dim) for name in layer.features}
        inputs |= {name: normal(rows[name], heads).to(acc) for name in layer.terms}
        inputs |= {name: normal(heads, head_dim) / head_dim**0.5 for name in layer.vectors}
        grad_out = normal(graph.num_dst, heads, head_dim)
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        return cls(layer, graph, heads, head_dim, dtype, inputs, grad_out)

    def in_one_dtype(self) -> "Workload":
        """The same values with every input in the features' dtype, as other libraries require it."""
        inputs = {name: x.detach().to(self.dtype).requires_grad_() for name, x in self.inputs.items()}
        return replace(self, inputs=inputs)

    def attention(self, schedule: str) -> Callable:
        """The layer's attention on the graph, by this schedule."""
        options = None if schedule == "auto" else {"schedule": schedule}
        return partial(self.layer.attention, self.graph, kernel_options=options)

    def call(self, attention: Callable, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        """A function that returns (out,), or (out, gradients of the inputs in their order) in training."""
        leaves = tuple(self.inputs.values())

        def forward():
            with torch.no_grad():
                return (attention(**self.inputs),)

        def train():
            out = attention(**self.inputs)
            return out.detach(), *torch.autograd.grad(out, leaves, self.grad_out)

        return {"forward": forward, "train": train}[mode]

    @property
    def shape(self) -> schedule.Shape:
        """What plans are made for: heads are padded as kernels pad them."""
        dim = schedule.padded(self.head_dim, self.dtype, self.graph.device)
        return schedule.Shape(self.heads, dim, self.dtype, self.layer.name)

    def plans(self, mode: str, schedule: str = "auto") -> dict:
        """The plans of a call, by direction. Raises ValueError if the schedule is not available."""
        heads, dim, dtype, layer = self.shape
        directions = {"forward": False, "reverse": True} if mode == "train" else {"forward": False}
        return {
            name: self.graph.plan(heads, dim, dtype, reverse=reverse, schedule=schedule, layer=layer)
            for name, reverse in directions.items()
        }

    def alternatives(self, mode: str) -> list[str]:
        """Names of the schedules that could be taken instead of "auto", in either direction."""
        directions = (False, True) if mode == "train" else (False,)
        names = (self.graph._planner.alternatives(self.shape, reverse) for reverse in directions)
        return list(dict.fromkeys(chain.from_iterable(names)))

    def most_partial_bytes(self, direction: str) -> int:
        """The most bytes of partial rows that a plan of "auto" may write in this direction."""
        return self.graph._planner.most_partial_bytes(self.shape, direction == "reverse")

    def reference(self, gradients: bool, rows: Tensor | None = None) -> dict[str, Tensor]:
        """float64 values of what ``call`` returns, by name; with ``rows``, those destinations of ``out``."""
        inputs = {name: x.detach() for name, x in self.inputs.items()}
        if rows is not None:
            inputs[self.layer.by_dst] = inputs[self.layer.by_dst][rows]
            block = Graph.from_csr(*edges_into(self.graph, rows), num_src=self.graph.num_src)
            return self.layer.exact(block, **inputs)
        return self.layer.exact(self.graph, **inputs, grad_out=self.grad_out if gradients else None)

    def errors(
        self, results: tuple[Tensor, ...], reference: dict[str, Tensor], rows: Tensor | None = None
    ) -> dict[str, float]:
        """Relative error of every result of ``call`` that the reference has, by name."""
        if rows is not None:
            results = (results[0][rows],)
        return {name: accuracy.error(x, reference[name]) for name, x in zip(("out", *self.inputs), results)}


def sample_rows(graph, count: int) -> Tensor:
    """int64: the destination with most edges and random others, ``count`` in all or, if there are fewer, all
    destinations; the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(graph.num_dst, generator=generator)[:count].to(graph.device)
    longest = graph.csr().indptr.diff().argmax()
    if not (rows == longest).any():
        rows[0] = longest
    return rows


def edges_into(graph, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(indptr, sources) of a CSR of these destinations alone."""
    csr = graph.csr()
    degree = csr.indptr[rows + 1] - csr.indptr[rows]
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    place = torch.repeat_interleave(csr.indptr[rows] - indptr[:-1], degree)
    place += torch.arange(len(place), device=place.device)
    return indptr, csr.indices[place]
