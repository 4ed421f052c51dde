#!/usr/bin/env bash
# usearch 2.26.6: of 1,000 vectors of 64 bytes (NumPy's uint8), an exact search finds of the 5 nearest neighbours only the
# vector itself, with distances of about 20 where the true ones are 460,000 and more; a cast to float32 makes all 5 right.
# With dtype="f32" for the index it is the same. Source: NumPy has no type of bits, so that the Python layer takes uint8 for
# packed bits: a vector of 64 is read as the bits of its first 8 bytes, each a 0 or a 1, and the rest is left out.
# Where there are fewer vectors than neighbours asked for, the missing ones have the id 0 and a distance of NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check usearch==2.26.6 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import usearch
from usearch.index import Index

vectors = np.random.default_rng(0).integers(0, 256, (1000, 64)).astype(np.uint8)
squares = ((vectors[:50, None].astype(float) - vectors[None]) ** 2).sum(-1)
expected = np.argsort(squares, axis=1)[:, :5]


def search(data, **options):
    index = Index(ndim=64, metric="l2sq", **options)
    index.add(np.arange(1000), data)
    found = index.search(data[:50], 5, exact=True)
    return (found.keys == expected).mean(), found.distances[0], np.asarray(index.get(0))


print(usearch.__version__, "expected", np.sort(squares)[0, :5])
for data, options in ((vectors, {}), (vectors, {"dtype": "f32"}), (vectors.astype(np.float32), {"dtype": "f32"})):
    right, distances, stored = search(data, **options)
    print(data.dtype, options, f"{right:.0%} right", distances, stored[:8], data[0, :8])
    if data.dtype == np.uint8:
        assert right < 0.25 and distances.max() < 64
        assert np.array_equal(stored, np.unpackbits(data[0, :8]))
    else:
        assert right == 1 and distances[1] > 4e5 and np.array_equal(stored, data[0])
few = Index(ndim=3, metric="l2sq", dtype="f32")
few.add(np.array([7, 8, 9]), np.eye(3, dtype=np.float32))
found = few.search(np.eye(3, dtype=np.float32), 5)
print(found.keys.tolist(), found.distances[0], found.counts)
assert (found.keys[:, 3:] == 0).all() and np.isnan(found.distances[:, 3:]).all() and (found.counts == 3).all()
PYTHON
