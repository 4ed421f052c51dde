"""Whole layers as one autograd function: projections, score terms, attention, skip connection and bias.

``pair``      layers of dot products and GATv2
``additive``  GAT, with attributes of edges too
``gated``     a gate per channel
``typed``     edges of a few types
``eligible``  when a layer is carried out as one function
``traced``    what a layer records under a compiler
"""
