"""Divides a graph into parts, one file each, which DistributedGraph.from_partition reads.

    python -m dfgnn.distributed.partition edges.npy parts/ --parts 4 --num-nodes 2449029
    python -m dfgnn.distributed.partition edges.npy parts/ --parts 4 --method metis --nodes x=features.npy

edges.npy: int32 or int64 [2, E], sources and destinations. It is mapped, read piece by piece and sorted into
the parts' files, so that "contiguous" needs memory for the nodes and one part only; "metis" needs it for the
whole graph. ``--nodes NAME=FILE`` divides an array [num_nodes, ...] along with its nodes (``load_nodes``).

The folder gets ``part-<number>.pt`` and ``<name>-<number>.npy``. Prints one line of JSON: how many nodes,
edges and halo sources the parts have, and the share of edges between parts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.programs import Parser, existing_file, folder_to_write, integer, positive, wrong
from ..sparse import csr as _csr
from . import parts
from .parts import Nodes, Part, Places

_PIECE = 2**23  # edges read at a time
_VERSION = 1


def write(
    edge_index: Any,
    folder: str | Path,
    count: int,
    num_nodes: int,
    method: str | Tensor = "contiguous",
    nodes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Divides a square graph as the module's docstring says. Returns what the program prints.

    edge_index: int32 or int64 [2, E], a NumPy array (usually mapped from a file) or a tensor.  method:
    "contiguous", "metis", or int [num_nodes] with each node's part.  nodes: arrays [num_nodes, ...] by name.

    Raises ValueError (shape, ids out of range, unknown method), TypeError (not integers) and FileExistsError
    (the folder is not empty).
    """
    import numpy as np

    where = "partition.write"
    if len(edge_index.shape) != 2 or edge_index.shape[0] != 2:
        way = "; transpose it with edge_index.T" if tuple(edge_index.shape[1:]) == (2,) else ""
        raise ValueError(f"{where}: edge_index: expected shape [2, E], got {list(edge_index.shape)}{way}")
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{where}: folder: expected an empty one, got {folder}")
    if count < 1:
        raise ValueError(f"{where}: count: expected at least 1 part, got {count}")
    for name, array in (nodes or {}).items():
        shape = getattr(array, "shape", ())
        if not shape or shape[0] != num_nodes:
            got = shape[0] if shape else type(array).__name__
            raise ValueError(f"{where}: nodes: expected {num_nodes} rows of {name!r}, got {got}")
    num_edges = edge_index.shape[1]

    def pieces():
        for begin in range(0, num_edges, _PIECE):
            piece = edge_index[:, begin : begin + _PIECE]
            piece = piece if isinstance(piece, Tensor) else torch.from_numpy(np.array(piece))
            yield begin, _csr.as_index(where, "edge_index", piece, (2, None)).to(torch.int64)

    degrees = torch.zeros(num_nodes, dtype=torch.int64)
    for _, piece in pieces():
        if not 0 <= int(piece.min()) <= int(piece.max()) < num_nodes:
            got = f"{int(piece.min())} .. {int(piece.max())}"
            raise ValueError(f"{where}: edge_index: expected ids in 0 .. {num_nodes - 1}, got {got}")
        degrees += _csr.count(piece[1], num_nodes)
    if isinstance(method, str) and method == "contiguous":
        owner = parts.contiguous(degrees, count)
    else:
        whole = edge_index if isinstance(edge_index, Tensor) else torch.from_numpy(np.array(edge_index))
        owner, _ = parts.owners(where, method, whole, num_nodes, num_nodes, True, count)
    places = parts.places(owner, count)

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = [Path(scratch) / str(number) for number in range(count)]
        fingerprint = parts.print_of(_divide(pieces(), owner, files), places, places)
        halos = []
        for number, file in enumerate(files):
            rows = torch.from_numpy(np.fromfile(file, np.int64)).view(-1, 3)
            halos.append(_save(folder, _part(number, rows, places, num_edges, fingerprint)))
    for name, array in (nodes or {}).items():
        for number in range(count):
            ids = places.part(number).ids.numpy()
            np.save(folder / f"{name}-{number}.npy", np.asarray(array[ids]))
    between = sum(halo["edges_from_halo"] for halo in halos)
    return {
        "nodes": num_nodes,
        "edges": num_edges,
        "edges_between_parts": between / max(num_edges, 1),
        "parts": halos,
    }


