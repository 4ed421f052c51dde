"""The CUDA graphs of one graph that PyTorch's compiler has recorded: forward and backward, and what replays
them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..capturing._run import no_waiting
from ..capturing.constants import LEARNING_RUNS, Constants
from ..capturing.state import Snapshot, forget_streams
from ..runtime import cuda_graphs
from ..runtime import torch_internals as internals
from .arguments import PLAIN
from .sample import put_random_state, random_state


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
    """The CUDA graphs of ``run(*inputs)``, a function of its inputs and of the random generators alone:
    forward and backward. given: the places of inputs that differ between calls, whose numbers are copied;
    the others are the same tensors in each call, parameters, buffers and integers. asked: the leaves of its
    results that are to get gradients; if there is none, all."""

    def __init__(
        self, run: Callable[..., Any], inputs: Sequence[Tensor], given: list[int], snapshot: Snapshot,
        asked: frozenset[int], modified: dict[int, Any],
    ):  # fmt: skip
        self._run, self._given, self._asked, self._modified = run, given, asked, modified
        self._inputs = list(inputs)
        for k in given:
            self._inputs[k] = inputs[k].detach().clone().requires_grad_(inputs[k].requires_grad)
        self._trained = [k for k, x in enumerate(inputs) if x.requires_grad]
        if not self._trained:
            raise RuntimeError("it trains nothing")
        self.device = inputs[self._trained[0]].device
        self.draws = True  # random numbers
        self.reads: list[int] = []  # inputs that are read before they are written
        of = self.device.type
        self._autocast: dict[str, Any] = dict(
            device_type=of, enabled=torch.is_autocast_enabled(of), dtype=torch.get_autocast_dtype(of)
        )
        self.given_up = ""  # why it is no longer replayed
        self._pending: Callable[[], Any] = lambda: None
        self._record(snapshot)

    def _outputs(self) -> list[Any]:
        """Forward: the leaves of the results."""
        out, self._out_tree = tree_flatten(self._run(*self._inputs))
        self._live = _trained(out)
        places = [{k for k, y in enumerate(out) if y is x} for x in self._live]
        self._is_asked = [any(map(self._asks, ks)) for ks in places]
        return out

    def _asks(self, k: int) -> bool:
        return not self._asked or k in self._asked

    def _live_asked(self) -> list[Tensor]:
        return [x for x, asked in zip(self._live, self._is_asked) if asked]

    def _leaf_inputs(self) -> list[Tensor]:
        return [self._inputs[k] for k in self._trained]

    def _gradients(self, outputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(outputs, self._leaf_inputs(), grads, allow_unused=True))

    def _variable(self) -> Iterator[Tensor]:
        """What differs between calls."""
        yield from (x for x in self._inputs if x.is_floating_point())

    def _record(self, snapshot: Snapshot) -> None:
        recorder = cuda_graphs.Recorder(self.device)
        self._constants = constants = Constants(self.device, self._variable, self._modified)
        forget_streams(self._leaf_inputs())
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
                behind = [_nodes(x) - {x.grad_fn} for x in self._live]
                # Whether another result was computed from it. The replayed results do not show that, because
                # all of them come from the same autograd node.
                self._is_part = [any(x.grad_fn in nodes for nodes in behind) for x in self._live]
                self._found, self._backward = recorder.recorded(
                    lambda: self._gradients(self._live_asked(), self._grads)
                )
        tensors = _tensors(out)
        places = {id(x): k for k, x in enumerate(tensors)}
        self._out_leaves = [None if isinstance(x, Tensor) else x for x in out]
        self._places_of_tensors = [(k, places[id(x)]) for k, x in enumerate(out) if isinstance(x, Tensor)]
        self._is_trained = [x.requires_grad for x in tensors]
        self._results = [x.detach() for x in tensors]
        self._live = []  # with the graph of gradients

    def _check(self, out: list[Any]) -> None:
        """Raises RuntimeError for what two CUDA graphs cannot give back."""
        for x in out:
            if not isinstance(x, Tensor) and type(x) not in PLAIN:
                raise RuntimeError(f"it returns a {type(x).__name__}")
        if any(self._inputs[k]._version for k in self._given):
            raise RuntimeError("it modifies its arguments")
        memory = [x.untyped_storage().data_ptr() for x in _tensors(out) if x.numel()]
        of_inputs = {x.untyped_storage().data_ptr() for x in self._inputs}
        if len(set(memory)) < len(memory) or of_inputs.intersection(memory):
            raise RuntimeError(
                "what it returns shares memory with an argument, a parameter or another result"
            )
        if not _trained(out):
            raise RuntimeError("what it returns has no gradient")
        known = set(map(id, self._leaf_inputs()))
        if not all(leaf in known for x in _trained(out) for leaf in _leaves(x)):
            raise RuntimeError("it trains tensors that it makes")

    # ---- calls

    def is_free(self) -> bool:
        """Whether a replay may overwrite what the last one left: its backward has run, or never will."""
        pending = self._pending()
        return pending is None or pending.done

    def is_current(self) -> bool:
        """Whether nothing was modified of which the CUDA graphs hold results."""
        return self._constants.is_current()

    @property
    def has_parts(self) -> bool:
        """Whether another result was computed from one of them."""
        return any(self._is_part)

    def __call__(self, *inputs: Tensor) -> Any:
        tensors = _Replay.apply(self, inputs, *(inputs[k] for k in self._trained))
        trained = [x for x, is_trained in zip(tensors, self._is_trained) if is_trained]
        parts = [(k, x) for k, (x, part) in enumerate(zip(trained, self._is_part)) if part]
        trained[0].grad_fn.parts = [(k, weakref.ref(x)) for k, x in parts]
        out = list(self._out_leaves)
        for k, place in self._places_of_tensors:
            out[k] = tensors[place]
        return tree_unflatten(out, self._out_tree)

    def settle(self) -> None:
        """Ends the sample: what was restored since the capture counts as what was there."""
        self._constants.settle()

    def results(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list, list]:
        """What a call returns, and its gradients. Inputs are taken from the graph that the script has
        made."""
        leaves = list(inputs)
        for k in self._given:
            leaves[k] = inputs[k].detach().requires_grad_(inputs[k].requires_grad)
        out = tree_flatten(call(*leaves))[0]
        asked = _trained([x for k, x in enumerate(out) if self._asks(k)])
        grads = torch.autograd.grad(
            asked, [leaves[k] for k in self._trained], [x.detach() for x in asked], allow_unused=True
        )
        return [x.detach() for x in _tensors(out)], [x for x in grads if x is not None]

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for k in self._given:  # always: x.data may be written to without a version that counts it
            self._inputs[k].detach().copy_(inputs[k])
        self._forward()
        return [x.clone() for x in self._results]

    def differ(self, grads: list[Tensor | None]) -> bool:
        """Whether these gradients are of other results than those that are asked. Zeros in place of one that
        is missing would become NaN where a derivative is infinite; but not in a result of which another one
        was computed, and to which they are added."""
        pairs = zip(grads, self._is_asked, self._is_part)
        return any(
            x is None if asked and not part else x is not None and not asked for x, asked, part in pairs
        )

    def backward(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        for mine, given in zip(self._grads, [x for x, asked in zip(grads, self._is_asked) if asked]):
            mine.zero_() if given is None else mine.copy_(given)
        self._backward()
        found = [x for x in self._found if x is not None]
        copies = iter(internals.foreach_mul(found, 1.0) if found else ())
        return [None if x is None else next(copies) for x in self._found]

    def before(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What a call reads that it changes: the states of PyTorch's generators if it draws random numbers,
        and inputs that it writes."""
        drawn = random_state(self.device.type == "cuda") if self.draws else []
        return drawn, {k: self._inputs[k].detach().clone() for k in self.reads}

    @contextmanager
    def _as_then(self, states: list[Tensor]) -> Iterator[None]:
        """A context in which the call is as it was when the generators had these states: it draws the same
        numbers, as results were compared."""
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(on_gpu, enabled=bool(states)), torch.autocast(**self._autocast):
            if states:
                put_random_state(states, self.device)
            yield

    def backward_as_written(
        self, inputs: Sequence[Tensor], grads: list[Tensor | None], before: tuple[list, dict], what: str,
        retained: Sequence[tuple[int, Tensor]],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients with a graph of their own, or of a call whose CUDA graph has gone on, by the call itself
        once more; no call is replayed from then on. before: `before` of the call. retained: results with
        their places, whose ``grad`` gets what other results add to it."""
        self.given_up, create_graph = what, torch.is_grad_enabled()
        states, were = before
        with torch.enable_grad():
            # As in `results`; gradients of gradients go on to the script's own. Running statistics have been
            # updated already, so what has no gradient is a copy.
            leaves = [
                x.view_as(x) if k in self._trained else were.get(k, x).clone() for k, x in enumerate(inputs)
            ]
            with self._as_then(states):
                out = _trained(tree_flatten(self._run(*leaves))[0])
            asked = [(x, grad) for x, grad in zip(out, grads) if grad is not None]
            trained = [leaves[k] for k in self._trained]
            found = torch.autograd.grad(
                [x for x, _ in asked], [*trained, *(out[k] for k, _ in retained)],
                [grad for _, grad in asked], create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
        for (k, x), total in zip(retained, found[len(trained) :]):
            if total is not None:
                known, direct = x.grad, grads[k]
                x.grad = total if known is None else known + (total if direct is None else total - direct)
        return list(found[: len(trained)])


def no_gradient(asked: str) -> str:
    """What is said where a script asks for a gradient that two CUDA graphs do not have."""
    return (
        f"dfgnn.run --capture: {asked}: expected other tensors than a model's result of which another result "
        "was computed, as its CUDA graphs do not have that gradient: run the script without --capture"
    )


class _Replay(torch.autograd.Function):
    """A call, replayed. Its inputs are the tensors that get gradients."""

    @staticmethod
    def forward(ctx: Any, graphs: CallGraphs, inputs: Sequence[Tensor], *trained: Tensor) -> Any:
        ctx.graphs, ctx.done, ctx.parts, ctx.inputs = graphs, False, [], inputs
        ctx.before = graphs.before()
        graphs._pending = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        results = graphs.forward(inputs)
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
        others = graphs.differ(given)
        if ctx.done or torch.is_grad_enabled() or others or retained:
            what = "from other results than before" if others else "for a second time"
            what = "that asks for the gradient of a result" if retained else what
            what = "with create_graph=True" if torch.is_grad_enabled() else what
            ctx.done = ctx.done or not torch.is_grad_enabled()
            return None, None, *graphs.backward_as_written(ctx.inputs, given, ctx.before, what, retained)
        ctx.done = True
        return None, None, *graphs.backward(given)
