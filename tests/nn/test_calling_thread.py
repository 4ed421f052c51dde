"""Backward in the thread that calls for it (torch.autograd.set_multithreading_enabled), as the examples,
``dfgnn.run`` and ``dfgnn.profile`` have it: the same bits as in PyTorch's thread for the GPU, with all that
runs within backward. On the CPU both are one."""

import threading

import pytest
import torch
from covering import covered
from torch.utils.checkpoint import checkpoint

import dfgnn

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
from dfgnn.nn import pyg

LAYERS = ["GATConv", "GATv2Conv", "TransformerConv", "AGNNConv"]


def model_and_data(name, device):
    torch.manual_seed(0)
    make = getattr(pyg, name)
    layers = [make(), make()] if name == "AGNNConv" else [make(16, 4, heads=4), make(16, 4, heads=4)]
    model = torch.nn.Sequential(*layers).to(device)
    x = torch.randn(60, 16, device=device, requires_grad=True)
    return model, x, torch.randint(60, (2, 300), device=device)


def plain(model, x, edge_index):
    for layer in model:
        x = torch.nn.functional.elu(layer(x, edge_index))
    return x


def with_checkpoints(reentrant):
    def forward(model, x, edge_index):
        for layer in model:
            x = checkpoint(layer, x, edge_index, use_reentrant=reentrant)
        return x

    return forward


def under_autocast(model, x, edge_index):
    with torch.autocast(x.device.type, torch.bfloat16):
        return plain(model, x, edge_index)


def with_inner_gradient(model, x, edge_index):
    """A gradient penalty: backward of backward."""
    out = plain(model, x, edge_index)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out + grad


def compiled(model, x, edge_index):
    return torch.compile(plain, backend="aot_eager")(model, x, edge_index)


FORWARDS = {
    "plain": plain,
    "reentrant checkpoints": with_checkpoints(True),
    "checkpoints": with_checkpoints(False),
    "autocast": under_autocast,
    "double backward": with_inner_gradient,
    "compiled": compiled,
}


def gradients(forward, model, x, edge_index):
    model.zero_grad()
    x.grad = None
    forward(model, x, edge_index).float().square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@covered(1, name=LAYERS, how=list(FORWARDS))
def test_same_bits(name, how, device):
    found = model_and_data(name, device)
    # In second derivatives on a GPU some of PyTorch's kernels sum in any order: results are only close there.
    # A gradient that is zero but for rounding, as that of the keys' bias, is compared on the scale of the
    # others.
    exact = how != "double backward" or device == "cpu"
    want = gradients(FORWARDS[how], *found)
    with torch.autograd.set_multithreading_enabled(False):
        got = gradients(FORWARDS[how], *found)
    largest = max(b.norm() for b in want)
    for a, b in zip(got, want):
        assert torch.equal(a, b) if exact else (a - b).norm() <= 1e-4 * b.norm() + 1e-6 * largest


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_run_in_that_thread(name, device):
    """Hooks of tensors, modules and saved tensors run in the calling thread; by default, on a GPU, they run
    in PyTorch's thread for that GPU."""
    model, x, edge_index = model_and_data(name, device)
    threads = []

    def seen(*args):
        threads.append(threading.get_ident())

    model[0].register_full_backward_hook(seen)

    def unpack(x):
        seen()
        return x

    def step():
        threads.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = plain(model, x, edge_index)
            out.register_hook(seen)
        out.sum().backward()
        return set(threads)

    with torch.autograd.set_multithreading_enabled(False):
        assert step() == {threading.get_ident()} and len(threads) > 2
    if device == "cuda":
        assert threading.get_ident() not in step()


def test_capture(device):
    """A CUDA graph that was recorded so gives what eager steps give; on the CPU they are eager."""
    from torch_geometric.data import Data

    def losses(in_calling_thread):
        model, x, edge_index = model_and_data("TransformerConv", device)
        optimizer = torch.optim.Adam(model.parameters(), capturable=device == "cuda")
        with torch.autograd.set_multithreading_enabled(not in_calling_thread):
            step = dfgnn.capture(
                lambda batch: plain(model, batch.x, batch.edge_index).square().mean(), model, optimizer
            )
            data = Data(x=x.detach(), edge_index=edge_index)
            return [float(step(data)) for _ in range(5)]

    assert losses(True) == losses(False)
