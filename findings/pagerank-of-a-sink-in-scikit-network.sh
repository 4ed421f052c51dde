#!/usr/bin/env bash
# scikit-network 0.33.5: the PageRank of a node without outgoing edges is 0.356 with the default solver and 0.409 with
# "bicgstab"; it is 0.197 with "RH", in networkx 3.6.1, in igraph 1.0.0 and by the definition. 1,000 iterations, so that it is
# no early end. Source: both take the walker's restarts from one vector, in which a sink's own entry is raised from
# 0.15 / n to 1 / n: a sink does not hand its rank to all nodes but draws a share of everyone's. One of them scales each
# step to a sum of one, the other only the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scikit-network==0.33.5 scipy==1.17.1 numpy==2.4.6 networkx==3.6.1 igraph==1.0.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import igraph
import networkx
import numpy as np
import sknetwork
from scipy import sparse
from sknetwork.ranking import PageRank

edges = [(0, 1), (1, 2), (2, 0), (0, 3), (4, 0)]  # nothing leaves node 3
source, target = np.transpose(edges)
matrix = sparse.csr_matrix((np.ones(5), (source, target)), shape=(5, 5))
found = {s: PageRank(solver=s, n_iter=1000, tol=1e-9).fit_predict(matrix) for s in ("piteration", "bicgstab", "RH")}
ranks = networkx.pagerank(networkx.DiGraph(edges), tol=1e-12)
found["networkx"] = np.array([ranks[i] for i in range(5)])
found["igraph"] = np.array(igraph.Graph(edges, directed=True).pagerank())
transition = np.where(matrix.sum(1) > 0, matrix.toarray() / np.maximum(matrix.sum(1), 1), 1 / 5)
found["definition"] = np.linalg.solve(np.eye(5) - 0.85 * np.asarray(transition).T, np.full(5, 0.15 / 5))
print(sknetwork.__version__, PageRank().solver)
for name, value in found.items():
    print(f"{name:10} {np.round(value, 4)}")
assert PageRank().solver == "piteration"
for name in ("RH", "networkx", "igraph"):
    assert np.abs(found[name] - found["definition"]).max() < 1e-4
for name, rank in (("piteration", 0.3565), ("bicgstab", 0.4089), ("definition", 0.1965)):
    assert abs(found[name][3] - rank) < 1e-4
PYTHON
