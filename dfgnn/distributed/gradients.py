"""Averages gradients over processes by one call, for data-parallel steps that are CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..runtime import torch_internals as internals
from ._watch import named


@torch.no_grad()
def average_gradients(model: nn.Module, group: Any = None) -> None:
    """∂L/∂θ <- mean over the processes of ∂L/∂θ, for all parameters θ that require gradients.

    It does in one call after backward what DistributedDataParallel does during it: one all-reduce for each
    dtype of parameters. It can be part of a CUDA graph, as ``before_step`` of `dfgnn.capture`:

    .. code-block:: python

        step = dfgnn.capture(loss_fn, model, optimizer, capacities=[(40_000, 90_000, 513)],
                             before_step=lambda: average_gradients(model))

    There, pass capacities that hold every batch: a capacity is captured when a batch first needs it, which
    must happen in all processes at the same step. All processes start from the same parameters (the same
    seed, or a broadcast) and run the same number of steps. A parameter without a gradient counts as 0, so
    that processes may use different parts of a model.

    group: of torch.distributed; None for all processes. Without a process group, nothing is done.

    Raises TypeError (model is no module).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"average_gradients: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    by_kind: dict[tuple, list[Tensor]] = {}
    for x in model.parameters():
        if x.requires_grad:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            by_kind.setdefault((x.dtype, x.device), []).append(x.grad)
    for grads in by_kind.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        with named(group):
            dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        pieces = flat.split([grad.numel() for grad in grads])
        internals.foreach_copy(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads)])
