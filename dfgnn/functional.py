"""Fused graph attention: SDDMM, edge softmax and SpMM in one pass per direction, without edge tensors.

Notation: j -> i is an edge from source j to destination i; H heads; softmax runs over the in-edges of i. Each
function has a plain-PyTorch twin of the same name in :mod:`dfgnn.reference`.
"""

import math

import torch
from torch import Tensor

from . import _library, _ops
from .graph import Graph

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _Checker:
    """Raises errors that name the function, the argument, what was expected and what came."""

    def __init__(self, function: str, graph, first: str, features):
        self.function = function
        if not isinstance(graph, Graph):
            raise TypeError(f"{function}: graph: expected a dfgnn.Graph, got {type(graph).__name__}")
        if not isinstance(features, Tensor):
            raise TypeError(f"{function}: {first}: expected a tensor, got {type(features).__name__}")
        if features.dtype not in _DTYPES:
            raise TypeError(
                f"{function}: {first}: expected float32, float64, float16 or bfloat16, got {features.dtype}"
            )
        self.dtype = features.dtype
        self.acc = torch.float64 if features.dtype == torch.float64 else torch.float32
        self.device = graph.device
        self.num_edges = graph.num_edges

    def error(self, kind, argument: str, expected: str, got) -> Exception:
        return kind(f"{self.function}: {argument}: expected {expected}, got {got}")

    def tensor(self, name: str, x, shapes, dtypes=None) -> None:
        """shapes: allowed shapes; None in a shape matches any size >= 1."""
        if not isinstance(x, Tensor):
            raise self.error(TypeError, name, "a tensor", type(x).__name__)
        dtypes = dtypes or (self.dtype,)
        if x.dtype not in dtypes:
            raise self.error(TypeError, name, " or ".join(str(d) for d in dict.fromkeys(dtypes)), x.dtype)
        if x.device != self.device:
            raise self.error(ValueError, name, f"device {self.device} (the graph's)", x.device)

        def fits(shape):
            pairs = zip(x.shape, shape, strict=True)
            return x.dim() == len(shape) and all(n >= 1 if want is None else n == want for n, want in pairs)

        if not any(x.dim() == len(shape) and fits(shape) for shape in shapes):
            text = " or ".join(
                "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]" for shape in shapes
            )
            raise self.error(ValueError, name, f"shape {text}", list(x.shape))

    def edges(self, num_heads: int, edge_bias, edge_weight, dropout_p, seed):
        """Checks the options on edges; the weight gets its head dimension."""
        allowed = (self.dtype, self.acc)
        if edge_bias is not None:
            self.tensor("edge_bias", edge_bias, [(self.num_edges, num_heads)], allowed)
        if edge_weight is not None:
            self.tensor("edge_weight", edge_weight, [(self.num_edges,), (self.num_edges, num_heads)], allowed)
            if edge_weight.dim() == 1:
                edge_weight = edge_weight.unsqueeze(1)
        if not 0 <= dropout_p <= 1:
            raise self.error(ValueError, "dropout_p", "a probability in [0, 1]", dropout_p)
        if dropout_p == 0:
            return edge_weight, None
        if seed is None:
            seed = torch.randint(0, 2**62, (1,), device=self.device)
        return edge_weight, seed


