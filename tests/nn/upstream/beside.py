"""Compares layers of dfgnn with those of torch_geometric and DGL: the same parameters, inputs, gradients for
both.

A subject is a layer with what a test has to know of it: the options of its constructor, the edges that it
takes, and how inputs are made. The subjects are in of_pyg.py and of_dgl.py.
"""

import copy

import torch
from covering import EXHAUSTIVE, covering
from side_by_side import assert_same as assert_same
from side_by_side import matched, run
from side_by_side import pair as pair
from torch import Tensor

import dfgnn

BOTH = True, False
DTYPES = torch.float32, torch.float64
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def accelerated(theirs):
    ours = copy.deepcopy(theirs)
    report = dfgnn.accelerate(ours)
    assert report.replaced and not report.kept, report
    return ours


def compare(theirs, ours, *args, our_args=None, tolerance=None, **kwargs):
    """Both layers forward and backward on the same inputs; ours must take its own, fused path.

    In float64 they agree to 1e-10; in float32 ours is as close to float64 as theirs, or to 1e-5. Or both
    agree to a given tolerance. Relative to max(1, largest element).

    our_args: other positional arguments for ours, of the same meaning.
    """
    if hasattr(ours, "why_not"):
        assert ours.why_not(ours) is None
    expected = run(theirs, *args, **kwargs)
    actual = run(ours, *(args if our_args is None else our_args), **kwargs)
    dtype = dtype_of(theirs)
    if dtype == torch.float64 or tolerance is not None:
        assert_same(actual, expected, TOLERANCE[dtype] if tolerance is None else tolerance)
        return
    exact = _run_exact(theirs, *args, **kwargs)
    for name, got, other in matched(actual, expected):
        error, allowed = ((x - exact[name]).abs().max().item() for x in (got, other))
        assert error <= max(2 * allowed, TOLERANCE[dtype] * max(1.0, other.abs().max().item())), (
            name,
            error,
            allowed,
        )


def compare_low_precision(theirs, ours, *args, autocast=False, dtype=torch.bfloat16, **kwargs):
    """Both layers in ``dtype`` or under autocast to it: results of the same types, and nearly as exact.

    Errors are norm-wise against torch_geometric's layer in float64. Outputs may have twice the error of
    torch_geometric's in low precision, gradients three times (dfgnn's backward reads the rounded output,
    where torch_geometric may save float32), plus rounding.
    """
    exact = _run_exact(theirs, *args, **kwargs)
    if not autocast:
        theirs, ours, args = theirs.to(dtype), ours.to(dtype), _cast(args, dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        expected, actual = run(theirs, *args, **kwargs), run(ours, *args, **kwargs)
    eps = torch.finfo(dtype).eps
    for name, got, other in matched(actual, expected):
        want = exact[name]
        size = max(want.norm().item(), want.numel() ** 0.5)
        error, theirs_error = ((x.double() - want).norm().item() / size for x in (got, other))
        factor, rounding = (3, 8 * eps) if name.startswith("grad") else (2, eps)
        assert error <= factor * theirs_error + rounding, (name, error, theirs_error)


def _run_exact(layer, *args, **kwargs):
    dtype = dtype_of(layer)
    found = run(layer.double(), *_cast(args, torch.float64), **_cast(kwargs, torch.float64))
    layer.to(dtype)
    return found


def dtype_of(layer):
    return next(x.dtype for x in (*layer.parameters(), *layer.buffers()) if x.is_floating_point())


def _cast(value, dtype):
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(x, dtype) for x in value)
    if isinstance(value, dict):
        return {key: _cast(x, dtype) for key, x in value.items()}
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _flat(row):
    """The options of a row, with those that a dictionary among their values stands for."""
    found = {}
    for key, value in row.items():
        found |= value if isinstance(value, dict) else {key: value}
    return found


class Subject:
    """What layers of both libraries have in common; a subclass has the name of its layer."""

    args = 9, 5, 2  # of the constructor
    base = {}  # options of the constructor that are added in every case
    # Options of the constructor and their values; a value that is a dictionary stands for several options,
    # and "args" are positional arguments.
    options = {}
    of_forward = ()  # those among them that inputs are made with
    # Graphs in the forms in which the layer takes them: small ones, and those of which one case has to do.
    edges, once = (), ()
    lazy = ()  # (positional arguments, options) of layers that are completed by their first call
    asked = {}  # what forward is given to return its attention, too
    tolerance = None  # of float64, where it is not the usual one
    dropout = ()  # options of layers that drop attention
    copies = None  # gives two layers and a function that draws from one of them for 500 copies of a graph
    large = ()  # arguments of layers whose tensors [E, H, D] would be seen in the peak memory

    def __init__(self):
        self.name = type(self).__name__

    def rows(self):
        """Cases in which all pairs of values of two options occur, the edges and the dtype being options,
        too; in exhaustive tests also all triples of options."""
        rows = covering(**self.options, edges=self.edges, dtype=DTYPES, accelerated=BOTH)
        rows += [row | {"edges": edges} for row, edges in zip(rows, self.once)]
        if EXHAUSTIVE and len(self.options) > 2:
            rows += covering(3, **self.options, edges=self.edges[:1], dtype=DTYPES, accelerated=(False,))
        for row in rows:
            yield self.adjusted(_flat(row))

    def adjusted(self, row):
        """The row without options that exclude each other."""
        return row

    def constructors(self):
        """Positional arguments and options of layers that have each value of each option."""
        for row in covering(1, **self.options):
            row = self.adjusted(_flat(row))
            yield row.pop("args", self.args), {key: x for key, x in row.items() if key not in self.of_forward}

    def pair(self, *args, dtype=torch.float64, accelerate=False, **options):
        theirs, ours = pair(self.theirs, self.ours, *(args or self.args), dtype=dtype, **self.base | options)
        self.prepare(theirs)
        if accelerate:
            return theirs, accelerated(theirs)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def prepare(self, layer):
        """Gives new values to parameters whose initial values would hide an error."""

    def check(self, layers, inputs, ours=None, asked=True, tolerance=None):
        """Compares outputs and gradients, with the attention and without. ours: the same inputs in another
        form."""
        if tolerance is None and dtype_of(layers[0]) == torch.float64:
            tolerance = self.tolerance
        for keywords in ({}, self.asked) if asked and self.asked else ({},):
            compare(*layers, *inputs, our_args=ours, tolerance=tolerance, **keywords)

    def wrapped(self, layer):
        """A module whose outputs are all that the layer gives."""
        return layer
