#!/usr/bin/env bash
# rdkit 2026.9.1: the adjacency matrix of copper with two ammonia is symmetric; with bond orders (useBO=True) it is not: each
# bond stands in the row of the copper, and the row of a nitrogen is empty, so that in a product with it nothing of the metal
# reaches the ligands. Each order is 1 by GetBondTypeAsDouble, and the distance matrix with useBO=True is symmetric.
# Seen: row sums 1 2 1 without orders, 0 2 0 with them. Source: an entry is not the order of the bond but what the bond adds to
# the valence of the row's atom, and a dative bond adds nothing to its donor's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rdkit==2026.9.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import rdkit
from rdkit import Chem

molecule = Chem.MolFromSmiles("[NH3]->[Cu+2]<-[NH3]")
plain, orders = Chem.GetAdjacencyMatrix(molecule), Chem.GetAdjacencyMatrix(molecule, useBO=True)
distances = Chem.GetDistanceMatrix(molecule, useBO=True)
print(rdkit.__version__, plain.tolist(), orders.tolist(), distances.tolist())
assert np.array_equal(plain, plain.T) and np.array_equal(distances, distances.T)
assert plain.sum(1).tolist() == [1, 2, 1] and orders.sum(1).tolist() == [0, 2, 0]
assert [bond.GetBondTypeAsDouble() for bond in molecule.GetBonds()] == [1, 1]
single = Chem.GetAdjacencyMatrix(Chem.MolFromSmiles("C=CO"), useBO=True)
assert np.array_equal(single, single.T)
PYTHON
