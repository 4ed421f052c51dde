"""The options that attention functions share: each name, type, default, meaning and gradient, stated once.

A function of :mod:`dfgnn.functional` takes ``**options: Unpack[Options]`` or a class derived from it, which
type checkers read. `public` reads the same class: from it come the function's signature, the lines of its
documentation, and the error for a name that is not in it. The functions of :mod:`dfgnn.reference` take the
same class. To add an option is to add it to one of the classes, and to compute it.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import torch
from torch import Tensor

from . import torch_internals as internals
from .wrong_call import no_bool, says_calls, unknown_argument, wrong_call

# ---- arguments and results that are more than a tensor -----------------------------------------------------


class Projected(NamedTuple):
    """The projection ``weight @ attr[e] + bias`` of an edge's attributes, for an :class:`EdgeTerm`.

    attr: x [E, d], in the dtype of the other tensors and the order in which the graph's edges were given; of
    edges of T kinds it may be ``F.one_hot(kind, T)``.  weight: [H D, d], as that of a Linear layer ([H, d] in
    a term of the score).  bias: [H D] or None.
    """

    attr: Tensor
    weight: Tensor
    bias: Tensor | None = None


class EdgeTerm(NamedTuple):
    """What the edges themselves add to an attention, each a tensor, a :class:`Projected`, or None.

    key: added to the keys, [E, H, D], or [E, D] alike for all heads.  value: added to the values, likewise.
    ``EdgeTerm(e, e)`` adds e to both, as TransformerConv does.  score: [E, H], added to the terms of both
    ends in the score of :func:`~dfgnn.functional.gat_attention`.
    """

    key: Tensor | Projected | None = None
    value: Tensor | Projected | None = None
    score: Tensor | Projected | None = None


# A NamedTuple cannot define these itself.
for _cls in (Projected, EdgeTerm):
    _cls.__new__ = says_calls(_cls.__new__, _cls.__name__)  # type: ignore[method-assign, assignment]


class AttentionResult(NamedTuple):
    """What an attention function returns with ``return_attention=True``."""

    out: Tensor
    attention: Tensor  # [E, H], in the order in which the graph's edges were given


class EdgeProductResult(NamedTuple):
    """What :func:`~dfgnn.functional.edge_product_attention` returns where more than ``out`` is asked for."""

    out: Tensor
    edges: Tensor | None  # what ``return_edges`` names
    attention: Tensor | None


# ---- the options -------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """What is known of an option besides its name and type."""

    default: Any
    text: str  # its documentation, beginning with its shape
    gradient: bool = False  # whether attention is differentiable in it
    dims: int = 0  # dimensions of a tensor that may have one more for a batch


class _Dropout(TypedDict, total=False):
    dropout_p: Annotated[
        float,
        Option(
            0.0,
            "probability of dropping an attention weight. The mask is a function (Philox) of a seed, the "
            "edge and the head; it is never stored.",
        ),
    ]
    generator: Annotated[
        torch.Generator | Tensor | None,
        Option(
            None,
            "draws dropout's seed, on the device of the tensors; None: torch's own generator. Or the seed "
            "itself, int64 [1], for calls that drop the same weights.",
        ),
    ]


class Options(_Dropout, total=False):
    """Options of every attention function over a graph."""

    mask: Annotated[
        Tensor | None,
        Option(
            None,
            "bool [E] or [E, H], in the order in which the graph's edges were given; where it is False there "
            "is no edge. Its weight is 0, which makes NaN of a source's value that is not finite.",
            dims=2,
        ),
    ]
    weight: Annotated[
        Tensor | None,
        Option(
            None,
            "w [E] or [E, H], same order, in the values' dtype or float32; multiplies after the softmax and "
            "is not renormalised.",
            gradient=True,
            dims=2,
        ),
    ]
    kernel_options: Annotated[
        dict[str, Any] | None,
        Option(
            None,
            'a dict that changes how, not what is computed. "schedule": "auto", or a name of '
            '``dfgnn.plan.SCHEDULES``, which may carry bounds, as in "natural<=512 heads<=2" (see there).',
        ),
    ]


class _Sink(TypedDict, total=False):
    sink: Annotated[
        Tensor | None,
        Option(
            None,
            "[H], in the values' dtype or float32: one more score of every softmax, which brings no value "
            "and takes exp(sink) of its mass, so that the weights of a row add up to less than 1. "
            "A destination without edges still gets 0. With it the gradients of ``create_graph``, torch.func "
            "and forward mode are plain tensor operations. Not for graphs that several processes share.",
            gradient=True,
            dims=1,
        ),
    ]


class _Bias(TypedDict, total=False):
    bias: Annotated[
        Tensor | None,
        Option(
            None,
            "b [E, H], in the order in which the graph's edges were given, in the values' dtype or float32; "
            "added to the score before the softmax. -inf masks an edge.",
            gradient=True,
            dims=2,
        ),
    ]


class _Edge(TypedDict, total=False):
    edge: Annotated[
        EdgeTerm | None,
        Option(
            None, "what the edges add: an :class:`EdgeTerm`, whose tensors are in the edges' order.", True
        ),
    ]


class SinkOptions(_Sink, Options, total=False):
    """Options of functions whose score is given or the user's own."""


