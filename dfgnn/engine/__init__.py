"""How an attention call is carried out, between the public functions and the operators.

``checks``           what functions check of their arguments, ``unchecked`` eager calls that need no checks
``operators``        the operators, called by records and graphs
``paths``            the ways to carry out a call, in the order in which they are asked
``autograd``         attention with its gradients, ``sink`` a sink, ``second_order`` second derivatives
``plain``            attention in plain operations, for third derivatives, torch.func and forward mode
``edge_maps``        maps along the edges on every path; ``products`` sampled products and weighted sums
``edge_projection``  terms of the edges in key and value, ``edge_arguments`` the arguments that give them,
                     ``edge_terms`` their products with rows of nodes, ``edge_rows`` rows of the edges' ends
``edge_products``    scores that are products with edges' features
``flex``             scores written in Python
``traced``           attention under a compiler, ``traced_graph`` what stands for the graph there,
                     ``recorded_graph`` graphs that a recorded CUDA graph sorts anew
"""