def _divide(pieces: Iterable[tuple[int, Tensor]], owner: Tensor, files: list[Path]) -> int:
    """Writes (source, destination, number) of each edge to the file of its destination's part; returns the
    fingerprint of all edges."""
    fingerprint = 0
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open(file, "wb")) for file in files]
        for begin, (src, dst) in pieces:
            fingerprint += parts.fingerprint_of(src, dst, begin)
            to = owner[dst]
            order = torch.argsort(to, stable=True)
            rows = torch.stack([src, dst, torch.arange(begin, begin + len(src))], 1)[order]
            for file, mine in zip(opened, rows.split(torch.bincount(to, minlength=len(files)).tolist())):
                mine.numpy().tofile(file)
    return fingerprint


def _part(number: int, rows: Tensor, places: Places, num_edges: int, fingerprint: int) -> Part:
    src, dst, ids = rows.unbind(1)
    nodes = places.part(number)
    return Part(
        number, nodes, nodes, places.place[src], places.place[dst] - nodes.offsets[number], ids.clone(),
        num_edges, fingerprint,
    )  # fmt: skip


def _save(folder: Path, part: Part) -> dict[str, int]:
    first, end = part.dst_nodes.offsets[part.number : part.number + 2]
    from_halo = (part.src < first) | (part.src >= end)
    torch.save(
        {
            "version": _VERSION,
            "number": part.number,
            "ids": part.dst_nodes.ids,
            "offsets": part.dst_nodes.offsets,
            "src": part.src,
            "dst": part.dst,
            "edge_ids": part.edge_ids,
            "num_edges": part.num_edges,
            "fingerprint": part.fingerprint,
        },
        folder / f"part-{part.number}.pt",
    )
    return {
        "nodes": end - first,
        "edges": len(part.dst),
        "edges_from_halo": int(from_halo.sum()),
        "halo": len(part.src[from_halo].unique()),
    }


def load(folder: str | Path, number: int, count: int, device: torch.device | str = "cpu") -> Part:
    """One part that `write` wrote, for one of ``count`` processes.

    Raises FileNotFoundError (no such file) and ValueError (a file of another kind, a damaged one, or one of a
    graph with another number of parts).
    """
    path = Path(folder) / f"part-{number}.pt"
    if not path.is_file():
        raise FileNotFoundError(f"from_partition: folder: expected a file {path}, which is not there")
    data = _read(path)
    if data["version"] != _VERSION:
        raise ValueError(
            f"from_partition: {path}: expected version {_VERSION} of the format, got {data['version']!r}"
        )
    for name, kind in _FIELDS.items():
        if type(data.get(name)) is not kind:
            got = type(data[name]).__name__ if name in data else "nothing"
            raise _damaged(path, name, f"a {kind.__name__}", got)
    if len(data["offsets"]) - 1 != count:
        raise ValueError(
            f"from_partition: {path}: expected a graph in {count} parts, one per process, got one in "
            f"{len(data['offsets']) - 1}"
        )
    _check(path, data, number)
    nodes = Nodes(data["ids"].to(device), data["offsets"])
    src, dst, edge_ids = (data[name].to(device, copy=True) for name in ("src", "dst", "edge_ids"))
    return Part(data["number"], nodes, nodes, src, dst, edge_ids, data["num_edges"], data["fingerprint"])


_FIELDS = {
    "number": int, "ids": Tensor, "offsets": list, "src": Tensor, "dst": Tensor, "edge_ids": Tensor,
    "num_edges": int, "fingerprint": int,
}  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    """A part's dictionary, after comparing the file's checksums, which torch.load does not do."""
    open(path, "rb").close()  # raises an OSError with the reason if it cannot be read
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is another")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or "version" not in content:
            raise TypeError(f"it holds a {type(content).__name__}")
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"from_partition: {path}: expected a file of python -m dfgnn.distributed.partition, got one that "
            f"cannot be read: {str(error).partition(chr(10))[0]}"
        ) from error
    return content


