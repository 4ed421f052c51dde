"""Errors of layers, which name the layer, the argument, what was expected, what came and what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import torch_internals as internals
from ..runtime.eager import in_autocast
from ..runtime.wrong_call import no_bool, wrong_call
from ..sparse.csr import no_tensor
from ._linear import LINEAR, is_lazy, plain_linear


class DGLError(Exception):
    """Raised by :mod:`dfgnn.compat`, and by layers of DGL's names, where DGL raises its own DGLError."""


# Names of arguments of torch_geometric's layers -> the names in DGL's layers; and the inverse.
_DGL_NAMES = {
    "in_channels": "in_feats",
    "out_channels": "out_feats",
    "heads": "num_heads",
    "dropout": "attn_drop",
}
_PYG_NAMES = {theirs: name for name, theirs in _DGL_NAMES.items()}


def check_constructor(init: Callable[..., None]) -> Callable[..., None]:
    """``init`` of a layer, which first checks what PyTorch would complain of much later, or not at all."""
    signature = inspect.signature(init)
    parameters = signature.parameters

    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        layer = type(self).__name__
        for name in kwargs:
            _check_name(layer, name, parameters)
        options = dict(zip([*parameters][1:], args)) | kwargs
        for name, value in options.items():
            if name in parameters:
                _check_kind(layer, parameters[name], value)
        for name in ("heads", "num_heads"):
            if name in options:
                _check_heads(layer, name, options[name])
        for name in _SIZES:
            if isinstance(options.get(name), int):
                _check_size(layer, name, options[name])
        _check_typed(layer, options, parameters)
        activation = options.get("activation")
        if activation is not None and not callable(activation):
            raise TypeError(
                f"{layer}: activation: expected a function such as torch.nn.functional.relu, a module or "
                f"None, got {activation!r}"
            )
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            raise wrong_call(layer, signature, (self, *args), kwargs, error) or error from None
        except (ValueError, AssertionError) as error:
            if str(error).startswith(layer):
                raise
            raise _unresolved(layer, options, error) or type(error)(f"{layer}: {error}") from None
        remember_parameters(self)

    return checked


def _check_typed(layer: str, options: dict[str, Any], parameters: Any) -> None:
    """Raise ValueError where a layer of torch_geometric gets other than (node types, edge types), or a width
    that its heads do not divide."""
    if "metadata" in options:
        kinds = options["metadata"]
        pair = isinstance(kinds, (tuple, list)) and len(kinds) == 2 and not isinstance(kinds[0], str)
        if not pair or not all(isinstance(x, str) for x in kinds[0]) or any(len(x) != 3 for x in kinds[1]):
            what = "(node types, edge types (source, name, target)), as data.metadata()"
            raise ValueError(f"{layer}: metadata: expected {what} has them, got {kinds!r:.80}")
    name = "out_channels" if "metadata" in parameters else "channels" if layer == "GPSConv" else ""
    width, heads = options.get(name, 0), options.get("heads", 1)
    if isinstance(width, int) and width % heads:
        raise ValueError(f"{layer}: {name}: expected a multiple of heads={heads}, got {width}")


def _unresolved(layer: str, options: dict[str, Any], error: Exception) -> ValueError | None:
    """The error of a name that torch_geometric's resolvers, of aggregations, activations and norms, do not
    know; None if the error is another one."""
    word, _, choices = str(error).removeprefix("Could not resolve '").partition("' among choices ")
    if not choices:
        return None
    name = next((name for name, value in options.items() if isinstance(value, str) and value == word), "aggr")
    known = sorted({x.removesuffix("Aggregation") for x in re.findall(r"'(\w+)'", choices)} - {""})
    lower = [x.lower() for x in known]
    like = [x for x in lower if x.startswith(word.lower())] or difflib.get_close_matches(
        word.lower(), lower, 1
    )
    hint = f"; did you mean {like[0]!r}?" if like else ""
    return ValueError(f"{layer}: {name}: expected one of {', '.join(known)}, got {word!r}{hint}")


def says_errors(forward: Any, errors: str) -> None:
    """Adds to the documentation of a layer's forward what it raises, unless it says so itself."""
    if forward.__doc__ is not None and "Raises:" not in forward.__doc__:  # None: python -OO
        forward.__doc__ = f"{forward.__doc__.rstrip()}\n\n        Raises:\n            {errors}\n        "


