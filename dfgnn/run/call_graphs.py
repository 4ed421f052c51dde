"""The CUDA graphs of one call of a module: forward and backward, and what replays them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..capturing._run import no_waiting
from ..capturing.constants import LEARNING_RUNS, Constants
from ..capturing.state import Snapshot, buffers_stay, forget_streams
from ..capturing.state import tensors_of as state_of
from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from .arguments import PLAIN, Arguments, Made, assign
from .sample import put_random_state, random_state, tensors_of


class _Given(NamedTuple):
    """A result that is an argument: which of the leaves, or which object."""

    place: int
    is_object: bool


def _tensors(out: list[Any]) -> list[Tensor]:
    """The tensors among results, each once."""
    return list({id(x): x for x in out if isinstance(x, Tensor)}.values())


def _trained(out: list[Any]) -> list[Tensor]:
    return [x for x in _tensors(out) if x.requires_grad]


def _nodes(x: Tensor) -> set[Any]:
    """The autograd nodes on which a result depends."""
    found: set[Any] = set()
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _leaves(x: Tensor) -> set[int]:
    """The ids of the tensors to whose gradients that of x leads."""
    nodes = (node for node in _nodes(x) if hasattr(node, "variable"))
    return {id(x)} if x.grad_fn is None else {id(node.variable) for node in nodes}


class CallGraphs:
    """The CUDA graphs of one call: forward and backward."""

    def __init__(
        self, call: Callable, module: nn.Module, arguments: Arguments, snapshot: Snapshot,
        assigned: list[tuple[dict[str, Any], str]], held: list[Tensor], modified: dict[int, Any],
        asked: frozenset[int] = frozenset(),
    ):  # fmt: skip
        """asked: the leaves of what the model returns that are to get gradients; if there is none, all."""
        self._asked = asked
        self._call, self._module, self._sample = call, weakref.ref(module), arguments
        self._assigned, self._modified = list(assigned), modified
        leaves = arguments.leaves
        self._places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        # Held, so that their ids, which tell calls apart, stay theirs, and so that what is cached for their
        # edges stays alive.
        self._held = [None if k in self._places else x for k, x in enumerate(leaves)] + held
        self._static = list(leaves)
        for k in self._places:
            self._static[k] = leaves[k].detach().clone().requires_grad_(leaves[k].requires_grad)
        made = arguments.made_of(self._static)
        self._arguments = Arguments(made.args, made.kwargs)  # which hold no tensors of the script's
        self._parameters = [x for x in module.parameters() if x.requires_grad]
        if not self._parameters:
            raise RuntimeError("it has no parameter that trains")
        self._trained = [k for k in self._places if leaves[k].requires_grad]
        self.draws = True  # random numbers
        self.reads_buffers = False  # which it writes, too
        of = self._parameters[0].device.type
        self._autocast: dict[str, Any] = dict(
            device_type=of, enabled=torch.is_autocast_enabled(of), dtype=torch.get_autocast_dtype(of)
        )
        self.given_up = ""  # why it is no longer replayed
        self._pending: Callable[[], Any] = lambda: None
        self._record(snapshot)

    def _outputs(self) -> list[Any]:
        """Forward: the leaves of what the model returns."""
        module = self._module()
        assert module is not None
        made = self._arguments.made_of(self._static)
        for own, name in self._assigned:
            own[name] = None  # a call that read what the last one left would give other numbers
        with buffers_stay(module):
            out, self._out_tree = tree_flatten(self._call(module, *made.args, **made.kwargs))
        self._returned, changed = len(out), made.assigned()
        self._changed = [place for place, _ in changed]
        out += [own[name] for own, name in self._assigned] + [x for _, x in changed]
        # A result that is an argument is that of each call.
        given = {id(x): _Given(k, False) for k, x in enumerate(self._static) if isinstance(x, Tensor)}
        given |= {id(x): _Given(k, True) for k, x in enumerate(made.objects)}
        out = [given.get(id(x), x) for x in out]
        self._live = _trained(out)
        places = [{k for k, y in enumerate(out) if y is x} for x in self._live]
        self._is_asked = [any(map(self._asks, ks)) for ks in places]
        return out

    def _asks(self, k: int) -> bool:
        """Whether a leaf of what the model returns, or behind them what it assigns, is to get a gradient."""
        return not self._asked or k in self._asked or k >= self._returned

    def _live_asked(self) -> list[Tensor]:
        return [x for x, asked in zip(self._live, self._is_asked) if asked]

    def _inputs(self) -> list[Tensor]:
        return [*self._parameters, *(self._static[k] for k in self._trained)]

    def _gradients(self, outputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(outputs, self._inputs(), grads, allow_unused=True))

    def _variable(self) -> Iterator[Tensor]:
        """What differs between calls."""
        module = self._module()
        if module is not None:
            yield from state_of(module, None)
        yield from (self._static[k] for k in self._places)

    def _record(self, snapshot: Snapshot) -> None:
        recorder = cuda_graphs.Recorder(device := self._parameters[0].device)
        self._constants = constants = Constants(device, self._variable, self._modified)
        forget_streams(self._parameters)
        with recorder.running(), cuda_graphs.captured_step():
            for k in range(LEARNING_RUNS + 1):
                last = no_waiting(recorder, constants) if k == LEARNING_RUNS else nullcontext()
                with last, constants.running():
                    out = self._outputs()
                    self._check(out)
                    trained = self._live_asked()
                    self._gradients(trained, [torch.zeros_like(x) for x in trained])
            del out, trained
            snapshot.restore()
            with constants.running():
                out, self._forward = recorder.recorded(self._outputs)
                self._grads = [torch.zeros_like(x) for x in self._live_asked()]
                reached = [_leaves(x) for x in self._live]
                behind = [_nodes(x) - {x.grad_fn} for x in self._live]
                # Whether another result was computed from it. The replayed results do not show that, because
                # all of them come from the same autograd node.
                self._is_part = [any(x.grad_fn in nodes for nodes in behind) for x in self._live]
                self._reached = [[id(x) in leaves for x in self._inputs()] for leaves in reached]
                self._found, self._backward = recorder.recorded(
                    lambda: self._gradients(self._live_asked(), self._grads)
                )
        tensors = _tensors(out)
        places = {id(x): k for k, x in enumerate(tensors)}
        self._out_leaves = [None if isinstance(x, Tensor) else x for x in out]
        self._given = [(k, x) for k, x in enumerate(out) if isinstance(x, _Given)]
        self._places_of_tensors = [(k, places[id(x)]) for k, x in enumerate(out) if isinstance(x, Tensor)]
        self._is_trained = [x.requires_grad for x in tensors]
        self._results = [x.detach() for x in tensors]
        self._live = []  # with the graph of gradients

    def _check(self, out: list[Any]) -> None:
        """Raises RuntimeError for what two CUDA graphs cannot give back."""
        for x in out:
            if not isinstance(x, (Tensor, _Given)) and type(x) not in PLAIN:
                raise RuntimeError(f"it returns a {type(x).__name__}")
        if any(self._static[k]._version for k in self._places):
            raise RuntimeError("it modifies its arguments")
        given = [x for x in (*self._static, *self._parameters, *self._held) if isinstance(x, Tensor)]
        memory = [x.untyped_storage().data_ptr() for x in _tensors(out) if x.numel()]
        if len(set(memory)) < len(memory) or {x.untyped_storage().data_ptr() for x in given}.intersection(
            memory
        ):
            raise RuntimeError(
                "what it returns shares memory with an argument, a parameter or another result"
            )
        if not _trained(out):
            raise RuntimeError("what it returns has no gradient")
        known = set(map(id, self._inputs()))
        if not all(leaf in known for x in _trained(out) for leaf in _leaves(x)):
            raise RuntimeError("it trains tensors that are neither its parameters nor its arguments")

    # ---- calls

    @property
    def has_parts(self) -> bool:
        """Whether another result was computed from one of them."""
        return any(self._is_part)

    def is_free(self) -> bool:
        """Whether a replay may overwrite what the last one left: its backward has run, or never will."""
        pending = self._pending()
        return pending is None or pending.done

    def is_current(self) -> bool:
        """Whether nothing was modified of which the CUDA graphs hold results."""
        return self._constants.is_current()

    def __call__(self, arguments: Arguments) -> Any:
        leaves, objects = arguments.leaves, arguments.objects
        tensors = _Replay.apply(self, leaves, *self._parameters, *(leaves[k] for k in self._trained))
        trained = [x for x, is_trained in zip(tensors, self._is_trained) if is_trained]
        parts = [(k, x) for k, (x, part) in enumerate(zip(trained, self._is_part)) if part]
        trained[0].grad_fn.parts = [(k, weakref.ref(x)) for k, x in parts]
        out = list(self._out_leaves)
        for k, x in self._given:
            out[k] = objects[x.place] if x.is_object else leaves[x.place]
        for k, place in self._places_of_tensors:
            out[k] = tensors[place]
        results = iter(out)
        returned = tree_unflatten([next(results) for _ in range(self._out_tree.num_leaves)], self._out_tree)
        for own, name in self._assigned:
            own[name] = next(results)
        for where in self._changed:
            assign(objects, where, next(results))
        return returned

    def settle(self) -> None:
        """Ends the sample: what was restored since the capture counts as what was there."""
        self._constants.settle()
        self._sample = self._arguments

    def replayed(self, made: Made) -> Any:
        return self(Arguments(made.args, made.kwargs))

    def written(self, made: Made) -> Any:
        module = self._module()
        assert module is not None
        return self._call(module, *made.args, **made.kwargs)

    def results(self, call: Callable[[Made], Any]) -> tuple[list[Tensor], list[Tensor]]:
        """What a call of the sample returns or assigns to its arguments, and its gradients."""
        leaves = list(self._sample.leaves)
        for k in self._trained:  # one may be made of another, by the script: its graph is not to be run
            leaves[k] = leaves[k].detach().requires_grad_()
        made = self._sample.made_of(leaves)
        returned, changed = tree_flatten(call(made))[0], tensors_of([x for _, x in made.assigned()])
        left = tensors_of([own[name] for own, name in self._assigned])
        outputs = [*tensors_of(returned), *changed, *left]
        asked = [*tensors_of([x for k, x in enumerate(returned) if self._asks(k)]), *changed]
        trained = [x for x in asked if x.requires_grad and not any(x is y for y in leaves)]
        inputs = [*self._parameters, *(leaves[k] for k in self._trained)]
        grads = torch.autograd.grad(trained, inputs, [x.detach() for x in trained], allow_unused=True)
        return [x.detach() for x in outputs], [x for x in grads if x is not None]

    def forward(self, leaves: list[Any]) -> list[Tensor]:
        for k in self._places:  # always: x.data may be written to without a version that counts it
            self._static[k].detach().copy_(leaves[k])
        self._forward()
        return [x.clone() for x in self._results]

    def backward(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        for mine, given in zip(self._grads, [x for x, asked in zip(grads, self._is_asked) if asked]):
            mine.zero_() if given is None else mine.copy_(given)
        self._backward()
        # An input has no gradient, instead of zeros, if no result that was given a gradient depends on it.
        asked = [reached for reached, given in zip(self._reached, grads) if given is not None]
        has = [any(column) for column in zip(*asked)] or [False] * len(self._found)
        found = [x for x, has_one in zip(self._found, has) if has_one and x is not None]
        copies = iter(internals.foreach_mul(found, 1.0) if found else ())
        pairs = zip(self._found, has)
        return [next(copies) if has_one and x is not None else None for x, has_one in pairs]

    def before(self) -> tuple[list[Tensor], dict[tuple[int, str], Tensor]]:
        """What a call reads that it changes: the states of PyTorch's generators if it draws random numbers,
        and buffers."""
        module = self._module()
        parts = enumerate(module.modules()) if module is not None and self.reads_buffers else ()
        buffers = {
            (k, name): x.detach().clone()
            for k, part in parts for name, x in part._buffers.items() if x is not None
        }  # fmt: skip
        return random_state(self._parameters[0].is_cuda) if self.draws else [], buffers

    @contextmanager
    def _as_then(self, states: list[Tensor]) -> Iterator[None]:
        """A context in which the call is as it was when the generators had these states: it draws the same
        numbers, as results were compared."""
        device = self._parameters[0].device
        on_gpu = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(on_gpu, enabled=bool(states)), torch.autocast(**self._autocast):
            if states:
                put_random_state(states, device)
            yield

    def backward_as_written(
        self, leaves: list[Any], grads: list[Tensor | None], before: tuple[list, dict], what: str,
        retained: Sequence[tuple[int, Tensor]] = (),
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients with a graph of their own, or of a call whose CUDA graph has gone on, by the call itself
        once more; no call is replayed from then on. before: `before` of the call. retained:
        results with their places, whose ``grad`` gets what other results add to it."""
        module = self._module()
        assert module is not None  # its parameters are inputs of what asks
        self.given_up, create_graph = what, torch.is_grad_enabled()
        with torch.enable_grad():  # as in `results`; gradients of gradients go on to the script's own
            leaves = [x.view_as(x) if k in self._trained else x for k, x in enumerate(leaves)]
        made = self._arguments.made_of(leaves)
        attributes = [(own, name, own[name]) for own, name in self._assigned]
        # Running statistics have been updated; this call has its own.
        buffers = [
            (k, part._buffers, name, x)
            for k, part in enumerate(module.modules()) for name, x in part._buffers.items()
        ]  # fmt: skip
        states, were = before
        for k, own, name, x in buffers:
            own[name] = None if x is None else were.get((k, name), x).detach().clone()
        with torch.enable_grad():
            with self._as_then(states):
                out = tree_flatten(self._call(module, *made.args, **made.kwargs))[0]
            out += [own[name] for own, name in self._assigned] + [x for _, x in made.assigned()]
            out = _trained([x for x in out if not any(x is y for y in leaves)])
            asked = [(x, grad) for x, grad in zip(out, grads) if grad is not None]
            inputs = [*self._parameters, *(leaves[k] for k in self._trained)]
            found = torch.autograd.grad(
                [x for x, _ in asked], [*inputs, *(out[k] for k, _ in retained)], [grad for _, grad in asked],
                create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
        for (k, x), total in zip(retained, found[len(inputs) :]):
            if total is not None:
                known, direct = x.grad, grads[k]
                x.grad = total if known is None else known + (total if direct is None else total - direct)
        for _, own, name, x in buffers:
            own[name] = x
        for own, name, value in attributes:
            own[name] = value
        return list(found[: len(inputs)])


def no_gradient(asked: str) -> str:
    """What is said where a script asks for a gradient that two CUDA graphs do not have."""
    return (
        f"dfgnn.run --capture: {asked}: expected other tensors than a model's result of which another result "
        "was computed, as its CUDA graphs do not have that gradient: run the script without --capture"
    )


class _Replay(torch.autograd.Function):
    """A call, replayed. Its inputs are the tensors that get gradients."""

    @staticmethod
    def forward(ctx: Any, graphs: CallGraphs, leaves: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, ctx.done, ctx.parts, ctx.leaves = graphs, False, [], leaves
        ctx.before = graphs.before()
        graphs._pending = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        results = graphs.forward(leaves)
        ctx.mark_non_differentiable(*[x for x, trained in zip(results, graphs._is_trained) if not trained])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        graphs: CallGraphs = ctx.graphs
        given = [x for x, trained in zip(grads, graphs._is_trained) if trained]
        parts = [(k, x) for k, ref in ctx.parts if (x := ref()) is not None]
        if any(x._backward_hooks for _, x in parts):
            raise RuntimeError(no_gradient("register_hook"))
        retained = [(k, x) for k, x in parts if x.retains_grad]
        unasked = any(x is not None and not asked for x, asked in zip(given, graphs._is_asked))
        if ctx.done or torch.is_grad_enabled() or retained or unasked:
            what = "with create_graph=True" if torch.is_grad_enabled() else "for a second time"
            if not (ctx.done or torch.is_grad_enabled()):
                what = "that asks for the gradient of a result" if retained else "from a result unused before"
            ctx.done = ctx.done or not torch.is_grad_enabled()
            return None, None, *graphs.backward_as_written(ctx.leaves, given, ctx.before, what, retained)
        ctx.done = True
        return None, None, *graphs.backward(given)