def _check(path: Path, content: dict[str, Any], number: int) -> None:
    """Raises ValueError for inconsistent contents, with which a kernel would read beyond its tensors."""
    offsets, num_edges = content["offsets"], content["num_edges"]
    if content["number"] != number:
        raise _damaged(path, "number", str(number), content["number"])
    pairs = itertools.pairwise(offsets)
    if not all(type(x) is int for x in offsets) or offsets[0] != 0 or any(a > b for a, b in pairs):
        raise _damaged(path, "offsets", "integers that rise from 0", str(offsets)[:60])
    first, end = offsets[number : number + 2]
    for name, size in (("ids", end - first), ("src", None), ("dst", None), ("edge_ids", None)):
        x, size = content[name], len(content["src"]) if size is None and content["src"].dim() else size
        if x.dtype not in (torch.int32, torch.int64) or x.layout != torch.strided or list(x.shape) != [size]:
            raise _damaged(path, name, f"int64 [{size}]", f"{x.dtype} {list(x.shape)}")
    if len(content["src"]) > num_edges:
        raise _damaged(path, "src", f"at most num_edges={num_edges} edges", len(content["src"]))
    limits = {"ids": offsets[-1], "src": offsets[-1], "dst": end - first, "edge_ids": num_edges}
    for name, limit in limits.items():
        low, high = (int(x) for x in content[name].aminmax()) if len(content[name]) else (0, limit - 1)
        if low < 0 or high >= limit:
            raise _damaged(path, name, f"numbers in 0 .. {limit - 1}", f"{low} .. {high}")
    for name in ("ids", "edge_ids"):
        if bool((content[name][1:] <= content[name][:-1]).any()):
            raise _damaged(path, name, "numbers that rise", "others")


def _damaged(path: Path, name: str, expected: str, got: Any) -> ValueError:
    return ValueError(
        f"from_partition: {path}: {name}: expected {expected}, got {got}: the file is damaged, divide the "
        "graph again"
    )


def load_nodes(folder: str | Path, name: str, number: int) -> Tensor:
    """The rows for a part's nodes of an array that was divided along with the graph.

    Raises FileNotFoundError (no such file) and ValueError (a damaged file, or another number of nodes).
    """
    import numpy as np

    path = Path(folder) / f"{name}-{number}.npy"
    open(path, "rb").close()  # raises an OSError with the reason if it cannot be read
    try:
        rows = torch.from_numpy(np.load(path))
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"load_nodes: {path}: expected an array of numbers, got {error}") from error
    begin, end = _read(Path(folder) / f"part-{number}.pt")["offsets"][number : number + 2]
    if rows.dim() == 0 or len(rows) != end - begin:
        raise ValueError(f"load_nodes: {path}: expected {end - begin} rows, got shape {list(rows.shape)}")
    return rows


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals):
        raise wrong("NAME=FILE", text)
    return name, existing_file(path)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m dfgnn.distributed.partition", description=__doc__)
    parser.add_argument("edges", type=existing_file, metavar="EDGES.npy", help="int32 or int64 [2, E]")
    parser.add_argument("folder", type=folder_to_write, metavar="FOLDER", help="of the parts, empty or new")
    parser.add_argument("--parts", type=positive, required=True, metavar="N", help="how many")
    parser.add_argument("--num-nodes", type=integer(0), metavar="N", help="default: the largest id + 1")
    parser.add_argument("--method", choices=parts.METHODS, default="contiguous", help="who gets which nodes")
    parser.add_argument(
        "--nodes", type=_named_file, action="append", default=[], metavar="NAME=FILE", help="a .npy file"
    )
    args = parser.parse_args(argv)
    if args.folder.is_dir() and any(args.folder.iterdir()):
        parser.error(f"folder: expected one that is empty or new, got {args.folder}")
    edge_index = _loaded(parser, "EDGES.npy", args.edges)
    nodes = {name: _loaded(parser, "--nodes", path) for name, path in args.nodes}
    num_nodes = args.num_nodes
    try:
        if num_nodes is None:
            num_nodes = int(edge_index.max()) + 1 if edge_index.size else 0
        made = write(edge_index, args.folder, args.parts, num_nodes, args.method, nodes)
    except (TypeError, ValueError, ImportError) as error:
        parser.error(f"{error} (EDGES.npy is {args.edges})")
    print(json.dumps(made))


def _loaded(parser: Parser, name: str, path: Path) -> Any:
    """The array of a file, mapped."""
    import numpy as np

    expected = f"{name}: expected an array of numbers that numpy.save wrote, got {path}"
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        parser.error(f"{expected}: {error}")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        parser.error(f"{expected} with a {getattr(array, 'dtype', type(array).__name__)}")
    return array


if __name__ == "__main__":
    main()
