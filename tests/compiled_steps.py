"""What tests of compiled layers share: a step of training, compared with the eager one, and a compiler that
tells which operators it gets."""

import torch
from every_layer import floats
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves, tree_map


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def step(call, layer, inputs):
    """The outputs, and the gradients of the inputs and of the layer's parameters."""
    inputs = tree_map(lambda x: x.clone().requires_grad_() if is_float(x) else x, inputs)
    outs = floats(call(*inputs))
    wanted = [x for x in (*tree_leaves(inputs), *layer.parameters()) if is_float(x) and x.requires_grad]
    loss = sum(out.sin().sum() for out in outs)
    return [*outs, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_same_step(compiled, layer, inputs):
    torch.testing.assert_close(*(step(call, layer, inputs) for call in (compiled, layer)))


def assert_same_under_autocast(compiled, layer, inputs, device):
    found = []
    for call in (compiled, layer):
        with torch.autocast(device, torch.bfloat16):
            out = call(*inputs)
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), layer.parameters())])
    for got, want in zip(*found):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.02 + 0.1 * want.abs().max().item())


def recording(found, partition=default_partition):
    """A compiler that collects the names of dfgnn's operators, forward and backward."""

    def compile(module, _):
        targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
        found.append([t.name().partition("::")[2] for t in targets if getattr(t, "namespace", "") == "dfgnn"])
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile, bw_compiler=compile, partition_fn=partition)
