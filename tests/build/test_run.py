"""python -m dfgnn.run: a script unchanged, with either library's layers, and what the report says."""

import json
from pathlib import Path

import pytest
from covering import exhaustive, some
from forked import python

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import helper
import torch
from torch_geometric.nn import GAT, GATConv, GCNConv

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GATConv(8, 4, heads=2)
        self.second = GCNConv(8, 8)
        self.third = GATConv(8, 4, aggr="max")
        self.rest = GAT(4, 4, num_layers=2)

    def forward(self, x, edge_index):
        x = self.second(self.first(x, edge_index), edge_index)
        return self.rest(self.third(x, edge_index), edge_index)

torch.manual_seed(0)
edge_index = torch.randint(10, (2, 30))
out = Network()(torch.randn(10, 8), edge_index)
print(__name__, sys.argv[1:], helper.NAME, f"{float(out.sum().detach()):.4f}")
"""


@pytest.fixture
def run(dfgnn_run, tmp_path):
    """A run of a script, and its report."""

    def run(*words, script=SCRIPT, **options):
        (tmp_path / "script.py").write_text(script)
        (tmp_path / "helper.py").write_text("NAME = 'beside the script'")
        done = dfgnn_run("--json", "report.json", *words, cwd=tmp_path, **options)
        return done, json.loads((tmp_path / "report.json").read_text())

    return run


def test_report(run, tmp_path):
    ours, report = run(tmp_path / "script.py", "a", "--flag")
    theirs, plain = run("--impl", "pyg", tmp_path / "script.py", "a", "--flag")
    assert ours.returncode == theirs.returncode == 0, ours.stderr
    # The script sees its own arguments and neighbours, and computes the same.
    assert ours.stdout == theirs.stdout and ours.stdout.startswith(
        "__main__ ['a', '--flag'] beside the script"
    )
    rows = {row["layer"]: row for row in report["layers"]}
    assert rows["dfgnn.nn.pyg.gat.GATConv"]["constructed"] == 4
    assert rows["dfgnn.nn.pyg.gat.GATConv"]["fell_back"] == ["aggr='max'"]
    assert rows["torch_geometric.nn.conv.gcn_conv.GCNConv"]["fell_back"] == ["no such layer in dfgnn"]
    assert [row["fused"] for row in plain["layers"]] == [False, False]
    assert report["seconds"] > 0 and report["peak_memory"]["host"] > 1e6 and report["failed"] is None
    assert "ran its own forward: aggr='max'" in ours.stderr and "why: no such layer" in ours.stderr
    assert "why" not in theirs.stderr and "peak memory: host" in theirs.stderr


# ---- the clock ---------------------------------------------------------------------------------------

LOADS = """
import sys
before = set(sys.modules)
import torch_geometric.nn, torch_geometric.nn.models
print(sorted(set(sys.modules) - before), "dfgnn.nn.pyg.gat" in before, "torch_geometric.nn" in before)
"""


@some(["dfgnn"], ["dfgnn", "pyg"], "impl")
def test_the_clock_starts_when_all_is_imported(plain_python, tmp_path, impl):
    """The libraries that a script imports are loaded before its first line, with either implementation, so
    that importing them does not count in its time."""
    (tmp_path / "script.py").write_text(LOADS)
    done = plain_python.forks("--impl", impl, "--json", "report.json", "script.py", cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.stdout == "[] True True\n", done.stderr
    assert report["seconds"] < 0.5


# ---- what the report says of layers --------------------------------------------------------------------

LAYERS = """
import sys
import torch
from torch_geometric.nn import AttentionalAggregation, GATConv, GATv2Conv, GPSConv, MessagePassing
from torch_geometric.nn.models import AttentiveFP

class Other(GATConv):
    def forward(self, x, edge_index):
        return x

class Around(GATv2Conv):
    def forward(self, x, edge_index):
        return 2 * super().forward(x, edge_index)

class Named(GATConv):
    pass

