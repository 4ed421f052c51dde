"""DGL's own tests of its names, with DGL and with dfgnn.compat in its place, for upstream_tests.py.

``python scripts/upstream_names.py dgl|dfgnn DIR OUT EXPRESSION`` runs the tests of a clone of dmlc/dgl in one
process and writes each case's outcome, and the names that it asked for and that dfgnn.compat does not
have. Names that are absent are placeholders here, so that a test file that imports one is collected all the
same; a test that touches one is not concerned.
"""

import importlib
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")

import numpy as np
import pytest
import torch

#: Folders and files of a clone that test the names of dfgnn.compat. Left out: data sets, which are
#: downloaded; shared memory, GPUs and the C interface.
TESTS = [
    "tests/python/common",
    "tests/python/pytorch/sparse",
    "tests/python/pytorch/nn/test_nn.py",
]
LEFT_OUT = ["data/test_data.py", "data/test_actor.py", "data/test_geom_gcn.py", "data/test_utils.py", "cuda"]
SECONDS = 20  # a test may take
# Texts of errors that say that an option, or a form of an argument, is not there.
_SAYS_ABSENT = ("in dfgnn", "dfgnn stands for DGL", "does not read DGL's own format", "expected one relation")
#: Tests that read attributes inside DGL's classes -> what.
INTERNAL = {"test_heterograph.py::test_frame": "Frame._columns"}


class AbsentName(Exception):
    """A test used a name of DGL's that dfgnn.compat does not have."""


def _too_long(*_):
    raise TimeoutError(f"a test took more than {SECONDS} seconds")


used: list[str] = []  # absent names that the running test has used


