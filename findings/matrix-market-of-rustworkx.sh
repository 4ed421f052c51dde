#!/usr/bin/env bash
# rustworkx 0.18.1: a symmetric Matrix Market file that scipy has written has each of its edges twice when read, and no
# weights; in a file that rustworkx writes each weight is 1, a loop stands twice, and scipy refuses it for its banner in small
# letters. Seen: degrees 2 6 2 for 1 4 1, weights None; six ones for 2.5, 3 and 4, read again as a directed graph.
# Source: both ways go through a coordinate matrix, whose values are dropped on reading and are ones on writing. A symmetric
# file is first completed by its other half, and each entry is then an edge; the writer puts down both ends of every edge, a
# loop's too, and calls the result "general", by which the reader tells a directed graph.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rustworkx==0.18.1 scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import io

import numpy as np
import rustworkx
from scipy import io as scipy_io
from scipy import sparse

matrix = np.array([[0, 1.5, 0], [1.5, 2, 7], [0, 7, 0]])
scipy_io.mmwrite("symmetric.mtx", sparse.coo_array(matrix))
graph = rustworkx.read_matrix_market_file("symmetric.mtx")
degrees = [graph.degree(i) for i in range(3)]
print(rustworkx.__version__, type(graph).__name__, list(graph.weighted_edge_list()), degrees)
assert isinstance(graph, rustworkx.PyGraph) and graph.num_edges() == 5 and degrees == [2, 6, 2]
assert set(graph.edges()) == {None}
expected = rustworkx.PyGraph.from_adjacency_matrix(matrix)
assert expected.num_edges() == 3 and [expected.degree(i) for i in range(3)] == [1, 4, 1]

graph = rustworkx.PyGraph()
graph.add_nodes_from(range(4))
graph.add_edges_from([(0, 1, 2.5), (1, 2, 3.0), (2, 2, 4.0)])
text = rustworkx.write_matrix_market(graph)
again = rustworkx.read_matrix_market(text)
print(text.splitlines(), type(again).__name__, again.num_edges())
assert text.splitlines()[2] == "4 4 6" and {line.split()[2] for line in text.splitlines()[3:]} == {"1"}
assert text.count("3 3 1") == 2 and isinstance(again, rustworkx.PyDiGraph) and again.num_edges() == 6
try:
    scipy_io.mmread(io.StringIO(text))
except ValueError as error:
    print(error)
else:
    raise AssertionError
PYTHON
