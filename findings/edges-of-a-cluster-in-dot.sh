#!/usr/bin/env bash
# networkx 3.6.1 with pydot 4.0.1: of a DOT file with 5 edges, 3 of them within "subgraph cluster_train", read_dot has 2, and
# of 6 nodes 4; the way from the first node to the last is gone. pydot itself has all of them, and without the braces of the
# cluster networkx has them too. In DOT a subgraph is a way to draw and to set defaults; its edges are edges of the graph.
# Source: networkx goes through the nodes and edges that pydot lists for the outermost graph, and pydot keeps those of a
# subgraph in the subgraph's own lists. Nodes named in outer edges as well are there, but without what the cluster says of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkx==3.6.1 pydot==4.0.1
cd "$folder"
cat >graph.dot <<'DOT'
digraph G {
  start -> load;
  subgraph cluster_train {
    step [cost=7];
    load -> forward [weight=5]; forward -> backward; backward -> step;
  }
  step -> done;
}
DOT
sed 's/subgraph cluster_train {//; s/^  }$//' graph.dot >flat.dot
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import networkx
import pydot

graph, flat = networkx.nx_pydot.read_dot("graph.dot"), networkx.nx_pydot.read_dot("flat.dot")
(parsed,) = pydot.graph_from_dot_file("graph.dot")
(cluster,) = parsed.get_subgraphs()
print(networkx.__version__, pydot.__version__, list(graph.edges), dict(graph.nodes), list(flat.edges), sep="\n")
assert sorted(graph.edges()) == [("start", "load"), ("step", "done")] and graph.number_of_nodes() == 4
assert flat.number_of_edges() == 5 and flat.number_of_nodes() == 6
assert len(parsed.get_edges()) == 2 and len(cluster.get_edges()) == 3
assert not networkx.has_path(graph, "start", "done") and networkx.has_path(flat, "start", "done")
assert graph.nodes["step"] == {} and flat.nodes["step"] == {"cost": "7"}
PYTHON
