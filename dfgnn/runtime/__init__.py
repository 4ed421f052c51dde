"""The compiled libraries, their operators by name, and the modes that torch runs in.

``library``    finds and loads the compiled libraries
``ops``        the operators and their fake kernels, ``arguments`` their arguments by name
``eager``      autograd functions of eager calls, ``compiling`` what is built aside of a compiler's tracing
``transforms`` tensors under torch.func
``batches``    sets of features on one graph, as heads
``timing``     the time of a call
``moved``      modules that have moved, by the names that they had
"""