def _pad_for_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    """CUDA kernels load 16 bytes at a time and take one head size: zero columns fill up to it."""
    if tensors[0].device.type != "cuda":
        return tensors
    step = 16 // tensors[0].element_size()
    size = -(-max(t.shape[-1] for t in tensors) // step) * step
    return tuple(
        torch.nn.functional.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in tensors
    )


def _without_padding(out: Tensor, size: int) -> Tensor:
    # Slicing an unpadded tensor would cost a copy of its gradient.
    return out[..., :size] if out.shape[-1] > size else out


def _wants_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _prepare(check: _Checker) -> None:
    if check.device.type == "cuda":
        _library.require_cuda_library()
    elif check.device.type != "cpu":
        raise check.error(ValueError, "graph", "a graph on cpu or cuda", check.device)


def gat_attention(
    graph: Graph,
    feat: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None,
    *,
    negative_slope: float = 0.2,
    edge_bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Additive attention of GAT (Veličković et al., ICLR 2018, arXiv 1710.10903).

    .. math::
        s_{ij} = \mathrm{LeakyReLU}(\alpha^{src}_j + \alpha^{dst}_i + b_{ij}), \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, \mathrm{feat}_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors.
        feat: values [num_src, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64). On CUDA fastest where D is a multiple of 16 bytes; other sizes are padded.
        alpha_src: source term [num_src, H], in feat's dtype or float32.
        alpha_dst: destination term [num_dst, H], likewise; None for 0.
        negative_slope: of LeakyReLU.
        edge_bias: b [E, H], in the order in which the graph's edges were given.
        edge_weight: w [E] or [E, H], same order; multiplies after softmax and is not renormalised.
        out_bias: [H, D] in feat's dtype, added to every row of out: the bias of a layer, without a second
            output that is kept for backward.
        dropout_p: probability of dropping an attention weight. The mask is a function (Philox) of a seed
            drawn from torch's generator of the device, the edge and the head; it is never stored.
        return_attention: also return w m softmax(s), [E, H] in feat's dtype and the given edge order.
        schedule: "auto", or a name from ``dfgnn.schedule.SCHEDULES``.

    Returns:
        out [num_dst, H, D], or (out, attention).

    Differentiable in feat, alpha_src, alpha_dst, edge_bias, edge_weight and out_bias, once: second-order
    gradients raise NotImplementedError. Deterministic: equal inputs give bitwise equal results. Memory beyond
    inputs, outputs and gradients is O(N H D); edge-sized tensors exist only where one is passed in or asked
    for.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, device, shape or range.
        RuntimeError: CUDA tensors without CUDA support in this installation.
    """
    check = _Checker("gat_attention", graph, "feat", feat)
    check.tensor("feat", feat, [(graph.num_src, None, None)])
    heads, dim = feat.shape[1:]
    alpha_types = (check.dtype, check.acc)
    check.tensor("alpha_src", alpha_src, [(graph.num_src, heads)], alpha_types)
    if alpha_dst is not None:
        check.tensor("alpha_dst", alpha_dst, [(graph.num_dst, heads)], alpha_types)
        alpha_dst = alpha_dst.to(check.acc)
    if out_bias is not None:
        check.tensor("out_bias", out_bias, [(heads, dim)])
    edge_weight, seed = check.edges(heads, edge_bias, edge_weight, dropout_p, _seed)
    _prepare(check)

    (values,) = _pad_for_device(feat)
    if out_bias is not None:
        (out_bias,) = _pad_for_device(out_bias)
    backward = _wants_grad(feat, alpha_src, alpha_dst, edge_bias, edge_weight, out_bias)
    edges = return_attention or seed is not None or edge_bias is not None or edge_weight is not None
    args = _ops.graph_args(
        graph, num_heads=heads, head_dim=values.shape[2], dtype=feat.dtype, schedule=schedule, edges=edges,
        backward=backward,
    )  # fmt: skip
    out, _, _, _, attention = _ops.gat_forward(
        values, alpha_src.to(check.acc), alpha_dst, edge_bias, edge_weight, seed, out_bias, *args,
        graph.num_dst, float(negative_slope), float(dropout_p), return_attention,
        backward and _wants_grad(alpha_dst),
    )  # fmt: skip
    out = _without_padding(out, dim)
    return (out, attention.to(feat.dtype)) if return_attention else out


def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    edge_bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    schedule: str = "auto",
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Dot-product attention over a graph (Graph Transformer: Dwivedi and Bresson 2020, arXiv 2012.09699).

    .. math::
        s_{ij} = \mathrm{scale} \; q_i \cdot k_j + b_{ij}, \quad
        \mathrm{out}_i = \sum_j w_{ij} m_{ij} \, \mathrm{softmax}_j(s_{ij}) \, v_j

    with the dropout mask m_ij in {0, 1 / (1 - p)}. A destination without edges gets 0.

    Args:
        graph: the edges, on the device of the tensors.
        query: [num_dst, H, D]; float32, float64, float16 or bfloat16. Sums run in float32 (float64 for
            float64).
        key: [num_src, H, D], same dtype.
        value: [num_src, H, Dv], same dtype; Dv may differ from D. On CUDA fastest where D = Dv is a multiple
            of 16 bytes; other sizes are padded.
        scale: factor of the dot product; None for 1 / sqrt(D).
        edge_bias, edge_weight, dropout_p, return_attention, schedule: as in :func:`gat_attention`.

    Returns:
        out [num_dst, H, Dv], or (out, attention [E, H]).

    Differentiable in query, key, value, edge_bias and edge_weight, once. Deterministic, and without
    edge-sized tensors beyond those passed in or asked for, like :func:`gat_attention`; raises as it does.
    """
    check = _Checker("dot_attention", graph, "query", query)
    check.tensor("query", query, [(graph.num_dst, None, None)])
    heads, dim = query.shape[1:]
    check.tensor("key", key, [(graph.num_src, heads, dim)])
    check.tensor("value", value, [(graph.num_src, heads, None)])
    value_dim = value.shape[2]
    edge_weight, seed = check.edges(heads, edge_bias, edge_weight, dropout_p, _seed)
    _prepare(check)

    query, key, value = _pad_for_device(query, key, value)
    backward = _wants_grad(query, key, value, edge_bias, edge_weight)
    edges = return_attention or seed is not None or edge_bias is not None or edge_weight is not None
    args = _ops.graph_args(
        graph, num_heads=heads, head_dim=value.shape[2], dtype=query.dtype, schedule=schedule, edges=edges,
        backward=backward,
    )  # fmt: skip
    out, _, attention = _ops.dot_forward(
        query, key, value, edge_bias, edge_weight, seed, *args,
        float(scale if scale is not None else 1 / math.sqrt(dim)), float(dropout_p), return_attention,
    )  # fmt: skip
    out = _without_padding(out, value_dim)
    return (out, attention.to(query.dtype)) if return_attention else out