class Mine(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

if "switched" in sys.argv:
    import dfgnn, torch_geometric.nn
    class Before(next(c for c in GATConv.__mro__ if c.__module__.startswith("torch_geometric.nn.conv.gat"))):
        pass
    for conv in (Before(4, 4), Before(4, 4)):
        dfgnn.accelerate(conv)
    sys.exit()
if "early" in sys.argv:
    raise ValueError("as told")
x, edge_index, group = torch.randn(10, 4), torch.randint(10, (2, 30)), torch.arange(10) // 5
for cls in (Other, Around, Named):
    cls(4, 4)(x, edge_index)
Mine()(x, edge_index)
GPSConv(4, GATConv(4, 4), heads=2)(x, edge_index, group)
GPSConv(4, None, heads=2)(x, edge_index)
AttentionalAggregation(torch.nn.Linear(4, 1))(x, group)
AttentiveFP(4, 4, 4, edge_dim=3, num_layers=2, num_timesteps=2)(x, edge_index, torch.randn(30, 3), group)
raise ValueError("as told")
"""


def test_every_layer_is_told_as_what_it_is(run):
    done, report = run("script.py", script=LAYERS)
    told = report["layers"]
    rows = {row["layer"].removeprefix("dfgnn.nn.pyg."): row for row in told}
    assert {name: (row["constructed"], row["fused"]) for name, row in rows.items()} == {
        "__main__.Other": (1, False), "__main__.Around": (1, True), "__main__.Named": (1, True),
        "__main__.Mine": (1, False), "gps.GPSConv": (2, True), "gat.GATConv": (3, True),
        "aggregation.AttentionalAggregation": (1, True), "gate.GATEConv": (1, True),
    }  # fmt: skip
    assert rows["__main__.Other"]["fell_back"] == [
        "has a forward of its own, which was not seen to call GATConv's"
    ]
    assert rows["__main__.Around"]["note"] == "has a forward of its own, which calls GATv2Conv's"
    assert rows["__main__.Mine"]["fell_back"] == ["message passing of its own (script.py:18)"]
    assert rows["gps.GPSConv"]["fell_back"] == ["batch=None, a single graph, whose attention is dense"]
    assert rows["gate.GATEConv"]["fell_back"] == []
    # The traceback is Python's, and the report below it says that the script failed.
    assert done.returncode == 1 and report["failed"] == "ValueError: as told"
    assert done.stderr.index("ValueError: as told\n") < done.stderr.index(
        "script.py: failed with ValueError: as"
    )
    done, report = run("script.py", "early", script=LAYERS)
    assert report["layers"] == [] and "was constructed before it failed\n" in done.stderr
    _, report = run("script.py", "switched", script=LAYERS)
    (row,) = report["layers"]
    assert (row["layer"], row["constructed"], row["fused"]) == ("__main__.Before", 2, True)
    assert row["note"] == "dfgnn.accelerate put dfgnn.nn.pyg.gat.GATConv under it"
    _, plain = run("--impl", "pyg", "script.py", script=LAYERS)
    counts = [
        {row["layer"].rpartition(".")[2]: row["constructed"] for row in rows}
        for rows in (told, plain["layers"])
    ]
    assert counts[0] == counts[1]
    assert not any(row["fused"] for row in plain["layers"])


OWN = {
    "script.py": """
import dgl
import torch
import torch_geometric as tg
import torch_geometric.utils as pyg_utils
from dgl.ops import edge_softmax
from torch_geometric.utils import softmax as by_group
from torch_scatter import scatter_softmax
from helper import softmax
from dfgnn.functional import edge_softmax as ours

class First(tg.nn.MessagePassing):
    def message(self, x_j, index):
        return by_group(torch.nn.functional.leaky_relu(x_j), index)

def second(query, key, index):
    return scatter_softmax((query * key).sum(1) / 8, index)

def third(g, score):
    return edge_softmax(g, score)

def fourth(score, index):
    from torch_geometric.utils import softmax as late
    return late(score, index), pyg_utils.softmax(score, index), tg.utils.softmax(score, index)

def not_one(score):
    return torch.softmax(score, 0), softmax(score), ours
""",
    "helper.py": "from torch import softmax as plain\ndef softmax(x):\n    return plain(x, 0)\n",
    "torch_scatter.py": "def scatter_softmax(src, index):\n    return src\n",
}


@exhaustive
def test_one_of_torchruns_processes_writes_the_report(tmp_path):
    """All processes are given one file: were each to write its report, it would replace the others'."""
    (tmp_path / "script.py").write_text(
        "import os, pathlib, time\n"
        "rank = os.environ.get('RANK', '0')\n"
        "while rank == '1' and not pathlib.Path('report.json').exists():\n"
        "    time.sleep(0.05)\n"
        "from torch_geometric.nn import GATConv\n"
        "layers = [GATConv(4, 4) for _ in range(1 + int(rank))]\n"
    )
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "dfgnn.run", "--json", "report.json"]
    done = python(*words, "script.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("x dfgnn.nn.pyg.gat.GATConv: dfgnn") == 2
    (layer,) = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert layer["constructed"] == 1


def test_attention_of_its_own(dfgnn_run, tmp_path):
    pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    done = dfgnn_run("--json", "report.json", "script.py", cwd=tmp_path)
    uses = json.loads((tmp_path / "report.json").read_text())["own_attention"]
    pyg, additive, plain = (
        "torch_geometric.utils.softmax",
        "gat_attention or gatv2_attention",
        "score_attention",
    )
    assert [(use["line"], use["where"], use["function"], use["fits"]) for use in uses] == [
        (14, "First.message", pyg, additive),
        (17, "second", "torch_scatter.scatter_softmax", "dot_attention"),
        (20, "third", "dgl.ops.edge_softmax", plain),
        (24, "fourth", pyg, plain),
    ]
    assert {use["file"] for use in uses} == {"script.py"}
    assert "    script.py:17 in second: torch_scatter.scatter_softmax\n" in done.stderr
    for page in {use["recipe"] for use in uses}:
        assert "\n## Attention of your own\n" in (ROOT / "docs" / page).read_text()


SPELLED = """
import torch
from torch_geometric.utils import softmax

index = torch.randint(9, (50,))
for _ in range(3):
    softmax(torch.randn(50, 2), index)
softmax(torch.randn(2, 50), index, dim=1)
torch.randn(9, 400, requires_grad=True)[index].sum().backward()
"""


def test_calls_that_the_kernels_serve(run):
    done, report = run("script.py", script=SPELLED)
    assert report["served"] == {"torch_geometric.utils.softmax": 3, "sums by an index": 1}
    assert "  3 calls of torch_geometric.utils.softmax ran on dfgnn's kernels\n" in done.stderr
    _, plain = run("--impl", "pyg", "script.py", script=SPELLED)
    assert plain["served"] == {} and [use["line"] for use in report["own_attention"]] == [7, 8]


TRACED = """
import sys
import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

class Own(MessagePassing):
    def __init__(self):
        super().__init__(node_dim=0)
        self.project = torch.nn.Linear(32, 64)
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.project(x)).relu()
    def message(self, x_i, x_j, index, size_i):
        return softmax((x_i * x_j).sum(-1, keepdim=True), index, num_nodes=size_i) * x_j

torch.manual_seed(0)
model, x, edges = Own(), torch.randn(2000, 32), torch.randint(2000, (2, 60_000))
for _ in range(4):
    loss = model(x, edges).square().mean()
    loss.backward()
    print(f"{loss.item():.5f}")
print(torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]).shape)  # tensors stay no sequences
"""


def test_attention_of_its_own_is_traced(run):
    done, report = run("script.py", script=TRACED)
    (row,) = report["traced"]
    assert row["class"] == "__main__.Own" and row["modules"] == 1 and all(row["milliseconds"])
    assert row["traced"] or row["reason"] == "traced it is not faster"  # the clock decides
    assert "  1 x __main__.Own: " in done.stderr and " ms as written, " in done.stderr
    if row["traced"]:
        assert "script.py:14: dot_attention" in done.stderr
        assert "script.py:14 in Own.message" not in done.stderr
    written, plain = run("--as-written", "script.py", script=TRACED)
    assert plain["traced"] == [] and written.stdout == done.stdout
    assert "script.py:14 in Own.message: torch_geometric.utils.softmax" in written.stderr


# ---- the script's processes ------------------------------------------------------------------------------

PROCESSES = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp
from torch_geometric.nn import GATConv

def work(rank):
    layer = GATConv(4, 4, aggr="max" if rank else "sum")
    layer(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
    for method in ("fork", *sys.argv[1:]):
        process = mp.get_context(method).Process(target=work, args=(1,))
        process.start()
        process.join()
    if os.fork() == 0:
        GATConv(4, 4)
        sys.exit(0)
    os.wait()
    subprocess.run([sys.executable, "-c", "import sys"])
"""


POOL = """
import multiprocessing, torch
from torch_geometric.nn import GATConv, GATv2Conv

inherited = GATv2Conv(4, 4, aggr="max")
x, edges = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])

