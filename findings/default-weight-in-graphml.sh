#!/usr/bin/env bash
# One GraphML file whose edges weigh 1.5 unless they say otherwise, and one edge that says 3: the other edge weighs 1.5 in
# igraph 1.0.0 and rustworkx 0.18.1, 1 in an adjacency matrix or a shortest path of networkx 3.6.1, and 0 in networkit 11.3.
# Source: networkx puts a key's default into graph.graph["edge_default"] and leaves the edge without the attribute, which its
# algorithms take for 1 (its reference shows how to fill it in by hand); networkit looks at the edge's own data alone, once
# a key for weights has made the graph weighted. Each of the four reads the file without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkx==3.6.1 igraph==1.0.0 rustworkx==0.18.1 networkit==11.3 numpy==2.4.6 scipy==1.17.1
cd "$folder"
cat >default.graphml <<'XML'
<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
  <key id="w" for="edge" attr.name="weight" attr.type="double"><default>1.5</default></key>
  <graph id="G" edgedefault="undirected">
    <node id="a"/><node id="b"/><node id="c"/>
    <edge source="a" target="b"><data key="w">3</data></edge>
    <edge source="b" target="c"/>
  </graph>
</graphml>
XML
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import igraph
import networkit
import networkx
import rustworkx

graph = networkx.read_graphml("default.graphml")
compared = networkit.readGraph("default.graphml", networkit.Format.GraphML)
(other,) = rustworkx.read_graphml("default.graphml")
found = {
    "networkx": networkx.to_numpy_array(graph)[[0, 1], [1, 2]].tolist(),
    "igraph": igraph.Graph.Read_GraphML("default.graphml").es["weight"],
    "rustworkx": [edge["weight"] for edge in other.edges()],
    "networkit": [weight for _, _, weight in compared.iterEdgesWeights()],
}
print(found, list(graph.edges(data=True)), graph.graph)
assert found["igraph"] == found["rustworkx"] == [3.0, 1.5]
assert found["networkx"] == [3.0, 1.0] and found["networkit"] == [3.0, 0.0]
assert networkx.shortest_path_length(graph, "a", "c", weight="weight") == 4.0
PYTHON
