"""dfgnn: attention GNN layers as one kernel per direction, on CPU and CUDA.

``Graph`` holds the edges, ``functional`` the attention functions, ``nn`` the layers with DGL's arguments,
``nn.pyg`` those with torch_geometric's, ``ops`` DGL's operators, ``sampling`` mini-batches, and
``reference`` the attention functions in plain PyTorch. ``accelerate`` and ``patch`` bring the layers into
code that was written for DGL or torch_geometric, ``convert_state_dict`` takes weights from one to the
other. ``profile`` says what a training step waits for, ``explain`` which path a call takes and why
not a faster one, and ``capture`` replays a step as a CUDA graph. ``compile`` is ``torch.compile``, with the
attention that a model's author wrote on our kernels.
"""

import sys

from . import functional, nn, reference
from .capturing import capture
from .compiling import compile
from .functional import ops
from .graph import Graph, sampling
from .runtime.torch_internals import tag_compiled_code
from .switch import accelerate, convert_state_dict, explain, patch, profile, restore

# For ``import dfgnn.ops`` and ``import dfgnn.sampling``, as DGL's modules are imported.
sys.modules |= {f"{__name__}.{module.__name__.rpartition('.')[2]}": module for module in (ops, sampling)}

__version__ = "0.1.0"
tag_compiled_code(f"dfgnn {__version__}")
del tag_compiled_code
__all__ = [
    "Graph",
    "accelerate",
    "capture",
    "compile",
    "convert_state_dict",
    "explain",
    "functional",
    "nn",
    "ops",
    "patch",
    "profile",
    "reference",
    "restore",
    "sampling",
]