class Absent:
    """A placeholder for a name that is absent."""

    def __init__(self, name):
        self._name = name

    def _touched(self, *_, **__):
        used.append(self._name)
        raise AbsentName(self._name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    __call__ = __iter__ = __getitem__ = __enter__ = _touched


def hide_dgl():
    """dfgnn.compat for DGL, with placeholders for what it lacks, and the ``dgl.backend`` that tests use."""
    from dfgnn.compat import DGLGraph, as_dgl, sparse

    as_dgl.install_as_dgl(force=True)
    found = as_dgl._StandIn.__getattr__

    def attribute(self, name):
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") and name != "__all__":
                raise
            if f"{self.__name__}.{name}" == "dgl.rand_bipartite":
                return rand_bipartite
            if f"{self.__name__}.{name}" == "dgl.init":
                return importlib.import_module("dgl.init")
            return [] if name == "__all__" else Absent(f"{self.__name__}.{name}")

    as_dgl._StandIn.__getattr__ = attribute

    class Missing:
        """A finder of modules that dfgnn.compat does not have."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "dgl.backend" or name.startswith("dgl.") and name not in as_dgl.MODULES:
                return importlib.machinery.ModuleSpec(name, Missing, is_package=True)
            return None

        @staticmethod
        def create_module(spec):
            if spec.name == "dgl.backend":
                module = type(sys)(spec.name)
                vars(module).update(backend())
                return module
            as_dgl.MODULES.setdefault(spec.name, ())
            module = as_dgl._StandIn(spec.name)
            if spec.name == "dgl.init":
                module.zero_initializer = zero_initializer
            return module

        @staticmethod
        def exec_module(module):
            pass

    sys.meta_path.insert(0, Missing)
    # What tests ask of DGL's internals and old names, where dfgnn.compat has it in another form.
    DGLGraph.set_n_initializer = DGLGraph.set_e_initializer = _set_initializer
    DGLGraph._etype2canonical = property(lambda g: {name: _named(g, name) for name in g.etypes})
    for cls in (DGLGraph, sparse.SparseMatrix):
        cls.__getattr__ = _recording(cls.__getattr__, cls.__name__)


def rand_bipartite(utype, etype, vtype, num_src_nodes, num_dst_nodes, num_edges, **options):
    """The input that all of DGL's tests of ``dgl.ops`` make, which is not a name of dfgnn.compat."""
    from dfgnn.compat import heterograph

    ends = tuple(torch.randint(size, (num_edges,)) for size in (num_src_nodes, num_dst_nodes))
    return heterograph({(utype, etype, vtype): ends}, {utype: num_src_nodes, vtype: num_dst_nodes}, **options)


def zero_initializer(*_):
    """``dgl.init.zero_initializer``: zeros, the only ones of dfgnn.compat."""


def _set_initializer(self, initializer, *_, **__):
    if initializer is not zero_initializer:
        used.append("DGLGraph.set_n_initializer")
        raise AbsentName("DGLGraph.set_n_initializer")


def _named(g, name):
    found = [relation for relation in g.canonical_etypes if relation[1] == name]
    return found[0] if len(found) == 1 else ()


def _recording(lookup, owner):
    def attribute(self, name):
        if not name.startswith("__"):
            used.append(f"{owner}.{name}")
        return lookup(self, name)

    return attribute


def backend():
    """The functions of ``dgl.backend`` that DGL's tests use, on PyTorch's tensors."""

    def tensor(data, dtype=None):
        if isinstance(data, torch.Tensor):
            return data if dtype is None else data.to(dtype)
        return torch.as_tensor(data, dtype=dtype)

    def scatter_row(data, index, value):
        return data.index_copy(0, index.long(), value)

    def pad_packed_tensor(x, lengths, value, l_min=None):
        parts = torch.nn.utils.rnn.pad_sequence(x.split([int(n) for n in lengths]), True, value)
        return parts

    def attach_grad(x):
        if x.grad is not None:
            x.grad.zero_()
        return x.requires_grad_()

    class record_grad:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def backward(x, head=None):
        x.backward(head.reshape(x.shape) if head is not None and head.numel() == 1 else head)

    functions = {
        "tensor": tensor, "scatter_row": scatter_row, "pad_packed_tensor": pad_packed_tensor,
        "attach_grad": attach_grad, "record_grad": record_grad, "backward": backward,
        "backend_name": "pytorch", "get_preferred_backend": lambda: "pytorch",
        "cpu": lambda: torch.device("cpu"), "cuda": lambda: torch.device("cuda"),
        "data_type_dict": {name: getattr(torch, name) for name in ("float32", "float64", "int32", "int64")},
        "context": lambda x: x.device, "copy_to": lambda x, ctx, **_: x.to(ctx),
        "asnumpy": lambda x: x.detach().cpu().numpy(), "zerocopy_to_numpy": lambda x: x.detach().numpy(),
        "zerocopy_from_numpy": torch.as_tensor, "grad": lambda x: x.grad, "shape": lambda x: x.shape,
        "dtype": lambda x: x.dtype, "ndim": lambda x: x.dim(), "astype": lambda x, t: x.to(t),
        "as_scalar": lambda x: x.item(), "is_no_grad": lambda x: x.grad is None or not x.grad.any(),
        "cat": torch.cat, "stack": torch.stack, "split": torch.split,
        "repeat": lambda x, n, dim: x.repeat_interleave(n, dim),
        "sum": lambda x, dim, keepdims=False: x.sum(dim, keepdim=keepdims),
        "mean": lambda x, dim: x.mean(dim),
        "max": lambda x, dim: x.max(dim)[0], "min": lambda x, dim: x.min(dim)[0],
        "reduce_sum": lambda x: x.sum(),
        "gather_row": lambda x, i: x.index_select(0, i.long()), "boolean_mask": lambda x, m: x[m],
        "slice_axis": lambda x, axis, begin, end: x.narrow(axis, begin, end - begin),
        "narrow_row": lambda x, begin, end: x[begin:end],
        "unsqueeze": torch.unsqueeze, "squeeze": torch.squeeze,
        "reshape": torch.reshape, "swapaxes": torch.transpose,
        "nonzero_1d": lambda x: x.nonzero().squeeze(1).long(),
        "unique": torch.unique, "zeros": lambda s, t, c: torch.zeros(s, dtype=t, device=c),
        "zeros_like": torch.zeros_like, "ones": lambda s, t, c: torch.ones(s, dtype=t, device=c),
        "full_1d": lambda n, x, t, c: torch.full((n,), x, dtype=t, device=c), "full": None, "randn": None,
        "arange": lambda a, b, dtype=torch.int64, ctx=None: torch.arange(a, b, dtype=dtype, device=ctx),
        "uniform": lambda s, t, c, low, high: torch.empty(s, dtype=t, device=c).uniform_(low, high),
        "randint": lambda s, t, c, low, high: torch.randint(low, high, s, dtype=t, device=c),
        "softmax": torch.softmax, "equal": lambda x, y: x == y, "exp": torch.exp, "sqrt": torch.sqrt,
        "abs": torch.abs,
        "logical_not": torch.logical_not, "clone": torch.clone, "is_tensor": torch.is_tensor,
        "cumsum": torch.cumsum, "argsort": lambda x, dim, descending: x.argsort(dim, descending),
        "replace_inf_with_zero": lambda x: x.masked_fill(x.isinf(), 0), "to_backend_ctx": torch.device,
        "device_type": lambda x: torch.device(x).type, "is_pinned": lambda x: x.is_pinned(), "np": np,
    }  # fmt: skip
    types = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
    functions |= {name: getattr(torch, name) for name in types}
    for name in ("from_dgl_nd", "to_dgl_nd", "zerocopy_to_dlpack", "zerocopy_from_dlpack",
                 "zerocopy_to_dgl_ndarray",
                 "csrmm", "csrsum", "csrmask", "set_default_backend", "sparse_matrix"):  # fmt: skip
        functions[name] = Absent(f"dgl.backend.{name}")
    return functions


class Recorder:
    """A pytest plugin that writes down each case's outcome and the absent names that it used."""

    def __init__(self):
        self.outcomes, self.absent, self.texts = {}, {}, {}

    def pytest_runtest_setup(self, item):
        used.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is not None:
            text = f"{call.excinfo.typename}: {call.excinfo.value}"
            if any(said in text for said in _SAYS_ABSENT):
                used.append(str(call.excinfo.value).split(" in dfgnn")[0])
            used.extend(what for test, what in INTERNAL.items() if test in item.nodeid)
            self.texts[item.nodeid] = " ".join(text.split())[:300]  # a line of the report
        if self.outcomes.get(item.nodeid, "passed") == "passed":
            self.outcomes[item.nodeid] = report.outcome
        if used:
            self.absent.setdefault(item.nodeid, sorted(set(used)))
        return report

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid], self.texts[report.nodeid] = "error", str(report.longrepr)[-600:]
            self.absent[report.nodeid] = sorted(set(used)) if used else []


