#!/usr/bin/env bash
# networkit 11.3: the modularity of a directed graph in one community is 0.75 for any graph, and 0 in networkx 3.6.1, igraph
# 1.0.0 and by definition. Two arbitrary halves of a random graph have 0.217 for -0.158, so that a bad partition looks good.
# Source: the expected part is the squared volume of a community over 4 times the squared number of edges. A volume of an
# undirected graph counts each edge twice; of a directed graph it counts the outgoing ones, and the 4 is kept. PLM, PLP
# and ParallelLeiden, which find communities, refuse a directed graph; the measure takes it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkit==11.3 networkx==3.6.1 igraph==1.0.0 numpy==2.4.6 scipy==1.17.1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import igraph
import networkit
import networkx


def modularity(graph, classes):
    n, directed = len(classes), graph.is_directed()
    copy, partition = networkit.Graph(n, directed=directed), networkit.structures.Partition(n)
    partition.setUpperBound(max(classes) + 1)
    for edge in graph.edges:
        copy.addEdge(*edge)
    for node, name in enumerate(classes):
        partition.addToSubset(name, node)
    found = networkit.community.Modularity().getQuality(partition, copy)
    groups = [[i for i in range(n) if classes[i] == c] for c in set(classes)]
    other = igraph.Graph(n, list(graph.edges), directed=directed).modularity(classes, directed=directed)
    expected = networkx.community.modularity(graph, groups)
    assert abs(other - expected) < 1e-9
    return round(found, 3), round(expected, 3) + 0.0


graph = networkx.gnp_random_graph(12, 0.25, seed=1, directed=True)
found = [modularity(g, c) for g in (graph, graph.to_undirected()) for c in ([0] * 12, [0] * 6 + [1] * 6)]
print(networkit.__version__, found)
assert found[0] == (0.75, 0.0) and found[1] == (0.217, -0.158)
assert all(a == b for a, b in found[2:])  # the same graph without directions
assert modularity(networkx.complete_graph(5, networkx.DiGraph), [0] * 5) == (0.75, 0.0)
PYTHON
