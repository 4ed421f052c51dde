"""How an attention call is carried out, between the public functions and the operators.

``argument_checks``   what functions take for a graph and for the edges' terms, and what they check
``paths``             the ways to carry out a call, in order of preference; eager calls that need no checks
``operators``         the only module that knows the order of the operators' arguments
``autograd``          the autograd functions of attention, of whole layers, and of several operations as one
``plain``             what kernels do not compute: attention in plain operations, and sinks
``second_order``      the backward of attention's backward: an operator, and plain operations behind it
``edge_maps``         maps along the edges on every path: sampled products and weighted sums, rows of edges'
                      ends, sums of edges' rows, and products of edges' features with nodes' rows
``edge_projection``   dot attention with terms of the edges in key and value
``edge_scores``       scores written in Python, scores with edges' features, and GATv2's with such features
``by_index``          softmax and sums over groups of rows by an index, without a graph
``compiler_graph``    what stands for a graph while a compiler records; ``compiler_attention`` its attention
"""
