"""What a step that never changes computes from constants alone: asked of the device once, not at each run.

Where the shape of a result or a number on the host depends on values (``x[mask]``, ``int(index.max())``,
``unique``, a tensor made from a list), PyTorch waits for the device, which a CUDA graph cannot. In a step
whose batch stays the same many of these values do not change. `Constants` finds out which, by value
numbering: a tensor's contents are *constant* if they come of constants alone by deterministic operations
that it sees. In two runs that may wait, the results of operations that do are stored; later runs take them.

The leaves are tensors that exist before the step, other than parameters, floating-point buffers and the
optimizer's state, and that the step does not write to; and tensors on the host, by their contents. In both
runs what is constant must have the same contents, also from one use to the next, so that code that PyTorch
does not see (kernels of other packages, NumPy) makes it variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime import torch_internals as internals
from ..runtime.ops import aten
from .contents import (
    at_region,
    crosses,
    digest,
    each_tensor,
    fill,
    fingerprint,
    is_all,
    is_plain,
    kept,
    place_of,
    random_on_host,
    reference_to,
    region_of,
    tensors_in,
    user_line,
)

LEARNING_RUNS = 2  # that may wait
#: What computes sums by an index on a type of device, better if it is constant (:mod:`dfgnn.run.index_sums`).
index_sums: list[Any] = []
# Operations that give memory without values, which the step writes; and others that make it longer.
_EMPTY, _RESIZE = ("empty", "new_empty"), ("resize", "_resize")
_MOST_ON_HOST = 2**20  # bytes of a tensor on the host whose contents are compared
_UNSEEN = "is made by code that PyTorch does not see"


class _Op(NamedTuple):
    """What is known of an operation. written: (position, name) of the arguments that it writes to; why: why
    its results are never constant; waits: its shape or number depends on values; whole: what it writes does
    not depend on what was there, if the argument is all of the memory; empty: its results have no values."""

    written: tuple[tuple[int, str], ...]
    why: str
    waits: bool
    whole: bool
    empty: bool


@cache
def _known(func: Any) -> _Op:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Op((), f"{func} is not an operation of PyTorch", False, False, False)
    written, out = [], False
    for k, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if func.namespace == "c10d" or (alias is not None and alias.is_write):  # collectives do not say it
            written.append((k, argument.name))
            out |= argument.is_out
    name, why = func.__name__, ""
    if func.namespace == "dfgnn":  # a graph is named by its address, which another graph may get
        known = all(argument.name != "graph" for argument in schema.arguments)
    else:
        known = func.namespace in ("aten", "prims")
    if torch.Tag.nondeterministic_seeded in func.tags:
        why = f"depends on random numbers ({name})"
    elif not known:
        why = f"comes of {func.namespace}::{name}, which may be random"
    elif name.startswith(_RESIZE):
        why = f"comes of {name}, which changes a tensor's memory"
    waits = any(tag in func.tags for tag in (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
    # By an index of integers it does not wait; `_indexed` looks for masks.
    waits &= not name.startswith("index")
    whole = out or name.partition(".")[0] in ("zero_", "fill_", "copy_")
    return _Op(tuple(written), why, waits, whole, name.startswith(_EMPTY))


class _Varies(Exception):
    """Contents are not constant; its text says why."""


class _Value:
    """An operation on constants. leaves: the memory of the leaves that it comes of; why: why it is not
    constant after all; prints: the fingerprints of its results; runs: in how many runs they were the same,
    of which run is the last; result: what is returned without computing it, if that is stored; written:
    whether the step writes to that later."""

    __slots__ = ("leaves", "prints", "result", "run", "runs", "why", "written")

    def __init__(self, leaves: frozenset[int], why: str = ""):
        self.leaves, self.why = leaves, why
        self.prints: list[Any] | None = None
        self.result: Any = None
        self.runs, self.run, self.written = 0, -1, False

    def seen(self, run: int, results: list[Any]) -> None:
        """Notes the results in a run."""
        prints = [fingerprint(x) if isinstance(x, Tensor) else repr(x) for x in results]
        if self.prints is not None and self.prints != prints:
            self.why = self.why or _DIFFERS
        self.prints = prints
        self.runs, self.run = self.runs + (self.run != run), run

    def given(self) -> Any:
        """The stored result. Integers are the same tensors each time, of which graphs are cached."""
        return each_tensor(lambda x: x.clone() if self.written else kept(x), self.result)


_DIFFERS = "is not the same in two runs of the step"
_WRITTEN_UNSEEN = "is written to by code that PyTorch does not see"
_WRITTEN = "depends on a tensor that the step writes to"


class _Content(NamedTuple):
    """What a tensor's memory holds. value: None if it varies, because of ``why``; place: which result of
    the value; memory: a reference that keeps the address from being used again; region: of the tensor whose
    fingerprint the value has."""

    value: _Value | None
    place: int
    why: str
    memory: Any
    region: tuple


class Constants(TorchDispatchMode):
    """The mode of a step whose batch stays the same. device: of the step; state: gives all tensors that may
    change between steps; modified: memory of tensors that were found to change, to which more is added. Each
    run is within ``running()``; of the first ones each may wait."""

    # Only operations that wait are replaced, so that compiled code and fused kernels run as without it.
    supports_higher_order_operators = True
    only_looks = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        device: torch.device,
        state: Callable[[], Iterable[Tensor]],
        modified: dict[int, Any] | None = None,
    ):
        super().__init__()
        self._device, self._state = device, state
        self._modified = {} if modified is None else modified
        self._run = 0
        self._values: dict[Any, _Value] = {}
        self._memory: dict[int, _Content] = {}  # of this run
        # Memory of leaves -> a reference to it, the tensor, and its state at the first use.
        self._leaves: dict[int, tuple[Any, Tensor | None, Any]] = {}
        self._variable: dict[int, tuple[Any, str]] = {}  # memory -> a reference to it, and why it varies
        self._random: Any = None
        self._of_sums: dict[int, Any] = {}  # what they use
        self.waited = ""  # the last operation that had to wait, though it must not, and why

    @property
    def learns(self) -> bool:
        return self._run < LEARNING_RUNS

    @contextmanager
    def running(self) -> Iterator[None]:
        self._memory, self.waited, self._random = {}, "", random_on_host()
        for x in self._state():
            if is_plain(x) and (x.is_floating_point() or isinstance(x, torch.nn.Parameter)):
                self._vary(x, "depends on a parameter, a buffer or the optimizer's state")
        with self, internals.made_on_host():
            yield
        if self.learns:
            self._learnt()
        self._memory, self._run = {}, self._run + 1

    def _vary(self, x: Tensor, why: str) -> None:
        if place_of(x) not in self._variable:
            self._variable[place_of(x)] = reference_to(x), why

    def _learnt(self) -> None:
        """Ends a run that learns, in which operations may wait for the device."""
        for _, x, state in self._leaves.values():
            if x is not None and self._state_now(x) != state:
                self._vary(x, _WRITTEN)
        ends = self._run + 1 == LEARNING_RUNS
        used: set[int] = set()
        for value in self._values.values():
            varies = next((self._variable[m][1] for m in value.leaves if m in self._variable), "")
            value.why = value.why or varies or (_DIFFERS if ends and value.runs < LEARNING_RUNS else "")
            if value.result is not None and not value.why and value.prints is not None:
                stored = tensors_in([value.result])
                value.why = _WRITTEN_UNSEEN if stored and [*map(fingerprint, stored)] != value.prints else ""
            if value.why:
                value.result = None
            elif value.result is not None:
                used |= value.leaves
        if ends:
            self._leaves = {
                memory: (reference, x if x is not None and self._matters(x, used) else None, state)
                for memory, (reference, x, state) in self._leaves.items()
            }

    def _matters(self, x: Tensor, used: set[int]) -> bool:
        """Whether the step must be captured again if this leaf is modified. On the device that is so if a
        stored result was computed from it; on the host always, because a CUDA graph computes nothing there,
        unless each run makes the tensor anew."""
        if self._is_on_host(x):
            return not self._values["leaf", place_of(x)].why
        return place_of(x) in used

    def _is_on_host(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and self._device.type != "cpu"

    def _state_now(self, x: Tensor) -> Any:
        """A value that changes if a leaf is modified; on the host also if other code than PyTorch's does
        it."""
        return x._version, digest(x) if self._is_on_host(x) and x.nbytes <= _MOST_ON_HOST else None

    def settle(self) -> None:
        """Takes what was written to leaves, by now, for what they held before."""
        self._leaves = {
            memory: (reference, x, x if x is None else self._state_now(x))
            for memory, (reference, x, _) in self._leaves.items()
        }

    def is_current(self) -> bool:
        """Whether none of the leaves that matter was modified since the runs that learn."""
        if self.learns:
            return True
        modified = {
            memory: reference for memory, (reference, x, state) in self._leaves.items()
            if x is not None and self._state_now(x) != state
        }  # fmt: skip
        self._modified.update(modified)
        return not modified

    # ---- operations ----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        rule = _RULES.get(func)
        return self._apply(func, args, kwargs or {}) if rule is None else rule(self, func, args, kwargs or {})

    def _apply(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        op = _known(func)
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        written = tensors_in([args[k] if k < len(args) else kwargs.get(name) for k, name in op.written])
        # What is overwritten as a whole does not matter.
        overwritten = {id(x) for x in written if op.whole and is_plain(x) and is_all(x)}
        value, why = None, op.why or self._why([x for x in given if id(x) not in overwritten])
        if not why:
            value, why = self._numbered(func, args, kwargs, overwritten)
        waits = crosses(func, given, kwargs) or op.waits and any(x.device == self._device for x in given)
        if value is not None and not self.learns and value.result is not None:
            return self._again(value)
        if waits:
            self._waits(func, why or "is new in this run")
        regions = [self._before_writing(x, id(x) in overwritten) for x in written if is_plain(x)]
        before = {place_of(x) for x in given if is_plain(x)}
        out = func(*args, **kwargs)
        results = [x for x in tensors_in([out]) if is_plain(x)]
        made = [x for x in results if place_of(x) not in before]
        if written:
            made = [x if region is None else at_region(x, region) for x, region in zip(written, regions)]
        if value is not None and self.learns:
            if (
                op.empty
            ):  # so that what code which PyTorch does not see writes there is seen by its fingerprint
                fill(made)
            value.seen(self._run, made if results or written else [out])
            stores = waits or given and not (
                # Numbers that are as well computed anew where a leaf changes, which else is a new capture.
                op.empty or value.leaves & self._modified.keys()
                or any(x.is_floating_point() or x.is_complex() for x in made)
            )  # fmt: skip
            if stores and not written and len(made) == len(results) and not value.why:
                value.result = each_tensor(kept, out) if value.result is None else value.result
        for k, x in enumerate(made):
            self._hold(x, value, k, why)
        return out

    def _why(self, given: list[Tensor]) -> str:
        """Why a tensor of these varies, if one is known to."""
        for x in given:
            if isinstance(x, torch.nn.Parameter):  # of another model, too, which may be written to by .data
                self._vary(x, "depends on a parameter")
            if not is_plain(x):
                return f"is of a kind of its own, {type(x).__name__}, {x.layout}"
            content = self._memory.get(place_of(x))
            if content is not None:
                if content.value is None:
                    return content.why
            elif place_of(x) in self._variable:
                return self._variable[place_of(x)][1]
            elif x.is_inference() or x.grad_fn is not None:
                return _UNSEEN
        return ""

    def _numbered(
        self, func: Any, args: tuple, kwargs: dict[str, Any], overwritten: set[int]
    ) -> tuple[_Value | None, str]:
        """(the value of this operation, ""), or (None, why it varies)."""
        leaves: set[int] = set()
        try:
            key = func, self._key([*args], leaves, overwritten), tuple(kwargs), \
                self._key([*kwargs.values()], leaves, overwritten)  # fmt: skip
        except _Varies as error:
            return None, str(error)
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = _Value(frozenset(leaves), "" if self.learns else "is new in this run")
        return (None, value.why) if value.why else (value, "")

    def _key(self, x: Any, leaves: set[int], overwritten: set[int]) -> Any:
        if isinstance(x, Tensor):
            if id(x) in overwritten:
                return region_of(x)
            content = self._content(x)
            leaves |= content.value.leaves
            return content.value, content.place, x.is_conj(), x.is_neg(), region_of(x)
        if isinstance(x, (tuple, list)):
            return tuple([self._key(y, leaves, overwritten) for y in x])
        if x is None or isinstance(x, (bool, int, float, complex, str)):
            return type(x), repr(x)
        if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return x
        raise _Varies(f"depends on a {type(x).__name__}")

    def _content(self, x: Tensor) -> Any:
        """The content of a tensor that is not known to vary; raises `_Varies`."""
        content: Any = self._memory.get(place_of(x))
        if self._is_on_host(x):
            content = self._of_host(x, content)
        elif content is None:
            content = self._hold(x, self._leaf(x), 0, "")
        elif self.learns and content.value is not None and not _holds(content, x):
            content = self._hold(x, None, 0, _WRITTEN_UNSEEN)
        if content.value is None:
            raise _Varies(content.why)
        return content

    def _leaf(self, x: Tensor) -> _Value:
        value = self._values.get(("leaf", place_of(x)))
        if not self.learns:
            return value or _Value(frozenset(), _UNSEEN)
        if value is None:
            value = self._values["leaf", place_of(x)] = _Value(frozenset([place_of(x)]))
            self._leaves[place_of(x)] = reference_to(x), x, self._state_now(x)
        value.seen(self._run, [x])
        return value

    def _of_host(self, x: Tensor, content: _Content | None) -> _Content:
        """The content of a tensor on the host, which is known by its numbers."""
        if content is None and random_on_host() != self._random:
            return self._hold(x, None, 0, "is made on the host, where random numbers were drawn")
        large = content is None and x.nbytes > _MOST_ON_HOST  # looked at before each replay
        if large or (torch.cuda.is_available() and x.is_pinned()):
            return self._hold(x, None, 0, "is a large tensor on the host, or pinned, and may be filled anew")
        if content is None:
            leaves = self._leaf(x).leaves
        else:
            leaves = content.value.leaves if content.value is not None else frozenset()
        key = "host", region_of(x)[:-1], digest(x)
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = _Value(frozenset(), "" if self.learns else "is new in this run")
        value.leaves |= leaves
        value.runs, value.run = value.runs + (value.run != self._run), self._run
        if content is None:
            return self._hold(x, value, 0, "")
        # The memory's own value stays noted: `_before_writing` asks whether it is a stored result.
        return content._replace(value=None if value.why else value, place=0, why=value.why)

    def _hold(self, x: Tensor, value: _Value | None, place: int, why: str) -> _Content:
        why = value.why if value is not None else why
        value = None if why else value
        content = self._memory[place_of(x)] = _Content(value, place, why, reference_to(x), region_of(x))
        return content

    def _again(self, value: _Value) -> Any:
        out = value.given()
        for k, x in enumerate(tensors_in([out])):
            self._hold(x, value, k, "")
        return out

    def _before_writing(self, x: Tensor, wholly: bool) -> tuple | None:
        """The region whose fingerprint is known after writing to x; None for that of x."""
        content = self._memory.get(place_of(x))
        if content is None or place_of(x) in self._leaves:
            self._vary(x, _WRITTEN)
        value = None if content is None else content.value
        if content is None or value is None:
            return None
        if value.result is not None and not value.written:
            if not self.learns:
                raise RuntimeError(
                    "dfgnn.capture: the step writes to a tensor to which it did not write in its first runs: "
                    "expected a step that does the same each time"
                )
            value.written = True
            value.result = each_tensor(Tensor.clone, value.result)
        return None if wholly else content.region

    # ---- operations that can take other arguments, with which they do not wait -----------------------------

    def _waits(self, func: Any, why: str) -> None:
        if not self.learns:
            self.waited = f"{func} at {user_line()}: what it reads {why}"

    def _places(self, func: Any, mask: Tensor, device: torch.device) -> list[Tensor] | None:
        """The indices at which a mask is True, if its values are constant."""
        why = self._why_varies(mask)
        if why:
            self._waits(func, why)
            return None
        places = self._apply(aten.nonzero.default, (mask,), {})
        if places.device != device:
            places = self._apply(aten._to_copy.default, (places,), {"device": device})
        return list(places.unbind(1))

    def _indexed(self, func, args, kwargs):
        indices: list[Any] = []
        value = args[2] if len(args) > 2 else None
        given = [index for index in args[1] if index is not None]
        if isinstance(value, Tensor) and value.device != args[0].device:
            # One number on the host is filled in by a mask, which does not wait; by indices it is copied.
            is_mask = len(given) == 1 and given[0].dtype in (torch.bool, torch.uint8)
            fills = is_mask and value.numel() == 1 and True not in (*args[3:4], kwargs.get("accumulate"))
            if not fills:
                value = self._apply(aten._to_copy.default, (value,), {"device": args[0].device})
                args = (*args[:2], value, *args[3:])
        else:
            fills = False
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            places = self._places(func, index, args[0].device) if is_mask and not fills else None
            indices += [index] if places is None else places
        args = (args[0], indices, *args[2:])
        if len(indices) == 1 and value is not None:
            return self._sum(func, args, kwargs, indices[0])
        return self._apply(func, args, kwargs)

    def _added(self, func, args, kwargs):
        return self._sum(func, args, kwargs, args[2] if len(args) > 2 else None)

    def _sum(self, func: Any, args: tuple, kwargs: dict[str, Any], index: Any) -> Any:
        """A sum by an index, whose order may be kept if the index is constant."""
        sums = next((x for x in index_sums if x.device_type == self._device.type), None)
        if sums is None or not isinstance(index, Tensor) or self._why_varies(index):
            return self._apply(func, args, kwargs)
        with sums.constant(self._of_sums):
            return self._apply(func, args, kwargs)

    def _why_varies(self, x: Tensor) -> str:
        """Why a tensor is not constant; "" if it is."""
        why = self._why([x])
        if not why:
            try:
                self._content(x)
            except _Varies as error:
                why = str(error)
        return why

    def _selected(self, func, args, kwargs):
        x, mask = torch.broadcast_tensors(*args, *kwargs.values())
        places = self._places(func, mask, x.device)
        if places is None:
            return func(x, mask)
        return self._apply(aten.index.Tensor, (x, places), {})

    def _copied(self, func, args, kwargs):
        to, source = args[:2]
        if to.device != source.device and is_plain(source):
            source = self._apply(aten._to_copy.default, (source,), {"device": to.device})
        return self._apply(func, (to, source, *args[2:]), kwargs)

    def _moved(self, func, args, kwargs):
        """A tensor gets other memory (copy.deepcopy does it); what either memory holds stays the same. One
        that is returned each time must not be that tensor."""
        self._before_writing(args[0], True)
        return func(*args, **kwargs)

    def _lifted(self, func, args, kwargs):
        """A tensor that is made from numbers of the host."""
        out = func(*args, **kwargs)
        if is_plain(out) and out.device.type == "cpu" and not out.is_inference():
            self._of_host(out, None)
        return out


_RULES: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: Constants._indexed,
    aten.index_put.default: Constants._indexed,
    aten.index_put_.default: Constants._indexed,
    aten._index_put_impl_.default: Constants._indexed,
    aten._unsafe_index.Tensor: Constants._indexed,
    aten.index_add.default: Constants._added,
    aten.index_add_.default: Constants._added,
    aten.scatter_add.default: Constants._added,
    aten.scatter_add_.default: Constants._added,
    aten.masked_select.default: Constants._selected,
    aten.copy_.default: Constants._copied,
    aten.lift_fresh.default: Constants._lifted,
    **{getattr(aten.set_, name): Constants._moved for name in aten.set_.overloads()},
}


def _holds(content: _Content, x: Tensor) -> bool:
    """Whether x's memory still holds what it did."""
    prints = None if content.value is None else content.value.prints
    return prints is None or fingerprint(at_region(x, content.region)) == prints[content.place]