def _check_kind(layer: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raise TypeError or ValueError where an argument of a constructor is of another kind than it can be."""
    name, default = parameter.name, parameter.default
    if value is None and any(word in str(parameter.annotation) for word in ("None", "Optional")):
        return
    if name in _DROPOUTS and isinstance(value, numbers.Real) and not 0 <= float(value) <= 1:
        raise ValueError(f"{layer}: {name}: expected a probability in [0, 1], got {value}")
    if name == "fill_value" and isinstance(value, str) and value not in _REDUCTIONS:
        what = f"a number, a tensor or one of {', '.join(_REDUCTIONS)}"
        raise ValueError(f"{layer}: fill_value: expected {what}, got {value!r}")
    if name == "clamp" and value is not None and not (isinstance(value, int | float) and value > 0):
        raise ValueError(f"{layer}: clamp: expected a number above 0 or None, got {value!r}")
    if name == "gate_nn" and not callable(value):
        raise TypeError(
            f"{layer}: gate_nn: expected a module such as torch.nn.Linear(F, 1), got {value!r:.80}"
        )
    choices = next((x for x in _CHOICES if default in x), ()) if isinstance(default, str) else ()
    if choices and value not in choices:
        raise ValueError(f"{layer}: {name}: expected one of {', '.join(choices)}, got {value!r}")
    if parameter.annotation in (bool, "bool"):
        if isinstance(value, (str, float, list, tuple, dict, Tensor)):
            raise no_bool(layer, name, value)
    elif name in (*_SIZES, *_WIDTHS):
        if isinstance(value, (str, float, Tensor)) or value is None and default is not None:
            raise TypeError(f"{layer}: {name}: expected an integer, got {value!r:.80}")
    elif type(default) in (int, float) and (value is None or isinstance(value, (str, list, dict))):
        raise TypeError(f"{layer}: {name}: expected a number, got {value!r:.80}")


def _check_name(layer: str, name: str, parameters: Any) -> None:
    if name in parameters:
        return
    for names, here, there in (
        (_DGL_NAMES, "DGL's", "torch_geometric's layers are in dfgnn.nn.pyg"),
        (_PYG_NAMES, "torch_geometric's", "DGL's layers are in dfgnn.nn.dgl"),
    ):
        if names.get(name) in parameters:
            raise TypeError(
                f"{layer}: {name}: this layer has {here} arguments, among which it is called {names[name]}; "
                f"{there}"
            )


def _check_heads(layer: str, name: str, heads: Any) -> None:
    try:
        number = operator.index(heads)
    except TypeError:
        raise TypeError(f"{layer}: {name}: expected an integer, got {heads!r}") from None
    _check_size(layer, name, number)


# Arguments of constructors that are widths of what is given, and that are probabilities.
_WIDTHS = (
    "in_channels", "in_feats", "in_size", "feats", "channels", "edge_dim", "edge_feats", "in_node_feats",
    "in_edge_feats", "num_relations", "num_ntypes", "num_etypes", "type_dim",
)  # fmt: skip
# Words that an argument of torch_geometric's layers may be, which its constructors assert.
_CHOICES = (
    ("MX", "SD"), ("additive", "dot_product"), ("across-relation", "within-relation"),
    ("additive-self-attention", "multiplicative-self-attention"),
)  # fmt: skip
_REDUCTIONS = "mean", "add", "sum", "mul", "min", "max"
_DROPOUTS = "dropout", "attn_drop", "feat_drop"
# Arguments of constructors that are sizes of results, of a head or of all heads.
_SIZES = "out_channels", "out_feats", "out_size", "head_size", "out_node_feats", "out_edge_feats"


def _check_size(layer: str, name: str, size: int) -> None:
    if size < 1:
        what = "" if name in ("heads", "num_heads") else "; is it hidden // heads of more heads than hidden?"
        raise ValueError(f"{layer}: {name}: expected at least 1, got {size}{what}")


def check_sizes(layer: nn.Module) -> None:
    """Raise ValueError if the layer has no head, or heads without a column. A layer that torch_geometric's or
    DGL's constructor has made may: `check_constructor` has not seen its arguments."""
    own = layer.__dict__
    for name, theirs in (("heads", "_num_heads"), ("out_channels", "_out_feats")):
        for attribute in (name, theirs):
            if own.get(attribute, 1) == 0:
                _check_size(type(layer).__name__, _DGL_NAMES[name] if attribute == theirs else name, 0)


def check_numbers(layer: nn.Module, negative_slope: Any, dropout_p: Any) -> None:
    """Raise TypeError or ValueError where an option of the layer is not a number, or not a probability."""
    name = type(layer).__name__
    if not isinstance(negative_slope, numbers.Real):
        raise TypeError(f"{name}: negative_slope: expected a number, got {negative_slope!r}")
    if not isinstance(dropout_p, numbers.Real) or not 0 <= float(dropout_p) <= 1:
        option = "dropout" if "dropout" in layer.__dict__ else "attn_drop"
        kind = ValueError if isinstance(dropout_p, numbers.Real) else TypeError
        raise kind(f"{name}: {option}: expected a probability in [0, 1], got {dropout_p!r}")


def check_parameters(
    layer: nn.Module, heads: int, size: int, vectors: Sequence[Any], projections: Sequence[Any] = ()
) -> None:
    """Raise ValueError where a parameter of the layer has another shape than the layer's own: one of its
    attention vectors ``[1, H, D]``, its ``bias`` or the weight ``[H * D, F]`` of a linear module.

    A layer that runs as one operator need not call it: `fused.operator_call` excludes such parameters.
    """
    parameters = layer._parameters
    shapes: list[tuple[Any, str, tuple[int, ...]]] = [
        (x, _name_of(parameters, x), (1, heads, size)) for x in vectors
    ]
    for linear in projections:
        # A parametrized module, whose class is another, may draw random numbers when its weight is read.
        weight = linear.weight if type(linear) in LINEAR else None
        if isinstance(weight, Tensor) and not is_lazy(linear) and weight.dim() == 2:
            name = f"{_name_of(layer._modules, linear)}.weight"
            shapes.append((weight, name, (heads * size, weight.shape[1])))
    if parameters.get("bias") is not None:
        width = size if layer.__dict__.get("concat", True) is False else heads * size
        shapes.append((parameters["bias"], "bias", (width,)))
    for x, name, shape in shapes:
        if isinstance(x, Tensor) and tuple(x.shape) != shape:
            raise ValueError(
                f"{type(layer).__name__}: {name}: expected shape {list(shape)}, as the layer was made for "
                f"{heads} heads of {size} columns, got {list(x.shape)}; {_NEW_PARAMETER}"
            )


#: Layer -> the shapes that its parameters had when it was made, or put in place of a library's.
_made: weakref.WeakKeyDictionary[nn.Module, dict[str, list[int]]] = weakref.WeakKeyDictionary()


def remember_parameters(layer: nn.Module) -> None:
    """Keep the shapes of the layer's parameters for `blame_parameters`."""
    parameters = layer.named_parameters()
    _made[layer] = {name: list(x.shape) for name, x in parameters if not nn.parameter.is_lazy(x)}


def blame_parameters(layer: nn.Module, error: Exception, args: Any, kwargs: Any) -> None:
    """Raise ValueError, which names it, if a parameter has another shape than when the layer was made; and
    TypeError if the call does not fit the layer's forward.

    It is asked after a call has failed, often by an error of PyTorch's that does not know the parameter."""
    if isinstance(error, TypeError):
        forward = inspect.signature(layer.forward)
        wrong = wrong_call(type(layer).__name__, forward, args, kwargs, error)
        if wrong is not None:
            raise wrong from None
    made = _made.get(layer)
    if made is None or _NEW_PARAMETER in str(error) or isinstance(error, DGLError | NotImplementedError):
        return
    for name, x in layer.named_parameters():
        if not nn.parameter.is_lazy(x) and list(x.shape) != made.get(name, list(x.shape)):
            raise ValueError(
                f"{type(layer).__name__}: {name}: expected shape {made[name]}, as the layer was made with, "
                f"got {list(x.shape)}; {_NEW_PARAMETER}"
            ) from error


def flags_of(forward: Callable[..., Any]) -> list[tuple[int, str]]:
    """The arguments of a layer's forward that ask for more results: place behind self, and name."""
    names = list(inspect.signature(forward).parameters)[1:]
    return [(place, name) for place, name in enumerate(names) if name in _FLAGS]


_FLAGS = "get_attention", "return_attention", "return_attention_weights", "return_semantic_attention_weights"


def check_flags(layer: nn.Module, flags: list[tuple[int, str]], args: Any, kwargs: Any) -> None:
    """Raise TypeError where one of `flags_of` is no bool, integer (which the libraries take for one), or
    None."""
    for place, name in flags:
        asked = args[place] if len(args) > place else kwargs.get(name)
        if asked is not None and not isinstance(asked, int):
            raise no_bool(type(layer).__name__, name, asked)


def blaming(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, whose errors name a parameter that has got another shape."""
    flags = flags_of(forward)

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        check_flags(self, flags, args, kwargs)
        if internals.is_dynamo_recording():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except CALL_ERRORS as error:
            blame_parameters(self, error, args, kwargs)
            raise

    return call


#: The errors of a call that `blame_parameters` looks at.
CALL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
_NEW_PARAMETER = "give it a parameter of that shape, or make a layer of other sizes"


def _name_of(owned: Any, wanted: Any) -> str:
    return next((name for name, x in owned.items() if x is wanted), "a parameter")


def wrong_argument(
    layer: nn.Module | str, argument: str, expected: str, got: Any, kind: type[Exception] = ValueError
) -> Exception:
    """The error of an argument that is not as expected. layer: a layer, or its name."""
    where = layer if isinstance(layer, str) else type(layer).__name__
    return kind(f"{where}: {argument}: expected {expected}, got {got}")


#: What a layer that was made without edge_dim expects of edge_attr, and what it got, with what to do.
NO_EDGE_DIM = "None in a layer without edge_dim", "a tensor; make the layer with edge_dim=edge_attr.shape[1]"


def wrong_features(layer: nn.Module, name: str, x: Any, shapes: str) -> TypeError:
    """The error of features that are no floating-point tensor. shapes: the expected ones, in words."""
    where = f"{type(layer).__name__}: {name}: expected"
    if not isinstance(x, Tensor):
        return TypeError(f"{where} {no_tensor(name, x).replace('expected a tensor', f'a tensor {shapes}')}")
    where = f"{where} float32, float64, float16 or bfloat16, got {x.dtype}"
    if x.dtype in (torch.int32, torch.int64) and x.dim() == 2 and len(x) == 2:
        return TypeError(f"{where} {list(x.shape)}, which looks like an edge_index: are the two swapped?")
    return TypeError(f"{where}; convert it with {name}.float()")


def projected(layer: nn.Module, name: str, linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``, where x is the argument ``name`` of a layer: if it does not fit, the error names it."""
    check_fits(layer, name, linear, x)
    return linear(x)


def check_fits(layer: nn.Module, name: str, linear: nn.Module, x: Tensor) -> None:
    """Raise an error that names the argument where ``linear(x)`` would raise one that does not. A layer that
    runs as one autograd function need not call it: its conditions (`fused.operator_call`) exclude
    such x."""
    plain = None if torch.compiler.is_compiling() else plain_linear(linear)
    if plain is None:
        return
    check_takes(layer, name, plain[0], x)


def check_takes(layer: nn.Module, name: str, weight: Tensor, x: Tensor) -> None:
    """`check_fits`, given the weight ``[out, in]``, or ``[types, in, out]``, that x is multiplied with."""
    where = f"{type(layer).__name__}: {name}: expected"
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{where} {weight.shape[1]} features per row, as the layer was made for, got {x.shape[-1]} in "
            f"{list(x.shape)}; give it such features, or make a layer for {x.shape[-1]}"
        )
    if x.device != weight.device:
        raise ValueError(f"{where} device {weight.device}, where the layer's parameters are, got {x.device}")
    if x.dtype != weight.dtype and not in_autocast(x):
        raise TypeError(
            f"{where} {weight.dtype}, as the layer's parameters, got {x.dtype}; convert one of them, with "
            f"{name}.to({weight.dtype}) or layer.to({x.dtype})"
        )
