"""The benchmark command, ``python -m dfgnn.bench`` (``--help`` lists the options).

Needs numpy beside torch, and scipy for ``.mtx`` files. ``measure`` times calls, ``workloads`` makes inputs,
``yardsticks`` gives the floor, ``oracle`` the errors, ``peers`` other libraries, ``report`` tables and JSON.
"""
