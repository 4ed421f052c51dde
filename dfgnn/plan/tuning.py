"""`Graph.autotune`: chooses a graph's schedules by measuring them, and caches the choice in a file."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import NEED_DST, SCORE_OF_LAYER, SCORE_TABLE, Backward, Forward, ForwardResults
from ..runtime.ops import attention_backward, attention_forward
from ..runtime.timing import timings
from .planner import Planner
from .plans import Shape, check_shape, padded

_WHERE = "Graph.autotune"
# A candidate must be faster than the estimated choice by this factor, because less may be noise.
_GAIN = 1.02
# The checksum adds up at most this number of elements at a time, so that it needs little memory.
_PART = 2**24


@dataclass(frozen=True)
class Tuning:
    """The schedules that `Graph.autotune` chose.

    forward, reverse: a schedule with its bound, "natural<=512"; reverse is None without backward.
    milliseconds: the time of every candidate by direction, the estimated choice first; empty if the schedules
    were read from the file.
    """

    forward: str
    reverse: str | None
    milliseconds: dict[str, dict[str, float]]

    def __str__(self) -> str:
        lines = []
        for direction, chosen in (("forward", self.forward), ("reverse", self.reverse)):
            if chosen is None:
                continue
            times = self.milliseconds.get(direction, {})
            text = ", ".join(f"{name} {ms:.4g} ms" for name, ms in times.items()) or "from the file"
            lines.append(f"{direction}: {chosen} ({text})")
        return "\n".join(lines)


def autotune(
    graph,
    layer: str,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    backward: bool,
    seconds: float,
    file: str | os.PathLike | None,
) -> Tuning:
    """See `Graph.autotune`."""
    if layer not in SCORE_OF_LAYER:
        raise ValueError(f"{_WHERE}: layer: expected one of {', '.join(SCORE_OF_LAYER)}, got {layer!r}")
    check_shape(_WHERE, num_heads, head_dim, dtype)
    if seconds <= 0:
        raise ValueError(f"{_WHERE}: seconds: expected a positive number, got {seconds!r}")
    path = None if file is None else Path(file)
    entries = _read(path) if path else {}
    shape = Shape(num_heads, padded(head_dim, dtype, graph.device), dtype, layer)
    directions = {"forward": False, "reverse": True} if backward else {"forward": False}
    key = _key(graph, layer, num_heads, head_dim, dtype) if path else ""

    known = entries.get(key, {})
    if all(_is_possible(graph, shape, reverse, known.get(name)) for name, reverse in directions.items()):
        for name, reverse in directions.items():
            graph._planner.adopt(shape, reverse, known[name], "measured earlier, read from a file")
        return Tuning(known["forward"], known["reverse"] if backward else None, {})

    chosen, times = {}, {}
    for name, reverse in directions.items():
        chosen[name], times[name] = _tune(graph, shape, reverse, seconds)
    if path:
        _add(path, key, chosen)
    return Tuning(chosen["forward"], chosen.get("reverse"), times)


def _is_possible(graph, shape: Shape, reverse: bool, schedule: str | None) -> bool:
    """Whether the graph can be planned with this schedule. Another version may have written the file."""
    try:
        graph._planner.plan(shape, reverse, schedule)
    except (TypeError, ValueError):
        return False
    return True


def _tune(graph, shape: Shape, reverse: bool, seconds: float) -> tuple[str, dict[str, float]]:
    """The fastest schedule of a direction, which becomes "auto", and the times of all candidates in
    milliseconds."""
    planner: Planner = graph._planner
    estimate = planner.estimate(shape, reverse)
    first = f"{estimate.schedule}<={estimate.max_edges}"
    names = [first, *(x for x in planner.alternatives(shape, reverse) if x != first)]
    call = _call(graph, shape, backward=reverse)
    times: dict[str, float] = {}
    with planner.trial():
        for name in names:
            planner.adopt(shape, reverse, name, "a candidate")
            found = timings(call, graph.device, seconds / len(names))
            times[name] = found.get("kernels", {}).get("median", found["eager"]["median"])
    best = min(times, key=times.__getitem__)
    if times[best] * _GAIN > times[first]:
        best = first
    on_rows = [name for name in times if not name.startswith("tiles")]
    for name in (min(on_rows, key=times.__getitem__), best):  # calls with edge tensors need one on rows
        why = f"fastest of {len(times)} measured: {times[name]:.4g} ms, the estimate's {times[first]:.4g} ms"
        planner.adopt(shape, reverse, name, why)
    return best, times


def _call(graph, shape: Shape, backward: bool) -> Callable[[], Any]:
    """A function that runs the layer's attention, with backward if asked, on the same random inputs."""
    heads, dim, dtype, layer = shape
    assert layer is not None
    generator = torch.Generator(graph.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=graph.device).to(dtype)

    acc = torch.promote_types(dtype, torch.float32)
    score = SCORE_TABLE[SCORE_OF_LAYER[layer]]
    inputs: dict[str, Any] = {
        "score": score.number,
        "value": normal(graph.num_src, heads, dim),
        "num_dst": graph.num_dst,
        "negative_slope": 1.0 if layer == "dot" else 0.2,
        "scale": dim**-0.5 if layer == "dot" else 1.0,
        "dropout_p": 0.0,
        "flags": 0,
        "return_attention": False,
        "save_positive": backward and layer == "gat",
        "need": NEED_DST,
    }
    if layer == "gat":
        inputs |= {"src": normal(graph.num_src, heads).to(acc), "dst": normal(graph.num_dst, heads).to(acc)}
    else:
        inputs["dst"] = normal(graph.num_dst, heads, dim)
        inputs |= {"src": normal(graph.num_src, heads, dim)} if "src" in score.inputs else {}
        inputs |= {"attn": normal(heads, dim) / dim**0.5} if "attn" in score.inputs else {}
    inputs["grad_out"] = normal(graph.num_dst, heads, dim)

    def run() -> Any:
        arguments = graph._planner.arguments(*shape, schedule="auto", edges=False, backward=backward)
        named = inputs | arguments._asdict()
        with torch.no_grad():
            found = ForwardResults(*attention_forward(*_named(Forward, named)))
            if not backward:
                return found
            if not named["save_positive"]:
                found = found._replace(positive=None, positive_mass=None)
            named |= found._replace(attention=None)._asdict()
            return attention_backward(*_named(Backward, named))

    return run


