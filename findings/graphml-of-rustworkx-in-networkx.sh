#!/usr/bin/env bash
# rustworkx 0.18.1 and networkx 3.6.1: a graph whose nodes have "x" and whose edges have "weight" is written to GraphML by
# rustworkx; in networkx the nodes then have "weight", with the values of x, and networkit 11.3 has 1 for each weight.
# igraph 1.0.0 reads it as it was meant. Where the types differ, as a name and a weight do, networkx raises ValueError.
# Source: rustworkx numbers the keys of nodes and of edges from d1 each, though a key's id is one for the whole file, and
# networkx keeps one table of keys by id, in which the last one wins.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rustworkx==0.18.1 networkx==3.6.1 igraph==1.0.0 networkit==11.3 numpy==2.4.6 scipy==1.17.1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import re

import igraph
import networkit
import networkx
import rustworkx


def written(nodes, name):
    graph = rustworkx.PyGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from([(0, 1, {"weight": 0.25}), (1, 2, {"weight": 0.75})])
    rustworkx.write_graphml(graph, name)


written([{"x": 1.5}, {"x": 2.5}, {"x": 3.5}], "positions.graphml")
with open("positions.graphml") as file:
    keys = re.findall(r"<key [^>]*>", file.read())
graph, other = networkx.read_graphml("positions.graphml"), igraph.Graph.Read_GraphML("positions.graphml")
third = networkit.readGraph("positions.graphml", networkit.Format.GraphML)
print(keys, graph.nodes(data=True), graph.edges(data=True), other.vs["x"], other.es["weight"], sep="\n")
assert len(keys) == 2 and all('id="d1"' in key for key in keys)
assert [data for _, data in graph.nodes(data=True)] == [{"weight": 1.5}, {"weight": 2.5}, {"weight": 3.5}]
assert other.vs["x"] == [1.5, 2.5, 3.5] and other.es["weight"] == [0.25, 0.75]
assert [weight for _, _, weight in third.iterEdgesWeights()] == [1.0, 1.0]
written([{"name": "a"}, {"name": "b"}, {"name": "c"}], "names.graphml")
try:
    networkx.read_graphml("names.graphml")
except ValueError as error:
    print(error)
else:
    raise AssertionError
PYTHON
