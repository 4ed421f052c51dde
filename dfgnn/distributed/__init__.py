"""Full-graph attention over several processes, on torch.distributed.

Importing it sets the environment variable TORCH_NCCL_HIGH_PRIORITY to 1 unless it has a value.
"""

import os

# Process groups of NCCL read it when they are made. Without it an exchange that is started together with the
# attention over own sources often waits until that has left the GPU, and nothing travels meanwhile.
os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")

from ._watch import DeadRankError, watch
from .gradients import average_gradients
from .graph import DistributedGraph

__all__ = ["DeadRankError", "DistributedGraph", "average_gradients", "watch"]
