#!/usr/bin/env bash
# ase 3.29.0, matscipy 1.3.1, vesin 0.6.2 and pymatgen 2026.10.24: edges of one atom in a cubic cell of 1 with a cutoff at
# which neighbours lie exactly. With 1: 0, 0, 0, 6 edges; the square root of 2: 6, 18, 18, 18; of 3: 18, 18, 18, 26; of 5: 32,
# 56, 56, 56. In a cell of 3, with three times the root of 2, ASE, matscipy and vesin have 18.
# Seen: the numbers above. Source: three take distances below the cutoff, computed in different orders, so that rounding
# decides; pymatgen adds a tolerance of 1e-8. vesin, too, gives uint64 ids, which torch does not take as an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ase==3.29.0 matscipy==1.3.1 vesin==0.6.2 pymatgen==2026.10.24 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import ase
import matscipy.neighbours
import vesin
from ase.neighborlist import neighbor_list
from pymatgen.core import Lattice, Structure


def edges(cell, cutoff):
    atoms = ase.Atoms("Po", cell=[cell] * 3, pbc=True)
    given = dict(points=atoms.positions, box=atoms.cell.array, periodic=True, quantities="i")
    ids = vesin.NeighborList(cutoff=cutoff, full_list=True).compute(**given)[0]
    assert ids.dtype == "uint64"
    crystal = Structure(Lattice.cubic(cell), ["Po"], [[0, 0, 0]])
    return (
        len(neighbor_list("i", atoms, cutoff)),
        len(matscipy.neighbours.neighbour_list("i", atoms, cutoff)),
        len(ids),
        len(crystal.get_neighbor_list(cutoff)[0]),
    )


found = {k: edges(1.0, k**0.5) for k in (1, 2, 3, 5)}
print(found, edges(3.0, 3 * 2**0.5))
assert found == {1: (0, 0, 0, 6), 2: (6, 18, 18, 18), 3: (18, 18, 18, 26), 5: (32, 56, 56, 56)}
assert edges(3.0, 3 * 2**0.5)[:3] == (18, 18, 18)
PYTHON
