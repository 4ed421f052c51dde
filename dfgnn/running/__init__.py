"""The parts of `python -m dfgnn.run`.

``program``    runs a script or module as ``__main__``, as the interpreter does
``layers``     counts the layers that are constructed meanwhile, also in processes that the script starts
``own``        finds attention that a script computes itself
"""