def main(layers, root, out, expression):
    root = Path(root)
    sys.path.insert(0, str(root / "tests"))
    if layers == "dfgnn":
        hide_dgl()
    recorder = Recorder()
    options = [
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(root),
        "-c",
        os.devnull,
        "--tb=no",
    ]
    options += ["--import-mode=importlib", "-W", "ignore", "--continue-on-collection-errors"]
    options += [f"--ignore={root / 'tests/python/common' / name}" for name in LEFT_OUT]
    paths = [str(root / path) for path in TESTS if (root / path).exists()]
    pytest.main([*options, "-k", expression, *paths], plugins=[recorder])
    found = {"outcomes": recorder.outcomes, "absent": recorder.absent, "texts": recorder.texts}
    Path(out).write_text(json.dumps(found))


class Names:
    """What the tests of a clone did with DGL and with dfgnn.compat."""

    def __init__(self, theirs, ours):
        self.absent, self.passed, self.failed, self.others = Counter(), [], {}, Counter()
        for case, outcome in ours["outcomes"].items():
            reference = "passed" if "/sparse/" in case else theirs["outcomes"].get(case, "not collected")
            if reference != "passed" or outcome == "skipped":
                self.others[f"{reference} with DGL" if reference != "passed" else "skipped"] += 1
            elif ours["absent"].get(case):
                self.others["asks for names that are absent"] += 1
                self.absent.update(ours["absent"][case])
            elif outcome == "passed":
                self.passed.append(case)
            else:
                self.failed[case] = ours["texts"].get(case, outcome)

    def summary(self):
        concerned = len(self.passed) + len(self.failed)
        lines = [f"names of dgl: {concerned} cases concerned, {len(self.passed)} passed"]
        lines += [f"    {case}: {text}" for case, text in self.failed.items()]
        lines += [f"  {n} cases not concerned: {why}" for why, n in self.others.most_common()]
        names = sorted(name for name in self.absent if name.replace(".", "").replace("_", "").isalnum())
        return "\n".join([*lines, f"  absent names: {', '.join(names)}"])


def run(root, expression):
    """The tests of a clone's names; raises FileNotFoundError and RuntimeError where they cannot run."""
    if not (root / TESTS[0]).is_dir():
        raise FileNotFoundError(f"--dgl-names: expected {root / TESTS[0]} in a clone of the repository")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in ("dgl", "dfgnn"):
            out = Path(folder) / f"{layers}.json"
            subprocess.run([sys.executable, __file__, layers, str(root), str(out), expression], check=False)
            if not out.is_file():
                raise RuntimeError(f"--dgl-names: expected tests that end, those with {layers} did not")
            found.append(json.loads(out.read_text()))
    if not found[1]["outcomes"]:
        raise RuntimeError("--dgl-names: expected tests that can be collected, found none")
    return Names(*found)


if __name__ == "__main__":
    main(*sys.argv[1:])
