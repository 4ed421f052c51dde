"""What a compilation found: each attention with the form that it got, or the reason why it kept its own."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.fx import Node

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
# Code of libraries, and what torch_geometric generates of a layer.
_LIBRARIES = re.compile(
    r"/site-packages/|/dist-packages/|_propagate_|_edge_updater_|/torch/|/dfgnn/switch/|^<"
)


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else "unknown line"


class Found(NamedTuple):
    """A softmax, weighted sum or segment sum. form: what it was rewritten into; "" for not at all. left: it
    could have been, and is too small."""

    place: Place
    form: str
    reason: str
    left: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.form or f'as it was: {self.reason}'}"


class Report(NamedTuple):
    """What was found in one graph."""

    found: list[Found]

    @property
    def rewritten(self) -> list[Found]:
        return [x for x in self.found if x.form]

    @property
    def refused(self) -> list[Found]:
        return [x for x in self.found if not x.form]

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "no attention was found"


def place_of(node: Node) -> Place:
    """The innermost line of the user's code that made a node; of a library's where there is no other."""
    trace: Any = node.meta.get("stack_trace") or ""
    frames = [Place(file, int(line), function) for file, line, function in _FRAME.findall(trace)]
    own = [frame for frame in frames if not _LIBRARIES.search(frame.file)]
    return (own or frames or [Place("", 0, "")])[-1]
