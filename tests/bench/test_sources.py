"""Real graphs by name: which data set they stand for, copies in DFGNN_DATA, downloads and their checksums."""

import gzip
import lzma

import pytest

np = pytest.importorskip("numpy", reason="the benchmarks need numpy")

from dfgnn.bench import datasets, graphs, sources  # noqa: E402

FOLDER = graphs.data_folder()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No local copies of data sets, and in place of a published graph one of four edges, whose URL is that of
    a local file."""
    monkeypatch.delenv("DFGNN_DATA", raising=False)
    file = tmp_path / "edges.csv"
    file.write_text("id_1, id_2\n5,7\n7,9\n9,5\n12,5\n")
    sha256 = sources.checksum(np.array([0, 1, 0, 0]), np.array([1, 2, 2, 3]), 4)
    source = sources.Source((file.as_uri(),), sources._pairs, (sha256,))
    monkeypatch.setitem(sources.SOURCES, "github", source)
    return file


def test_a_published_graph_is_downloaded_once_and_checked(offline, tmp_path):
    root = tmp_path / "root"
    graph, count = graphs.read("github", root=root)
    assert (graph.num_dst, graph.num_edges, count) == (4, 2 * 4 + 4, 1)
    assert [path.name for path in (root / "github").iterdir()] == ["0-edges.csv"]
    offline.unlink()
    assert graphs.read("github", root=root)[0].num_edges == graph.num_edges
    (root / "github" / "0-edges.csv").write_text("5,7\n7,9\n9,5\n12,9\n")
    with pytest.raises(
        ValueError, match=r"graph github: expected the graph with SHA-256 \w{64}, got \w{64} from"
    ):
        graphs.read("github", root=root)


def test_a_file_that_cannot_be_had_is_named(offline, tmp_path):
    offline.unlink()
    with pytest.raises(OSError, match=r"edges.csv cannot be had \(URLError.*put it at .*github/0-edges.csv"):
        graphs.read("github", root=tmp_path / "root")
    assert not list((tmp_path / "root" / "github").iterdir())


def test_checksum_is_that_of_the_undirected_graph():
    edges = np.array([[0, 1], [1, 2], [2, 0], [2, 2], [1, 0]]).T
    same = sources.checksum(edges[1], edges[0], 4)
    assert sources.checksum(*edges[:, :3], 4) == same
    assert sources.checksum(*edges[:, :2], 4) != same
    assert sources.checksum(*edges, 5) != same


def test_packages_of_the_highest_version_and_all_their_relations(tmp_path):
    old = "Package: a\nVersion: 1.0-2\nDepends: c\n\nPackage: b\nVersion: 1:1\nDescription: x\n Depends: a\n"
    new = (
        "Package: a\nVersion: 1.0-10\nDepends: b (>= 2) | nowhere, a\nSuggests: d:any\n\n"
        "Package: b\nVersion: 9\nDepends: a\n\nPackage: c\nVersion: 1\nRecommends: d [amd64]\n"
        "Pre-Depends: a|b\n\nPackage: d\nVersion: 1\n"
    )
    paths = []
    for k, text in enumerate((old, new)):
        paths.append(tmp_path / f"{k}-Packages.xz")
        paths[-1].write_bytes(lzma.compress(text.encode()))
    src, dst, n = sources._debian(paths)
    names = "abcd"
    assert n == 4
    assert [names[i] + names[j] for i, j in zip(src, dst)] == ["ab", "ad", "ca", "cb", "cd"]


def test_versions_sort_as_debian_does():
    rising = [
        "1.0~rc1-1",
        "1.0-1",
        "1.0-1+b1",
        "1.0-2",
        "1.0-10",
        "1.0a-1",
        "1.0+x-1",
        "1.2",
        "1.10",
        "1:0.1",
    ]
    assert sorted(reversed(rising), key=sources._version) == rising


@pytest.mark.parametrize("name", graphs.ALIASES)
def test_names_stand_for_data_sets_of_libraries(name, monkeypatch, tmp_path):
    monkeypatch.delenv("DFGNN_DATA", raising=False)
    asked = []

    def load(spec, root):
        asked.append((spec, root))
        return (np.array([0]), np.array([1]), 2), 1

    monkeypatch.setattr(datasets, "load", load)
    assert graphs.read(name, root=tmp_path)[0].num_edges == 2 + 2
    assert asked == [(graphs.ALIASES[name], tmp_path)]
    assert datasets.is_spec(asked[0][0])


def test_copies_in_the_data_folder_come_first(monkeypatch, tmp_path):
    monkeypatch.setenv("DFGNN_DATA", str(tmp_path))
    raw = tmp_path / "ogb" / "ogbg_molhiv" / "raw"
    raw.mkdir(parents=True)
    for name, rows in {
        "edge": "0,1\n1,2\n0,1\n",
        "num-edge-list": "2\n1\n",
        "num-node-list": "3\n2\n",
    }.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt") as file:
            file.write(rows)
    graph, count = graphs.read("molhiv")
    assert (graph.num_dst, graph.num_edges, count) == (5, 2 * 3 + 5, 2)
    (tmp_path / "graphs").mkdir()
    np.savez(tmp_path / "graphs" / "musae-github.npz", indptr=[0, 1, 1], indices=[1], num_nodes=2)
    with pytest.raises(ValueError, match="graph github: expected the graph with SHA-256 .*musae-github.npz"):
        graphs.read("github")
    monkeypatch.setenv("DFGNN_DATA", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="DFGNN_DATA: expected a folder, got"):
        graphs.read("molhiv")


@pytest.mark.parametrize("name", sources.SOURCES)
def test_the_copies_are_the_published_graphs(name):
    if FOLDER is None or not (FOLDER / graphs._COPIES[name][0]).is_file():
        pytest.skip("set DFGNN_DATA to a folder with graphs/ (docs/benchmarks.md)")
    graph, _ = graphs.read(name)  # raises where the checksum differs
    assert graph.num_edges > 500_000
