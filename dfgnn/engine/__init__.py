"""How an attention call is carried out, between the public functions and the operators.

``checks``           what functions check of their arguments
``autograd``         the attention operators with their gradients, ``short`` calls without options
``plain``            attention in plain operations, for third derivatives, torch.func and forward mode
``products``         products over the edges without a softmax
``edge_projection``  terms of the edges in key and value, ``edge_arguments`` the arguments that give them,
                     ``edge_terms`` their products with rows of nodes, ``edge_rows`` rows of the edges' ends
``edge_products``    scores that are products with edges' features
``flex``             scores written in Python
``traced``           attention under a compiler, ``traced_graph`` what stands for the graph there,
                     ``recorded_graph`` graphs that a recorded CUDA graph sorts anew
"""