def work(k):
    if k == 2:
        inherited(x, edges)
    else:
        GATConv(4, 4, aggr="max")(x, edges)

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(work, range(5), chunksize=1)
"""


def test_workers_of_a_pool(run):
    """A pool kills its workers. They have told of all their layers before, and of those that fell back, also
    if the parent constructed them."""
    done, report = run("script.py", script=POOL)
    assert done.returncode == 0, done.stderr
    (child,) = report["children"]
    rows = {
        row["layer"].rpartition(".")[2]: (row["constructed"], *row["fell_back"]) for row in child["layers"]
    }
    assert rows == {"GATConv": (4, "aggr='max'"), "GATv2Conv": (0, "aggr='max'")}
    assert [(row["constructed"], row["fell_back"]) for row in report["layers"]] == [(1, [])]


@pytest.mark.parametrize("more", [[], pytest.param(["forkserver"], marks=exhaustive)])
def test_processes_that_it_starts(run, more):
    done, report = run("script.py", *more, script=PROCESSES)
    assert done.returncode == 0, done.stderr
    told = {(each["processes"], *each["layers"][0]["fell_back"]) for each in report["children"]}
    # Two groups: the two processes of GATConv with sums, from mp.spawn and os.fork; and those of `work(1)`,
    # whose aggr="max" falls back: one by "fork" and, in the exhaustive test, one by "forkserver".
    assert told == {(2,), (1 + len(more), "aggr='max'")}
    assert all(row["fused"] for each in report["children"] for row in each["layers"])
    assert report["layers"] == [] and "constructed in this process\n" in done.stderr
    assert [command.partition(" ")[2] for command in report["programs"]] == ["-c import sys"]
    assert done.stderr.count("dfgnn.run --impl") == 1  # the report is printed by the first process alone


# ---- files and streams -----------------------------------------------------------------------------------


def test_a_stream_that_the_script_closes(run, tmp_path):
    text = "import os, sys; os.mkdir('below'); os.chdir('below'); sys.stderr.close()"
    done, _ = run("script.py", script=text)  # --json names a file relative to the first working directory
    assert done.returncode == 0 and done.stderr == "" and not (tmp_path / "below/report.json").exists()


def test_files_that_cannot_be(dfgnn_run, tmp_path):
    (tmp_path / "script.py").write_text("import os; os.rmdir('there')")
    (tmp_path / "there").mkdir()
    done = dfgnn_run("--json", "there/report.json", "script.py", cwd=tmp_path)
    assert done.returncode == 0 and "dfgnn.run: --json: the report could not be written" in done.stderr
    for words, error in (
        (["nothing.py"], "error: script: expected a file, got nothing.py\n"),
        ([], "error: the following arguments are required: script\n"),
        (["--json", "no/x", "script.py"], "--json: expected a file in a folder that is there, got no/x\n"),
        (["--json", ".", "script.py"], "--json: expected a file in a folder that is there, got .\n"),
        (["--captured", "script.py"], "got --captured; did you mean --capture?\n"),
        (["--epochs", "script.py"], "got --epochs; options of the script go behind its name\n"),
    ):  # fmt: skip
        done = dfgnn_run(*words, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.endswith(error)


# ---- backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, options, enabled", [(1, [], False), (1, ["--backward-thread"], True),
                                                    (2, [], True), (0, [], True)])  # fmt: skip
def test_backward_in_the_calling_thread(gpus, options, enabled, run):
    """dfgnn.run lets backward run in the calling thread where exactly one GPU is visible."""
    script = "import torch\nprint(torch._C._is_multithreading_enabled())"
    done, report = run("--impl", "pyg", *options, "script.py", script=script, gpus=gpus)
    assert done.stdout == f"{enabled}\n", done.stderr
    assert ("backward ran in the thread" in done.stderr) == (not enabled)
    assert report["backward_in_calling_thread"] == (not enabled)


def test_a_dgl_script(run):
    pytest.importorskip("dgl", reason="dgl is not installed (dgl==1.1.3 supports Python <= 3.11)")
    text = "import dgl, torch\nfrom dgl.nn import GATConv\ng = dgl.add_self_loop(dgl.rand_graph(9, 20))\n"
    text += "print(GATConv(4, 2, 2)(g, torch.randn(9, 4)).shape)\n"
    text += "print(dgl.nn.GlobalAttentionPooling(torch.nn.Linear(4, 1))(g, torch.randn(9, 4)).shape)"
    done, report = run("script.py", script=text)
    assert done.returncode == 0 and "torch.Size([9, 2, 2])" in done.stdout
    assert [(row["layer"], row["fused"]) for row in report["layers"]] == [
        ("dfgnn.nn.dgl.GATConv", True), ("dfgnn.nn.dgl.GlobalAttentionPooling", True)
    ]  # fmt: skip
