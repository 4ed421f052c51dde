"""The structure of a graph, without plans.

``csr``        compressed sparse rows from edges
``structure``  both directions of a graph, derived at the first use
``fixed``      the same for a graph of fixed capacity
``hops``       drawing neighbours
"""
