"""Random programs of DGL's API do the same with dfgnn.compat as with DGL itself."""

import os
import traceback
import warnings

import pytest
import torch
from covering import exhaustive
from dgl_programs import Program

import dfgnn.compat

dgl = pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")

#: How many programs the exhaustive tests run, and their first seed. It is fixed, so that a change is judged
#: by what it changed; programs that nobody has seen come with DFGNN_PROGRAMS_SEED. A test runs CHUNK of them:
#: ten thousand in one test would take longer than a test may.
COUNT = int(os.environ.get("DFGNN_PROGRAMS", "300"))
SEED = int(os.environ.get("DFGNN_PROGRAMS_SEED", "100"))
CHUNK = 300
STEPS = 5


def compare(seed):
    """Both libraries see the same in the program of this seed, up to a step that DGL itself fails in. Returns
    whether there was one."""
    dgls, own = Program(dgl, dgl.function, seed), Program(dfgnn.compat, dfgnn.compat.function, seed)
    failed = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dgls.run(STEPS)
        except (dgl.DGLError, IndexError) as error:
            failed = error
        assert failed is None or _raised_in_dgl(failed), f"seed {seed}: {failed!r}"
        own.run(STEPS if failed is None else dgls.done)
    seen = dgls.seen if failed is None else dgls.seen[: len(own.seen)]
    assert len(seen) == len(own.seen)
    for place, (right, found) in enumerate(zip(seen, own.seen)):
        step = next((x for x in seen[place::-1] if len(x) == 1), ("graph",))
        same(right, found, f"seed {seed}, after {step[0]!r}: ")
    return failed is not None


def _raised_in_dgl(error):
    """Whether DGL's own code raised an error, in a program of its API: there is no right value then."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.startswith((os.path.dirname(dgl.__file__), "dgl/"))  # the latter are its Cython modules


def same(right, found, where):
    if isinstance(right, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}expected a tensor, got {found!r}"
        torch.testing.assert_close(
            found, right, msg=lambda text: where + text, rtol=1e-9, atol=1e-12, equal_nan=True
        )
    elif isinstance(right, dict):
        assert list(right) == list(found), f"{where}expected {list(right)}, got {list(found)}"
        for name in right:
            same(right[name], found[name], f"{where}{name}: ")
    elif isinstance(right, list | tuple):
        assert len(right) == len(found), f"{where}expected {right!r}, got {found!r}"
        for a, b in zip(right, found):
            same(a, b, where)
    else:
        assert type(right) is type(found) and right == found, f"{where}expected {right!r}, got {found!r}"


@pytest.mark.parametrize("seed", range(60))
def test_programs(seed):
    compare(seed)


@exhaustive
@pytest.mark.parametrize("first", range(SEED, SEED + COUNT, CHUNK))
def test_more_programs(first):
    seeds = range(first, min(first + CHUNK, SEED + COUNT))
    print(f"seeds {seeds[0]} to {seeds[-1]}: DGL itself failed in {sum(map(compare, seeds))}", flush=True)
