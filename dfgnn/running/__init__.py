"""What `python -m dfgnn.run` is made of.

``program``    a script or module as ``__main__``, as the interpreter runs it
``layers``     which layers are constructed meanwhile, in this process and those that it starts
``own``        attention that a script spells out itself
"""
