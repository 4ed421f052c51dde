"""Run a script of yours with dfgnn's layers, unchanged: ``python -m dfgnn.run script.py arguments...``

While the script runs, the names of DGL's and torch_geometric's attention layers stand for dfgnn's
(:func:`dfgnn.patch`); so they do in the processes that it starts by multiprocessing. When it has ended, a
report goes to standard error: which layers were constructed as dfgnn's, which of these ran their library's
own code and why, which layers dfgnn does not have, where the script takes a softmax over edges itself, the
time, and the peak of memory. With ``--impl pyg`` or ``--impl dgl`` nothing is replaced and the report is the
same, for comparison: whatever ``--impl`` is, both libraries and dfgnn are imported before the clock starts.

The script sees what it sees under ``python script.py``: its arguments, ``sys.path``, ``__main__`` with an
absolute ``__file__``, which it stays up to the end of the process, tracebacks from its own first line on,
and the same exit status. It may also be a folder or a zip file with a ``__main__.py``, and with ``-m`` a
module.

With every ``--impl``, if the process sees one GPU, backward runs in the script's main thread
(``torch.autograd.set_multithreading_enabled(False)``), as PyTorch always does on the CPU: switching to
PyTorch's thread for the GPU and back takes longer than a small layer. ``--backward-thread`` leaves it in that
thread.

Modules of the script that hold message passing of their own are traced (:mod:`dfgnn.run.compiled`) where that
is faster, which their first call in training shows on copies; ``--as-written`` leaves them. With
``--compile`` they are compiled by ``torch.compile(backend="dfgnn")`` (:func:`dfgnn.compile`). The report says
which, and what became of their attention.

With ``--capture`` calls of the script's models that stay the same are replayed as CUDA graphs
(:mod:`dfgnn.run.captured`), with which no host has to keep pace.

With ``--as-dgl`` a script that was written for DGL runs without it: ``import dgl`` gives it
:mod:`dfgnn.compat` (:func:`dfgnn.compat.install_as_dgl`), also in processes that multiprocessing starts.

``command``    the command line, one run and the report on it
``program``    runs a script or module as ``__main__``, as the interpreter does
``layers``     counts the layers that are constructed meanwhile, also in processes that the script starts
``compiled``   traces or compiles modules with message passing of their own
``indexing``   takes rows of tensors by an index in them
``index_sums`` computes sums by an index in PyTorch's place
``captured``   replays calls of models: which are alike, by ``arguments``
``recorded``   a graph that PyTorch's compiler has recorded, and its CUDA graphs, ``call_graphs``
``gains``      measures what that and other lines would gain
``models``     finds the calls of a script's models
``sample``     repeats one call of a module on copies
``own``        finds attention that a script computes itself
"""
