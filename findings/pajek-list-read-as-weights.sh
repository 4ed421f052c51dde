#!/usr/bin/env bash
# networkx 3.6.1 and igraph 1.0.0, one Pajek file: a line "1 2 3 4" under "*Arcslist" is three arcs from 1, and networkx
# reads one arc with the weight 3. "*Edgeslist", the same without directions, is read in the same way.
# Seen: 2 arcs of a total weight of 8 in networkx, 6 arcs in igraph; then 2 edges of a total weight of 8, and 5 edges.
# Source: networkx looks only at how a section's name begins, so that a list passes for "*Arcs" or "*Edges", in whose lines
# the third number is a weight and what follows are pairs of attribute and value, of which an odd one is dropped.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkx==3.6.1 igraph==1.0.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import igraph
import networkx

vertices = "*Vertices 5\n" + "".join(f'{i} "{name}"\n' for i, name in enumerate("abcde", 1))
files = {"arcs.net": "*Arcslist\n1 2 3 4\n2 3 5 1\n", "edges.net": "*Edgeslist\n1 2 3 5\n2 4 5\n"}
found = {}
for name, section in files.items():
    with open(name, "w") as file:
        file.write(vertices + section)
    graph, other = networkx.read_pajek(name), igraph.Graph.Read_Pajek(name)
    found[name] = graph.number_of_edges(), graph.size(weight="weight"), other.ecount()
    print(name, list(graph.edges(data="weight")), other.get_edgelist())
print(networkx.__version__, igraph.__version__, found)
assert found["arcs.net"] == (2, 8.0, 6)
assert found["edges.net"] == (2, 8.0, 5)
PYTHON
