"""Every public layer says what forward takes and gives, and its example runs and gives the shapes it says."""

import inspect
import re
import textwrap

import pytest
import torch

from dfgnn import nn as ours


def _layers():
    modules = [ours, ours.dgl]
    try:
        from dfgnn.nn import pyg

        modules.append(pyg)
    except ImportError:
        pass
    for module in modules:
        for name in module.__all__:
            cls = getattr(module, name)
            if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
                yield pytest.param(cls, id=f"{module.__name__}.{name}")


LAYERS = list(_layers())


@pytest.mark.parametrize("cls", LAYERS)
def test_forward_is_documented(cls):
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    assert owner.__module__.startswith("dfgnn."), "forward is another library's"
    doc = inspect.getdoc(vars(owner)["forward"]) or ""
    assert {"Args:", "Returns:", "Raises:"} <= set(doc.splitlines())
    arguments = doc.partition("Args:")[2].partition("Returns:")[0]
    for name in list(inspect.signature(owner.forward).parameters)[1:]:
        assert re.search(rf"^    (.*, )?{name}(, .*)?:", arguments, flags=re.MULTILINE), f"{name} is missing"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cls", LAYERS)
def test_the_example_runs_and_gives_the_shapes_that_it_says(cls):
    doc = inspect.getdoc(cls)
    code = textwrap.dedent(doc.partition("Example::\n\n")[2])
    assert code, "no example"
    assert max(map(len, code.splitlines())) <= 80
    names: dict = {}
    exec(code, names)
    said = re.findall(r"^([\w, ]+) = .*# (\[.*\])$", code, flags=re.MULTILINE)
    assert said, "the example says no shape"
    for targets, shapes in said:
        for target, shape in zip(targets.split(", "), re.findall(r"\[([^]]*)\]", shapes), strict=True):
            assert list(names[target].shape) == [int(n) for n in shape.split(", ")]
