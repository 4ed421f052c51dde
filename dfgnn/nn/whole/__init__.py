"""What fused layers consist of, and those that are not the operator of `nn.fused`.

``spec``         what a layer consists of, and the layer in plain operations
``gated``        a gate per channel
``typed``        edges of a few types
``traced``       what a compiler records of a layer
"""
