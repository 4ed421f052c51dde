"""Downloads graphs that no library has, and checks them against a SHA-256.

``github``       MUSAE's GitHub developers (Rozemberczki et al. 2021), from the authors' repository
``blogcatalog``  BlogCatalog3 (Tang and Liu 2009), from a copy on GitHub: the university's page is gone
``debian-deps``  dependencies among the packages of Debian 12, from Debian's archive of its package indices

The checksum is that of the graph, not of a file, so that it also holds for a copy in another format.
"""

import hashlib
import lzma
import re
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .measure import reason

_SNAPSHOT = "https://snapshot.debian.org/archive/{}/20261120T060000Z/dists/{}/main/binary-amd64/Packages.xz"


class Source(NamedTuple):
    urls: tuple[str, ...]
    read: Callable[[list[Path]], tuple[np.ndarray, np.ndarray, int]]
    # The accepted values of `checksum`: more than one where an earlier version of the files is accepted, too.
    sha256: tuple[str, ...]


def load(name: str, root: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """(src, dst, number of nodes) as published; files are stored in a folder of that name under ``root``.

    Raises OSError with the address if a download fails, ValueError if a file holds another graph.
    """
    source = SOURCES[name]
    ends = source.read([_download(url, root / name, k) for k, url in enumerate(source.urls)])
    verify(name, ends, f"{', '.join(source.urls)} (kept in {root / name})")
    return ends


def verify(name: str, ends: tuple[np.ndarray, np.ndarray, int], origin: str) -> None:
    """Raises ValueError unless this is the graph of that name."""
    found = checksum(*ends)
    if found not in SOURCES[name].sha256:
        expected = " or ".join(SOURCES[name].sha256)
        raise ValueError(
            f"graph {name}: expected the graph with SHA-256 {expected}, got {found} from {origin}"
        )


def checksum(src: np.ndarray, dst: np.ndarray, n: int) -> str:
    """SHA-256 of n and of the undirected edges, each once, sorted, without loops, as int64 low * n + high."""
    low, high = np.minimum(src, dst).astype(np.int64), np.maximum(src, dst).astype(np.int64)
    keys = np.unique((low * n + high)[low != high])
    return hashlib.sha256(np.concatenate([[n], keys]).astype("<i8").tobytes()).hexdigest()


def _download(url: str, folder: Path, k: int) -> Path:
    path = folder / f"{k}-{url.rpartition('/')[2]}"  # k, because all indices of Debian have the same name
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # renamed when complete
    try:
        with urllib.request.urlopen(url, timeout=60) as response, open(part, "wb") as file:
            shutil.copyfileobj(response, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{url} cannot be had ({reason(error)}): put it at {path}") from error
    return part.rename(path)


def _pairs(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, int]:
    """Reads files with two ids per line, separated by commas or blanks, with or without a header; ids are
    renumbered 0, 1, ...."""
    pairs = re.findall(r"^(\d+)[, \t]+(\d+)\s*$", paths[0].read_text(), flags=re.MULTILINE)
    ids, values = np.unique(np.array(pairs, dtype=np.int64), return_inverse=True)
    src, dst = values.reshape(-1, 2).T
    return src, dst, len(ids)


def _debian(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, int]:
    """An edge from each package to all that it depends on, recommends or suggests, alternatives included."""
    packages: dict[str, dict[str, str]] = {}
    for path in paths:
        for text in lzma.decompress(path.read_bytes()).decode().split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): (.*)$", text, flags=re.MULTILINE))
            name, new = fields.get("Package"), _version(fields.get("Version", ""))
            if name and (name not in packages or new > _version(packages[name]["Version"])):
                packages[name] = fields
    ids = {name: k for k, name in enumerate(sorted(packages))}
    edges = {
        (ids[name], ids[other])
        for name, fields in packages.items()
        for relation in ("Depends", "Pre-Depends", "Recommends", "Suggests")
        for other in re.findall(r"(?:^|[,|])\s*([^\s(:\[,|]+)", fields.get(relation, ""))
        if other in ids and other != name
    }
    src, dst = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2).T
    return src, dst, len(ids)


def _version(text: str) -> tuple:
    """A key that sorts as deb-version(7) does: a tilde comes before the end, the end before letters."""
    epoch, _, rest = text.partition(":") if ":" in text else ("0", "", text)
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")
    return int(epoch), _order(upstream), _order(revision)


def _order(text: str) -> tuple:
    def weight(c):
        return -1 if c == "~" else ord(c) if c.isalpha() else ord(c) + 256

    parts = re.findall(r"(\D*)(\d*)", text)
    return tuple(((*map(weight, word), 0), int(number or 0)) for word, number in parts)


_GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "github": Source(
        (
            f"{_GITHUB}/benedekrozemberczki/MUSAE/5f901232957b6c9985d750aac48cda39a4b24285/input/edges/git_edges.csv",
        ),
        _pairs,
        ("ef62610d7bb4e0072ea111ece89b93fdcc96f1d460466f35f95fd4ab440baa7d",),
    ),
    "blogcatalog": Source(
        (
            f"{_GITHUB}/premolab/GraphEmbeddings/691afdc5538ac6998da47eee6dfb22e3bb7c13e9/BlogCatalog-dataset/data/edges.csv",
        ),
        _pairs,
        ("72fe476dcef8d299a7a66619f8a6197df7eb603749e9bda304f6375abcdae697",),
    ),
    "debian-deps": Source(
        (
            _SNAPSHOT.format("debian", "bookworm"),
            _SNAPSHOT.format("debian", "bookworm-updates"),
            _SNAPSHOT.format("debian-security", "bookworm-security"),
        ),
        _debian,
        # The graph of the files above; and that of an earlier snapshot, with which published times were
        # measured: two packages had other versions there, and 7 edges differ.
        (
            "bf01c2f0fee63d0902138053cef5f81d04f0d272290a2af21449d980774fe339",
            "0798aa67164743105b72fdbd490b21afdb379113b466fd3e71ac0c8fa4dc1267",
        ),
    ),
}
