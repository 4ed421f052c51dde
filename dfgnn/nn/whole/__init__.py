"""Fused layers: projections, score terms, attention, skip connection and bias as one autograd function
(`engine.node`).

``spec``         what a layer consists of, and that in plain operations
``eligible``     which layers are fused, and with which tensors
``attention``    GAT, GATv2 and dot products; their ``projections``
``gated``        a gate per channel
``typed``        edges of a few types
``traced``       what a compiler records of a layer
"""
