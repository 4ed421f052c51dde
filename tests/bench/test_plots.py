"""The pictures: what is drawn, not only that something is."""

import copy
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the benchmarks need numpy")
pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from dfgnn.bench import cli, plots

_CASE = ("gat", 4, 32, "float32", "train")


def _row(graph, eager, kernels, plan=("natural", 512), schedule="auto", **more):
    case = dict(zip(("layer", "heads", "head_dim", "dtype", "mode"), _CASE))
    plans = {"forward": {"schedule": plan[0], "max_edges": plan[1]}}
    x_floor = {"eager": eager} | ({"kernels": kernels} if kernels else {})
    row = {"graph": graph, **case, "schedule": schedule, "plan": plans, "x_floor": x_floor, "peers": {}}
    return row | {"gathered_gb_s": 100.0} | more


@pytest.fixture
def results():
    return {
        "copy_gb_s": 1000.0,
        "graphs": [
            {
                "name": "first",
                "nodes": 10,
                "edges": 1300,
                "max_degree": 1200,
                "degrees": {
                    "empty": 2,
                    "rows": [3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1],
                    "edges": [3, 97, 0, 0, 0, 0, 0, 0, 0, 0, 1200],
                },
            },
            {"name": "second", "nodes": 20, "edges": 40, "max_degree": 4},
        ],
        "yardsticks": [
            {"graph": "first", "width": 128, "dtype": "float32", "floor": {"eager": 2.0, "kernels": 1.0}},
            {"graph": "second", "width": 128, "dtype": "float32", "floor": {"eager": 1.0}},
        ],
        "rows": [_row("first", 3.0, 2.0), _row("second", 1.5, 1.25)],
    }


def _bars(figure):
    """{label without its mean: heights}, and the notes."""
    (axes,) = figure.axes
    bars = {c.get_label().split(",")[0]: [patch.get_height() for patch in c] for c in axes.containers}
    return bars, [text.get_text() for text in axes.texts]


def test_bars_are_times_passes_x_floor(results):
    figure = plots.bars(results, _CASE)
    assert _bars(figure) == ({"dfgnn": [2.0, 1.25]}, [])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "second"]
    assert "kernels" in axes.get_ylabel()
    (floor,) = [line for line in axes.lines if "floor" in line.get_label()]
    assert list(floor.get_ydata()) == [1, 1]
    assert "mean 1.58" in axes.containers[0].get_label()  # sqrt(2 x 1.25)


def test_bars_of_peers_are_of_kernels_where_all_have_them(results):
    first, second = results["rows"]
    first["peers"] = {"slow": {"speedup": 10.0, "speedup_kernels": 7.0}}
    second["peers"] = {"slow": {"unavailable": "memory"}}
    figure = plots.bars(results, _CASE)
    assert _bars(figure)[0] == {"dfgnn": [2.0, 1.25], "slow": [14.0]}
    assert "kernels" in figure.axes[0].get_ylabel()


def test_bars_of_peers_are_eager_and_gaps_are_named(results):
    first, second = results["rows"]
    first["peers"] = {"slow": {"speedup": 10.0}, "missing": {"unavailable": "ImportError"}}
    second["peers"] = {"slow": {"unavailable": "memory"}, "missing": {"unavailable": "ImportError"}}
    del second["x_floor"]
    second["failed"] = "out of memory"
    figure = plots.bars(results, _CASE)
    bars, notes = _bars(figure)
    assert bars == {"dfgnn": [3.0], "slow": [30.0]}
    assert notes == ["not measured"] * 4  # both peers on the second graph, one on the first, and our row
    assert figure.axes[0].get_yscale() == "log"
    assert "missing, not measured" in [line.get_label() for line in figure.axes[0].lines]


def test_bars_of_schedules_stand_beside_each_other(results):
    results["rows"] += [_row("first", 5.0, None, schedule="packed")]
    bars, notes = _bars(plots.bars(results, _CASE))
    assert bars == {"dfgnn": [3.0, 1.5], "dfgnn packed": [5.0]}  # one has no kernels: all are eager
    assert notes == ["not measured"]


