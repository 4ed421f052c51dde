"""Benchmark graphs that are not symmetric: those of a weather model, and a sampled mini-batch.

They get no self loops and no reverse edges. Every function returns (src, dst, sources, destinations), the
same graph at every call.

The weather model has the shape of Anemoi's: an icosahedron refined six times, with the edges of all
seven meshes on the nodes of the finest one (Lam et al., GraphCast, arXiv 2212.12794), a grid of 542,080
points (here on a Fibonacci spiral instead of a reduced Gaussian grid), an encoder with the grid points within
a radius of each mesh node, and a decoder with the three mesh nodes nearest to each grid point.
"""

import math

import numpy as np

_REFINEMENTS, _GRID, _ENCODER_EDGES = 6, 542_080, 1_090_000
_BATCH, _FANOUT = 1024, (15, 10, 5)


# ---- a weather model -------------------------------------------------------------------------------


def icosahedra(refinements: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [V, 3] of the finest mesh, and the undirected edges [E, 2] of all meshes."""
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    points = np.array([np.roll(corner, k) for k in range(3) for corner in corners], dtype=np.float64)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    near = np.isclose(apart, 2)
    faces = np.array(
        [
            (i, j, k)
            for i in range(12)
            for j in range(i)
            for k in range(j)
            if near[i, j] & near[j, k] & near[i, k]
        ]
    )
    points /= np.linalg.norm(points[0])
    meshes = []
    for level in range(refinements + 1):
        sides = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], axis=-1)
        edges, middle = np.unique(sides.reshape(-1, 2), axis=0, return_inverse=True)
        meshes.append(edges)
        if level == refinements:
            break
        middles = points[edges].sum(1)
        a, b, c = (len(points) + middle.reshape(-1, 3)).T
        points = np.concatenate([points, middles / np.linalg.norm(middles, axis=1, keepdims=True)])
        i, j, k = faces.T
        faces = np.concatenate([np.stack(f, 1) for f in ((i, a, c), (j, b, a), (k, c, b), (a, b, c))])
    return points, np.concatenate(meshes)


def spiral(count: int) -> np.ndarray:
    """Unit vectors [count, 3], evenly distributed over the sphere."""
    k = np.arange(count)
    z = 1 - (2 * k + 1) / count
    angle = math.pi * (3 - 5**0.5) * k
    r = np.sqrt(1 - z * z)
    return np.stack([r * np.cos(angle), r * np.sin(angle), z], 1)


def processor():
    points, edges = icosahedra(_REFINEMENTS)
    return np.r_[edges[:, 0], edges[:, 1]], np.r_[edges[:, 1], edges[:, 0]], len(points), len(points)


def encoder():
    from scipy.spatial import cKDTree

    mesh, grid = icosahedra(_REFINEMENTS)[0], spiral(_GRID)
    # A cap of angle t has the share (1 - cos t) / 2 = sin(t / 2)^2 of the sphere; its chord is 2 sin(t / 2).
    share = _ENCODER_EDGES / len(mesh) / len(grid)
    near = cKDTree(mesh).sparse_distance_matrix(cKDTree(grid), 2 * share**0.5, output_type="coo_matrix")
    return near.col, near.row, len(grid), len(mesh)


def decoder():
    from scipy.spatial import cKDTree

    mesh, grid = icosahedra(_REFINEMENTS)[0], spiral(_GRID)
    nearest = cKDTree(mesh).query(grid, k=3)[1]
    return nearest.reshape(-1), np.repeat(np.arange(len(grid)), 3), len(mesh), len(grid)


# ---- a sampled mini-batch --------------------------------------------------------------------------


def sampled(indptr: np.ndarray, indices: np.ndarray, seeds: int = _BATCH, fanout: tuple[int, ...] = _FANOUT):
    """The sample that a neighbour sampler draws for ``seeds`` random nodes: one set of nodes, in the order in
    which they were reached, and up to ``fanout[k]`` different in-edges of each that was reached in hop k. The
    nodes of the last hop have none (Hamilton et al., GraphSAGE, arXiv 1706.02216)."""
    random = np.random.default_rng(0)
    nodes = random.choice(len(indptr) - 1, min(seeds, len(indptr) - 1), replace=False)
    place = np.full(len(indptr) - 1, -1)
    place[nodes] = np.arange(len(nodes))
    frontier, src, dst, reached = nodes, [], [], len(nodes)
    for most in fanout:
        degree = indptr[frontier + 1] - indptr[frontier]
        row = np.repeat(np.arange(len(frontier)), degree)
        edge = np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree) + indptr[frontier][row]
        order = np.lexsort([random.random(len(row)), row])
        kept = np.sort(order[np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree) < most])
        neighbour = indices[edge[kept]]
        dst.append(place[frontier[row[kept]]])
        frontier = np.unique(neighbour[place[neighbour] < 0])
        place[frontier] = np.arange(reached, reached + len(frontier))
        reached += len(frontier)
        src.append(place[neighbour])
    return np.concatenate(src), np.concatenate(dst), reached, reached


_BLOCKS = {"mesh-processor": processor, "mesh-encoder": encoder, "mesh-decoder": decoder}
SAMPLED = "sampled:"
NAMES = tuple(_BLOCKS)


def make(name: str, csr):
    """(src, dst, sources, destinations) of the graph of that name, or None for any other.

    ``sampled:NAME`` is a mini-batch of another graph; csr(NAME) gives its (indptr, indices).
    """
    if name.startswith(SAMPLED):
        return sampled(*csr(name.removeprefix(SAMPLED)))
    return _BLOCKS[name]() if name in _BLOCKS else None
