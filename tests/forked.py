"""Interpreters: new ones, and forks of one process that has imported the libraries, which start at once."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import gc, json, os, sys
exec(sys.argv[1])
gc.collect()
gc.freeze()  # or every fork walks through it when it ends, which takes longer than most of what they run
for line in sys.stdin:
    order = json.loads(line)
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    os._exit(0)
os.chdir(order["cwd"])
os.environ.update(order["environment"])
sys.path[:0] = order["path"]
for number in (1, 2):
    os.dup2(os.open(order["streams"][number - 1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
if order["code"] is None:
    import dfgnn.run.command, torch
    torch.cuda.device_count = lambda: order["gpus"]
    sys.exit(dfgnn.run.command.main(order["words"]))
sys.argv = ["-c", *order["words"]]
exec(order["code"])
"""
PLAIN = "import torch, torch._dynamo"
LAYERS = "import dfgnn.run.command\nfrom dfgnn.run.layers import import_libraries\nimport_libraries('pyg')"


def python(*words, cwd, env=(), **options):
    """An interpreter with these arguments, and stdout and stderr as text."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **dict(env)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, text=True, timeout=300, env=env, cwd=cwd, **options)


class Interpreters:
    def __init__(self, imports):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, imports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        )  # fmt: skip

    def program(self, file, *words, **options):
        """``python file words...``"""
        return self(
            *words, code=f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')", **options
        )

    def __call__(self, *words, code=None, cwd=".", path=(), environment=(), gpus=0):
        """``python -m dfgnn.run`` with these words, or ``python -c`` with this code."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("stdout", "stderr")]
            order = {
                "words": list(map(str, words)), "code": code, "cwd": str(cwd), "path": list(map(str, path)),
                "environment": dict(environment), "gpus": gpus, "streams": list(map(str, streams)),
            }  # fmt: skip
            print(json.dumps(order), file=self.process.stdin, flush=True)
            status = int(self.process.stdout.readline())
            return subprocess.CompletedProcess(words, status, *(stream.read_text() for stream in streams))

    def close(self):
        self.process.kill()  # closing its stdin may not end it: workers of tests may hold that open
        self.process.wait(20)
