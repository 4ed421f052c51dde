"""dfgnn: attention GNN layers as one kernel per direction, on CPU and CUDA.

``Graph`` holds the edges, ``functional`` the attention functions, ``nn`` the layers with DGL's arguments, and
``reference`` the same functions in plain PyTorch.
"""

from dfgnn import functional, nn, reference
from dfgnn.graph import Graph

__version__ = "0.1.0"
__all__ = ["Graph", "functional", "nn", "reference"]
