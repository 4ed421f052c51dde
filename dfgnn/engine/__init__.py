"""How an attention call is carried out, between the public functions and the operators.

``argument_checks``  what functions check of their arguments, ``given`` what they take for a graph
``paths``            the ways to carry out a call, in order of preference; eager calls that need no checks
``operators``        the only module that knows the order of the operators' arguments
``autograd``         attention with its gradients, ``sink`` a sink, ``second_order`` second derivatives
``layer``            whole layers, and other computations of several operations, as one autograd function
``plain``            attention in plain operations, for third derivatives, forward mode and ONNX
``edge_maps``        maps along the edges on every path: sampled products and weighted sums, rows of edges'
                     ends and sums of edges' rows; ``edge_terms`` products of edges' features with nodes' rows
``edge_projection``  terms of the edges in key and value, ``edge_arguments`` the arguments that give them
``edge_products``    scores that are products with edges' features, ``pair_scores`` GATv2's with such features
``flex``             scores written in Python
``by_index``         softmax and sums over groups of rows by an index, without a graph
``compiler_graph``     what stands for a graph while a compiler records, ``compiler_attention`` its attention,
                     ``compiler_cuda_graphs`` graphs that a CUDA graph of torch.compile sorts at every replay
"""