def _named(arguments, known: dict[str, Any]) -> tuple:
    """An operator's arguments in order; None for those that `known` lacks."""
    return arguments(*(known.get(name) for name in arguments._fields))


# ---- the file --------------------------------------------------------------------------------------


def _key(graph, layer: str, num_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """The key of a file's entry: device, shape, degree statistics and a checksum of the edges."""
    device = graph.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
    stats = asdict(graph.degree_stats()) | {"checksum": _checksum(graph)}
    shape = f"{layer} {num_heads}x{head_dim} {str(dtype).removeprefix('torch.')}"
    return f"{place} | {shape} | " + " ".join(f"{name}={value:.6g}" for name, value in stats.items())


def _checksum(graph) -> int:
    """A checksum of the CSR by destination, so that a reordered graph has an entry of its own."""
    total = 0
    for tensor in graph.csr()[:2]:
        for begin in range(0, tensor.numel(), _PART):
            part = tensor[begin : begin + _PART].long()
            place = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device)
            total += int(((part + 1) * (place * 2654435761 % 1000003)).sum())
    return total % 10**6


def _read(path: Path) -> dict[str, dict]:
    """All entries, also those of other versions: `_is_possible` checks an entry before it is used."""
    _check_regular(path)
    data = path.read_bytes() if path.exists() else b""
    if not data:  # the file may be empty because another process has opened it and not written yet
        return {}
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(
            f"{_WHERE}: file: expected JSON of an earlier call in {path}, got {error}"
        ) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError(f"{_WHERE}: file: expected JSON of an earlier call in {path}, got another JSON")
    return entries


def _check_regular(path: Path) -> None:
    """Raises ValueError unless the file is a regular one: writing replaces the file, and reading a pipe would
    wait."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = next((name for name, test in _KINDS.items() if test(mode)), "something else")
        raise ValueError(
            f"{_WHERE}: file: expected a regular file, or none yet, at {path}, got {kind}; None uses no file"
        )


_KINDS = {
    "a directory": stat.S_ISDIR, "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK,
}  # fmt: skip


def _add(path: Path, key: str, schedules: dict[str, str]) -> None:
    """Adds an entry to the file, one writer at a time. A new file with the old one's owner and mode replaces
    it in one step, so that a process that reads meanwhile sees either the old or the new one."""
    path = Path(os.path.realpath(path))  # the file itself, not a link to it
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_regular(path)
    with _locked(path) as old:
        entries = _read(path)
        entries[key] = entries.get(key, {}) | schedules
        file, name = tempfile.mkstemp(".tmp", path.name, path.parent)
        try:
            with os.fdopen(file, "w") as new:
                with suppress(PermissionError):
                    os.fchown(file, old.st_uid, old.st_gid)
                os.fchmod(file, stat.S_IMODE(old.st_mode))
                new.write(json.dumps(entries, indent=1) + "\n")
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[os.stat_result]:
    """Locks the file at `path`, which is made if there is none, and yields its `os.stat` result."""
    while True:
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            state, current = os.fstat(file), None
            with suppress(FileNotFoundError):
                current = os.stat(path)
            if current and os.path.samestat(state, current):  # else another writer has replaced it meanwhile
                yield state
                return
        finally:
            os.close(file)
