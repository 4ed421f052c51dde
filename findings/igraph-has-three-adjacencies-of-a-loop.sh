#!/usr/bin/env bash
# igraph 1.0.0, undirected graph with the edges 0-0 and 0-1: the entry of the loop is 2 in get_adjacency(), 1 in
# get_adjacency_sparse(), and its weight, once, in get_adjacency(attribute=...). Graph.Adjacency reads a 2 as two loops, so
# that a graph that goes through its own dense matrix has twice as many; through the sparse one it stays as it is.
# Seen: 2 1 5.0, then 2 loops and 1. Source: the dense one counts both ends of a loop, the Python layer makes the sparse one
# of the list of edges and mirrors what is not on the diagonal, and the reader takes each entry as a number of edges.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check igraph==1.0.0 scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import igraph

graph = igraph.Graph([(0, 0), (0, 1)])
graph.es["weight"] = [5.0, 3.0]
dense, sparse = graph.get_adjacency().data, graph.get_adjacency_sparse()
weighted = graph.get_adjacency(attribute="weight").data
print(igraph.__version__, dense, sparse.toarray().tolist(), weighted)
assert dense[0][0] == 2 and sparse[0, 0] == 1 and weighted[0][0] == 5
loops = [sum(igraph.Graph.Adjacency(m, mode="undirected").is_loop()) for m in (dense, sparse)]
print(loops)
assert loops == [2, 1]
PYTHON
