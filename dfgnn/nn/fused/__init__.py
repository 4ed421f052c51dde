"""Fused layers: a whole layer, projections and attention, as one operator or one autograd function.

``operator_call``   makes an eager call of most layers one call of the operator ``layer``
``spec``            describes what a layer consists of, and computes it in plain operations
``gated``           the layer with a gate per channel, which has an autograd function of its own
``typed``           the layer with edges of a few types, which has one, too
``traced``          what a compiler records of a layer
"""
