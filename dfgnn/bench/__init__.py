"""The benchmark command, ``python -m dfgnn.bench`` (``--help`` lists the options).

Needs numpy beside torch, scipy for ``.mtx`` files and matplotlib for pictures (the extra ``bench``).

``graphs`` reads graphs, ``twins`` makes synthetic ones and ``datasets`` asks other libraries for theirs;
``workloads`` makes inputs, ``measure`` times calls, ``yardsticks`` gives the floor, ``accuracy`` the errors,
``peers`` other libraries and ``candidates`` the plans that were not chosen; ``report`` and ``plots`` show it.
"""

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dfgnn.bench needs NumPy: pip install numpy (the extra 'bench' has all of it)"
    ) from error
