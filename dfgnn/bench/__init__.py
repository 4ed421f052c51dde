"""The benchmark command, ``python -m dfgnn.bench`` (``--help`` lists the options).

It needs numpy beside torch, and scipy for ``.mtx`` files (the extra ``bench``).

``graphs`` reads graphs, ``twins`` makes synthetic ones and ``datasets`` loads those of other libraries;
``workloads`` makes inputs, ``measure`` times calls, ``yardsticks`` measures the baseline (*floor*),
``accuracy`` errors, ``peers`` other libraries, ``candidates`` plans that were not chosen; ``report`` shows
the results.
"""

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dfgnn.bench needs NumPy: pip install numpy (the extra 'bench' has all of it)"
    ) from error
