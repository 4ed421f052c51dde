#!/usr/bin/env bash
# networkit 11.3: the assortativity by degree of an undirected graph depends on how its nodes are numbered. Of the karate club
# it lies between -0.50 and -0.27 in 200 numberings, and is -0.476 in networkx 3.6.1 and igraph 1.0.0 in each; of a
# preferential attachment graph of 1,000 nodes it is 0.19 for -0.12; of a star it is NaN for -1.
# Source: the correlation of numbers takes each undirected edge once, as a pair of the larger and the smaller id, where the
# definition takes both directions. Of a star, all pairs then begin with leaves, whose degrees do not vary. For classes of
# nodes instead of numbers networkit counts both directions, and agrees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkit==11.3 networkx==3.6.1 igraph==1.0.0 numpy==2.4.6 scipy==1.17.1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import igraph
import networkit
import networkx
import numpy as np


def coefficients(graph, order):
    edges = [(int(order[a]), int(order[b])) for a, b in graph.edges]
    copy = networkit.Graph(len(order))
    for edge in edges:
        copy.addEdge(*edge)
    degrees = [float(copy.degree(i)) for i in range(len(order))]
    found = networkit.correlation.Assortativity(copy, degrees).run().getCoefficient()
    renumbered = networkx.Graph(edges)
    expected = networkx.degree_assortativity_coefficient(renumbered)
    assert abs(igraph.Graph(edges).assortativity_degree(directed=False) - expected) < 1e-9
    return found, expected


random = np.random.default_rng(0)
club = networkx.karate_club_graph()
found, expected = np.transpose([coefficients(club, random.permutation(34)) for _ in range(200)])
print(networkit.__version__, "karate club", found.min(), found.max(), expected.min(), expected.max())
assert found.min() < -0.45 and found.max() > -0.35 and np.ptp(expected) < 1e-9
found, expected = coefficients(networkx.barabasi_albert_graph(1000, 1, seed=0), range(1000))
print("preferential attachment", found, expected)
assert found > 0.15 and expected < -0.1
found, expected = coefficients(networkx.star_graph(4), range(5))
print("star", found, expected)
assert math.isnan(found) and abs(expected + 1) < 1e-9
PYTHON
