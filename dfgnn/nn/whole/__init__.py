"""Fused layers: projections, score terms, attention, skip connection and bias as one autograd function
(`engine.node`).

``spec``         what a layer consists of, and the layer in plain operations
``eligible``     which layers are fused, and with which tensors
``attention``    GAT, GATv2 and dot products; ``projections`` their linear projections
``gated``        a gate per channel
``typed``        edges of a few types
``traced``       what a compiler records of a layer
``padding``      heads padded as CUDA's kernels need them
"""
