"""python -m dfgnn.run starts a script as Python does: names, arguments, streams, errors and exit codes."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from covering import exhaustive
from forked import python

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")

ROOT = Path(__file__).resolve().parents[2]

SEEN = """
import atexit, os, pickle, sys, threading, traceback, warnings
import helper

class Thing:
    pass

def late():
    # Threads, and what runs at exit, find the script in __main__.
    pickle.loads(pickle.dumps(Thing()))
    print("late", sys.modules["__main__"].__dict__ is globals(), sys.argv[1:])

threading.Timer(0.2, late).start()
atexit.register(late)
names = {"__annotations__", "__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__",
         "__package__", "__spec__"}
print(sorted(name for name in globals() if name.startswith("__")))
print(__file__, __name__, __package__, __doc__, __cached__, type(__loader__).__name__, type(__builtins__))
print(__spec__ and (__spec__.name, __spec__.origin), sys.argv, sys.path[:2], __annotations__)
print(helper.__file__, traceback.extract_stack()[-1].filename)
warnings.warn("old", DeprecationWarning)
code = compile("x: undefined = 1", "x", "exec", dont_inherit=False)
try:
    exec(code, {})
except NameError as error:
    print(error)  # annotations are not postponed, as they are in who runs it
if "exit" in sys.argv:
    sys.exit({"0": 0, "3": 3, "None": None, "text": "no more", "list": [1], "300": 300}[sys.argv[-1]])
if "raise" in sys.argv:
    def fails():
        raise KeyError("as told")
    try:
        fails()
    except KeyError as error:
        raise ValueError("again") from error
if "hook" in sys.argv:
    sys.excepthook = lambda kind, value, trace: print("hook", kind, value, trace.tb_lineno)
    1 / 0
if "signal" in sys.argv:
    os.kill(os.getpid(), 2)
    threading.Event().wait(5)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The same script as a file, a link, a folder, a zip file, a compiled file, a module and a package."""
    import py_compile

    folder = tmp_path_factory.mktemp("programs")
    (folder / "script.py").write_text(SEEN)
    (folder / "helper.py").touch()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/link.py").symlink_to("../script.py")
    for name in ("folder", "package"):
        (folder / name).mkdir()
        (folder / name / "__main__.py").write_text(SEEN)
        (folder / name / "helper.py").touch()
    (folder / "package/__init__.py").touch()
    (folder / "empty").mkdir()
    (folder / "empty/__init__.py").touch()
    (folder / "wrong.py").write_text("x = (1,\ny = 2\n")
    with zipfile.ZipFile(folder / "program.zip", "w") as file:
        file.writestr("__main__.py", SEEN)
        file.writestr("helper.py", "")
    py_compile.compile(str(folder / "script.py"), str(folder / "compiled.pyc"))
    return folder


PROGRAMS = [
    ["script.py", "", "a b", "--", "-m", "--impl=x", "--json", "x", "-h"],
    ["elsewhere/link.py", "exit", "text"],
    ["./folder/", "raise"],
    ["program.zip", "raise"],
    ["-m", "script", "--", "exit", "list"],
    ["-m", "package", "raise"],
    ["script.py", "hook"],
    ["script.py", "signal"],
    ["wrong.py"],
    ["nothing.py"],
    ["-m", "empty"],
]
MORE_PROGRAMS = [
    ["./elsewhere/../script.py", "exit", "3"],
    ["folder", "exit", "None"],
    ["compiled.pyc", "exit", "300"],
    ["-m", "package.__main__", "exit", "0"],
    ["script.py", "raise"],
    ["empty"],
    ["-m", "nothing"],
    ["-m", "empty.x.y"],
    ["-m", ".script"],
]


@pytest.mark.parametrize(
    "words", [*PROGRAMS, *(pytest.param(words, marks=exhaustive) for words in MORE_PROGRAMS)], ids=" ".join
)
def test_as_python_does(words, programs, dfgnn_run):
    """The same output, exit status and traceback as with the interpreter itself, but for lines in which the
    interpreter names its own frozen modules or says which program it cannot run."""
    theirs = python(*words, cwd=programs)
    ours = dfgnn_run("--impl", "pyg", *words, cwd=programs)
    assert ours.returncode == theirs.returncode
    assert ours.returncode != 0 or ours.stderr.count("dfgnn.run --impl") == 1
    assert ours.stdout == theirs.stdout
    if "nothing.py" in words:
        assert ours.stderr.endswith("error: script: expected a file, got nothing.py\n")
        return
    said = theirs.stderr.replace(f"{sys.executable}: ", "python -m dfgnn.run: ")
    lines = [line for line in said.splitlines(keepends=True) if "frozen runpy" not in line]
    told, mark, _ = ours.stderr.partition("dfgnn.run --impl")
    assert told == "".join(lines) and (mark != "") == (
        words[-1] not in ("nothing", "empty", "empty.x.y", ".script")
    )
    if "signal" in words:
        assert ours.returncode == -signal.SIGINT


@exhaustive
@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_safe_path(programs):
    theirs = python("-P", "script.py", cwd=programs, env={"PYTHONPATH": f"{ROOT}:{programs}"})
    ours = python(
        "-P", "-m", "dfgnn.run", "script.py", cwd=programs, env={"PYTHONPATH": f"{ROOT}:{programs}"}
    )
    assert ours.stdout == theirs.stdout != "" and ours.returncode == theirs.returncode == 0


@exhaustive
@pytest.mark.parametrize("redirected, is_none, status", [("2>&-", True, 3), ("2>/dev/full", False, 0)])
def test_streams_that_are_closed(tmp_path, redirected, is_none, status):
    """If stderr is closed no report is printed, not on stdout either; the exit status is the script's."""
    (tmp_path / "script.py").write_text("import sys; print(sys.stderr is None); sys.exit(int(sys.argv[1]))")
    line = f"{sys.executable} -m dfgnn.run --json report.json script.py {status} {redirected}"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.stdout, done.returncode) == (f"{is_none}\n", status)
    assert json.loads((tmp_path / "report.json").read_text())["seconds"] > 0
