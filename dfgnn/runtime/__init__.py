"""The lowest package: compiled libraries and operators, PyTorch's modes, and small helpers of programs.

``library``    finds and loads the compiled libraries
``ops``        calls the operators; ``arguments`` names their arguments, ``fake_kernels`` knows their shapes
``eager``      tells whether a call is plain eager, and makes autograd functions cheap for such calls
``tracing``    tells plain tensors from traced ones, and suspends compilers, modes and torch.func
``rules``      one autograd function for all maps that know their own gradients
``batches``    folds a batch of features on one graph into its heads
``timing``     times a call; ``programs`` checks command-line arguments
``torch_internals``  every private name of PyTorch that dfgnn needs
"""
