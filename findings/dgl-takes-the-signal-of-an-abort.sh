#!/usr/bin/env bash
# dgl 1.1.3: importing it replaces the handler of SIGABRT, also one that Python's faulthandler has just installed, so that a
# process that aborts prints no Python traceback any more. The handler of SIGSEGV stays. faulthandler.enable() after the
# import does nothing, because it is enabled; faulthandler.disable() before it helps.
# Seen: the library that holds the handler is libpython (or the interpreter), then libdgl.so, then libpython again. Source:
# libdgl holds a library of small matrix products, whose start-up installs a handler that cleans up and ends the process.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check dgl==1.1.3 torch==2.13.0 numpy==2.4.6 packaging==26.3
cd "$folder"
DGLBACKEND=pytorch "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import ctypes
import faulthandler
import signal

libc = ctypes.CDLL(None)


class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("rest", ctypes.c_char * 256)]


class Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]


def holder(number):
    action, symbol = Action(), Symbol()
    libc.sigaction(number, None, ctypes.byref(action))
    libc.dladdr(ctypes.c_void_p(action.handler), ctypes.byref(symbol))
    return symbol.file.decode().rpartition("/")[2]


faulthandler.enable()
python = holder(signal.SIGABRT)
import dgl

after = holder(signal.SIGABRT), holder(signal.SIGSEGV)
faulthandler.enable()
again = holder(signal.SIGABRT)
faulthandler.disable()
faulthandler.enable()
print(dgl.__version__, python, after, again, holder(signal.SIGABRT))
assert after == ("libdgl.so", python) and again == "libdgl.so" and holder(signal.SIGABRT) == python != "libdgl.so"
PYTHON