def test_degrees_show_rows_edges_and_the_bands_of_plans(results):
    results["rows"] += [_row("first", 2.0, 1.0, plan=("packed", 64)), _row("first", 2.0, 1.0)]
    figure = plots.degrees(results, "first")
    above, below = figure.axes
    rows, edges = above.containers
    assert [patch.get_height() for patch in rows] == [2, 3, 4, *[0] * 8, 1]
    assert [patch.get_height() for patch in edges] == [3, 97, *[0] * 8, 1200]
    # Degree 2^k starts at k + 1/2, and 0 lies before: a strip for each of the two different plans.
    strips = [(p.get_x(), p.get_x() + p.get_width()) for c in below.containers for p in c]
    end = pytest.approx(10.5, abs=0.3)  # of 1200
    whole, split, packed, cut = strips
    assert whole == (-0.5, pytest.approx(9.5, abs=0.01)) and split == (pytest.approx(9.5, abs=0.01), end)
    assert packed == (-0.5, pytest.approx(6.5, abs=0.03)) and cut == (pytest.approx(6.5, abs=0.03), end)
    assert [t.get_text() for t in below.texts] == ["whole rows", "split", "several rows per warp", "split"]
    labels = [label.get_text() for label in below.get_yticklabels()]
    assert labels == ["forward: natural <= 512", "forward: packed <= 64"]


def test_degrees_of_plans_that_do_not_cut_by_degree(results):
    plans = (
        {"schedule": "tiles", "max_edges": 64},
        {"schedule": "natural", "max_edges": 64, "source_parts": 3},
    )
    results["rows"] = [_row("first", 2.0, 1.0) | {"plan": {"forward": plan}} for plan in plans]
    _, below = plots.degrees(results, "first").axes
    strips = [(p.get_x(), p.get_x() + p.get_width()) for c in below.containers for p in c]
    assert strips == [(-0.5, pytest.approx(10.5, abs=0.3))] * 2
    texts = [t.get_text() for t in below.texts]
    assert texts == ["windows of 64 rows", "cut where sources pass to the next part"]
    labels = [label.get_text() for label in below.get_yticklabels()]
    assert labels == ["forward: tiles <= 64", "forward: natural <= 64 sources / 3"]


def test_roofline_puts_rows_under_the_bandwidth_of_copying(results):
    figure = plots.roofline(results, (128, "float32"))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    # first: 1,300 edges and 10 + 10 rows of 512 bytes, and 4 bytes for each index.
    reuse = 1300 * 512 / (20 * 512 + 4 * 1300)
    points = lines["gat train"]
    assert points.get_xdata()[0] == pytest.approx(reuse) and list(points.get_ydata()) == [100.0, 100.0]
    floor = lines["floor: plain sum"]
    assert list(floor.get_ydata()) == pytest.approx([1300 * 512 / 1.0 / 1e6, 40 * 512 / 1.0 / 1e6])
    roof = lines["copying x reuse"]
    assert list(roof.get_ydata()) == pytest.approx([1000 * x for x in roof.get_xdata()])
    assert list(lines["copying, 1000 GB/s"].get_ydata()) == [1000, 1000]


def test_every_picture_is_written_or_named(results, tmp_path):
    lines = plots.draw(results, tmp_path / "new")
    names = ["bars-gat-4x32-float32-train.png", "degrees-first.png", "roofline-128-float32.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert all((tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert [line for line in lines if "not drawn" in line] == [
        "degrees-second.png: not drawn: the file holds no degrees: it is of an earlier version"
    ]


def test_files_of_earlier_versions_lack_some_pictures(results, tmp_path, capsys):
    old = copy.deepcopy(results)
    del old["copy_gb_s"], old["graphs"][0]["degrees"]
    old["graphs"].append({"name": "third", "unavailable": "no such file"})
    for row in old["rows"]:
        row["x_floor"] = {}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert cli.main(["plot", str(path), str(tmp_path / "pictures")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("not drawn" in line for line in lines)
    assert "no row has a ratio to the floor" in lines[0]
    assert lines[3] == "degrees-third.png: not drawn: no such file"
    assert "no bandwidth of copying" in lines[4]


def test_command_draws_what_it_measured(tmp_path, capsys):
    arguments = "--device cpu --graphs pyg:nothing,er-60-4 --layers gat --heads 2 --head-dim 4 --budget 0.001"
    folder = tmp_path / "pictures"
    assert cli.main([*arguments.split(), "--plot", str(folder)]) == 1
    drawn = {path.name for path in folder.iterdir()}
    assert drawn == {
        "bars-gat-2x4-float32-forward.png",
        "bars-gat-2x4-float32-train.png",
        "degrees-er-60-4.png",
        "roofline-8-float32.png",
    }
    assert "degrees-pyg-nothing.png: not drawn: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--plot", "folder"), ("plot", "results.json", "folder")])
def test_missing_matplotlib_is_an_error_before_anything_else(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("results.json").write_text('{"graphs": [], "rows": []}')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as error:
        cli.main(list(arguments))
    assert error.value.code == 2
    assert "pictures need matplotlib: pip install matplotlib" in capsys.readouterr().err