class BiasOptions(_Bias, Options, total=False):
    """Options of :func:`~dfgnn.functional.edge_product_attention`."""


class ScoreOptions(_Bias, _Sink, Options, total=False):
    """Options of functions that compute the score."""


class EdgeOptions(_Edge, _Bias, _Sink, Options, total=False):
    """Options of functions whose scores or values have terms of the edges."""


class BlockOptions(_Dropout, total=False):
    """Options of :func:`~dfgnn.functional.block_attention`."""

    key_bias: Annotated[
        Tensor | None,
        Option(
            None,
            "b [M], or [M, H] for a bias per head, in the values' dtype or float32: the logarithm of a "
            "cut-off, or -inf for a key that is not to be seen.",
            gradient=True,
        ),
    ]
    sink: Annotated[
        Tensor | None,
        Option(
            None,
            "[H], in the values' dtype or float32: one more score of every softmax, which brings no value "
            "and takes exp(sink) of its mass.",
            gradient=True,
        ),
    ]
    pair_bias: Annotated[
        Tensor | None,
        Option(
            None,
            "B [P, H], in the values' dtype or float32: of each pair, those of a block after the other, and "
            "within a block those of a query after the other.",
            gradient=True,
        ),
    ]
    softcap: Annotated[
        float | None,
        Option(None, "c > 0: c tanh(scale q . k / c) takes the place of the product; biases come behind."),
    ]


#: ``return_attention`` decides what a function returns, so that overloads name it and the classes do not.
RETURN_ATTENTION = Option(
    False,
    "return an :class:`AttentionResult`, with the weights w m softmax(s) as ``attention`` [E, H], in the "
    "values' dtype and the order of the edges.",
)
#: What only layers pass, to the functions behind the public ones: the layer's bias [H, D], which is added
#: within the operator, and a factor [E] or [E, H] of the terms of both ends in the score.
OF_LAYERS = "out_bias", "gate"


def table(options: type) -> dict[str, Option]:
    """Name -> what is known of the option."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


# ---- public functions --------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def public(options: type, more: tuple[str, ...] = (), taken: bool = False) -> Callable[[F], F]:
    """A decorator of a function that has ``**options: Unpack[options]``: it states the signature and, with
    ``{options}`` in its documentation, what they mean. more: names that only `inner` takes; or anyone,
    if they are `taken`, because a layer may be given the function in place of its own."""

    def decorate(function: F) -> F:
        known, name = table(options), function.__name__
        signature = _signature(function, options, known, more)
        names = frozenset((*signature.parameters, *(more if taken else ())))

        @functools.wraps(function)
        def call(*args, **kwargs):
            if not names.issuperset(kwargs):
                raise unknown_argument(name, next(x for x in kwargs if x not in names), sorted(names))
            asked = kwargs.get("return_attention")
            if asked is not None and type(asked) is not bool:
                raise no_bool(name, "return_attention", asked)
            if internals.is_dynamo_recording():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                given = {x: kwargs[x] for x in kwargs if x not in more}
                wrong = wrong_call(name, signature, args, given, error)
                if wrong is None:
                    raise
                raise wrong from None

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _document(function.__doc__, known)
        return call  # type: ignore[return-value]

    return decorate


def inner(function: Callable[..., Any]) -> Any:
    """The function as the library calls it: `public` without its look at names, with those of ``more``."""
    return function.__wrapped__  # type: ignore[attr-defined]


def _signature(
    function: Callable[..., Any], options: type, known: dict[str, Option], more: tuple[str, ...]
) -> inspect.Signature:
    """The function's signature, with each of its options by name."""
    own, types = inspect.signature(function), get_type_hints(options)
    parameters = [
        x
        for name, x in own.parameters.items()
        if x.kind is not inspect.Parameter.VAR_KEYWORD and name not in {*known, *more}
    ]
    if "return_attention" not in own.parameters:
        parameters.append(_keyword("return_attention", RETURN_ATTENTION.default, bool))
    for name, option in known.items():
        parameters.append(_keyword(name, option.default, types[name]))
    return own.replace(parameters=parameters)


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _document(text: str | None, known: dict[str, Option]) -> str | None:
    """The documentation, with a paragraph for each option in place of ``{options}``."""
    if text is None:  # python -OO
        return None
    lines = {**known, "return_attention": RETURN_ATTENTION}
    paragraphs = [
        textwrap.fill(f"{name}: {option.text}", 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, option in lines.items()
    ]
    return text.replace(" " * 8 + "{options}", "\n".join(paragraphs))
