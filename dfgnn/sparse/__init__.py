"""The sparse structure of a graph: which edges each node has. How kernels divide the work is in ``plan``.

``csr``        makes compressed sparse rows from edges, and checks the edges
``degrees``    statistics of the degrees
``structure``  both directions of a graph, each made at its first use
``packed``     the same on the CPU as one tensor, which one operator makes
``fixed``      the same for a graph of fixed capacity, whose edges may change under CUDA graphs
``hops``       samples neighbours
"""
