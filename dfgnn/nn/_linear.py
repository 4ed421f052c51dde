"""Which linear modules are plain products, and folding: score terms <W x, a> of additive attention as
<W^T a, x>."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..runtime import torch_internals as internals
from ..runtime.eager import in_autocast
from ._upstream import is_from

#: Whether there are hooks on all modules (``register_module_forward_hook`` and its like).
all_hooked = internals.has_any_global_hook

#: Modules that give x W^T + b and do nothing else; ``pyg`` adds torch_geometric's.
LINEAR: list[type] = [nn.Linear]


# Cache of `_is_as_written`: classes that were found so -> their methods at that time.
_AS_WRITTEN: dict[type, tuple[Any, ...]] = {}


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of ``module`` is the forward that its class was written with: no hooks on it, and no
    other forward on the module or its class. ``all_hooked`` says whether there are hooks on all modules."""
    own, cls = module.__dict__, type(module)
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    ) and _is_as_written(cls)


def _is_as_written(cls: type[nn.Module]) -> bool:
    """Whether the forward of this class, and the methods that call it, are as their libraries wrote them."""
    if _AS_WRITTEN.get(cls) == (cls.forward, cls.__call__, cls._call_impl):
        return True
    for name in ("forward", "__call__", "_call_impl"):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        method = vars(owner)[name]
        method = getattr(method, "passes_on_to", method)  # dfgnn.run's, which looks at calls
        if not is_from(owner.__module__.split(".")[0], method):
            return False
    _AS_WRITTEN[cls] = cls.forward, cls.__call__, cls._call_impl
    return True


_is_as_written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `_fused_or_upstream`


def is_product(linear: nn.Module) -> bool:
    """Whether the output of ``linear`` is x W^T with an ordinary tensor W: it has no hooks, replaced methods,
    parametrization or bias, and its weight is no subclass of Tensor (quantised, say)."""
    plain = None if all_hooked() else plain_linear(linear)
    return plain is not None and plain[1] is None


def is_lazy(linear: Any) -> bool:
    """Whether this module has no weight yet, but makes it at its first call."""
    return isinstance(getattr(linear, "weight", None), UninitializedParameter)


def plain_linear(linear: Any) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias where the output of ``linear`` is x W^T + b (see `is_product`); else None. The
    caller must check `all_hooked` itself."""
    if type(linear) not in LINEAR or F.linear is not internals.linear or not is_untouched(linear):
        return None
    parameters = linear.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    # Instead of a Parameter the weight may be a plain tensor, or an exporter's FakeTensor. A weight of
    # another class is refused, because its products may be computed in another way.
    if type(weight) is not nn.Parameter and type(weight := linear.weight) not in (
        Tensor,
        internals.FakeTensor,
    ):
        return None
    if bias is None and "bias" not in parameters:
        bias = linear.bias
    return (
        None if type(bias) not in (nn.Parameter, Tensor, internals.FakeTensor, type(None)) else (weight, bias)
    )


def under_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type in which autocast would multiply them; as they are where it is off."""
    if in_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        # float64 stays as it is, because autocast does not cast it.
        x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))
    return x, weight


def folds(linear: nn.Module, x: Tensor, width: int) -> bool:
    """Whether :func:`folded_terms` is right for ``linear``, whose output has this width, and pays."""
    # Folding reads x a second time, which for wide x costs more than reading the projection [N, H, D]. Under
    # autocast it is a matrix product in 16 bits, whereas (feat * a).sum(-1) is summed in float32. Compiled,
    # that sum is one kernel, while folding takes six more matrix products, those of the gradients included.
    if torch.compiler.is_compiling():
        return False
    return is_product(linear) and x.shape[-1] <= 2 * width and not in_autocast(x)


def folded_terms(linear: nn.Module, x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """<W x, a> per head as <W^T a, x>, for each a of ``vectors [1, H, D]``: ``[N, *, H]`` each, without
    N x H x D in between. x: ``[N, *, F]``."""
    stacked = torch.cat(vectors)
    weight: Tensor = linear.weight  # type: ignore[assignment]
    folded = torch.einsum("khd,hdf->khf", stacked, weight.unflatten(0, stacked.shape[1:]))
    return F.linear(x, folded.flatten(0, 1)).unflatten(-1, folded.shape[:2]).unbind(-2)


def score_terms(linear: nn.Module, x: Tensor, feat: Tensor | None, *vectors: Tensor) -> tuple[Tensor, ...]:
    """<W x, a> per head for each a of ``vectors [1, H, D]``: ``[N, *, H]`` each. feat: W x, ``[N, *, H, D]``,
    if it has been computed."""
    if folds(linear, x, vectors[0].numel()):
        return folded_terms(linear, x, *vectors)
    feat = linear(x).unflatten(-1, vectors[0].shape[1:]) if feat is None else feat
    return tuple((feat * vector).sum(-1) for vector in vectors)
