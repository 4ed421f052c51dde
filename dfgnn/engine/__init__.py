"""How an attention call is carried out, between the public functions and the operators.

``checks``           what functions check of their arguments, ``unchecked`` eager calls that need no checks
``given``            what functions take for a graph
``inputs``           the record of a call, ``paths`` the ways to carry it out, in order of preference
``operators``        the only module that knows the order of the operators' arguments
``autograd``         attention with its gradients, ``sink`` a sink, ``second_order`` second derivatives
``node``             several operations as one autograd function: fused layers, attention with edge terms
``plain``            attention in plain operations, for third derivatives, forward mode and ONNX
``edge_maps``        maps along the edges (products, sums, gathered rows) on every path
``products``         such maps: sampled products and weighted sums, ``edge_rows`` rows of the edges' ends and
                     sums of edges' rows, ``edge_terms`` products of the edges' features with rows of nodes
``edge_projection``  terms of the edges in key and value, ``edge_arguments`` the arguments that give them
``edge_products``    scores that are products with edges' features, ``pair_scores`` GATv2's with such features
``flex``             scores written in Python
``by_index``         softmax and sums over groups of rows by an index, without a graph
``compiler_graph``     what stands for a graph while a compiler records, ``traced`` its attention,
                     ``compiler_cuda_graphs`` graphs that a CUDA graph of torch.compile sorts at every replay
"""
