"""The benchmark command, ``python -m dfgnn.bench`` (``--help`` lists the options).

It needs numpy besides torch, and scipy for ``.mtx`` files (the extra ``bench``).

``graphs`` reads graphs, ``twins`` makes synthetic ones and ``datasets`` loads those of other libraries;
``workloads`` makes inputs, ``attention`` contestants of them (``peers``: of other libraries), and ``compare``
times these in turns; ``yardsticks`` measures the baseline (*floor*), ``bounds`` counts bytes, ``accuracy``
computes in float64. ``records`` keeps the file of results and ``report`` prints them.
"""

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dfgnn.bench needs NumPy: pip install numpy (the extra 'bench' has all of it)"
    ) from error
