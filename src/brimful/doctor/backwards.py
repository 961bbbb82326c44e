"""What backward does in a watched run: which parameters it reaches, and which gradients it finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from brimful.batches import tensors_in
from brimful.doctor.evidence import Backward
from brimful.doctor.recording import WatchedOps
from brimful.torch_utils.graphs import reached_from, saved_for_no_leaf, scaling_of
from brimful.torch_utils.lines import calling_line
from brimful.torch_utils.replaced import replaced


class Backwards:
    """Notes the calls of backward in recorded steps."""

    def __init__(self, ops: WatchedOps) -> None:
        self._ops = ops
        self.noted: list[Backward] = []
        self.reached: set[int] = set()
        """Leaves that backward has reached in this step, by id."""
        self.reached_nodes: set[int] = set()
        """Numbers of the autograd nodes that backward has reached in this step."""
        self.ever_reached: set[int] = set()
        self._retaining: list[tuple[int, set[int]]] = []
        """Places in `noted` of calls of this step that keep graphs, with the numbers of their nodes."""
        self._updates, self.is_sharded = 0, False
        """Changes of parameters, and whether FSDP keeps gradients elsewhere than at what backward reaches."""
        self._versions: dict[int, int] = {}
        """Version of each leaf when backward reached it last, by id."""
        self.adding: dict[str, None] = {}
        """Lines of backward that add to gradients which an optimizer has used, and will use again."""
        self.frozen_bytes: dict[str, int] = {}
        """Bytes that graphs save only for gradients of inputs, which nothing reads, by line of backward."""
        self._inputs: list[weakref.ref[Tensor]] = []
        """Leaves of this step's graphs that no optimizer has."""
        self._used: dict[int, str] = {}
        """Parameters whose gradients an optimizer has used, by id, with the line that adds to them, or ""."""

    @contextmanager
    def following(self, before: Callable[[], bool]) -> Iterator[None]:
        """Note calls while the context is open, of those before which `before` says so."""
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def noted(tensors: Any, *args: Any, **named: Any) -> None:
            if before():
                retains = bool(named.get("retain_graph") or (args[1:2] or [False])[0])
                weights = tensors_in((args[:1], named.get("grad_tensors")))
                with self._guarding():
                    self._note([*tensors_in(tensors)], [*weights], retains_graph=retains)
            backward(tensors, *args, **named)

        def noted_grad(outputs: Any, *args: Any, **named: Any) -> Any:
            if before():
                with self._guarding():
                    self._reach(*reached_from(tensors_in(outputs)))
            return grad(outputs, *args, **named)

        with replaced(torch.autograd, "backward", noted), replaced(torch.autograd, "grad", noted_grad):
            yield

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """Own errors end recording, not the run."""
        try:
            yield
        except Exception as error:
            self._ops.on_error(error)

    def stepping(self, parameters: Iterable[Tensor]) -> None:
        """Note that an optimizer steps parameters with the gradients that they have now."""
        self._updates += 1
        inputs = (each() for each in self._inputs)
        if any(each is not None and each.grad is not None and self._ops.is_read(each.grad) for each in inputs):
            self.frozen_bytes.clear()
        for parameter in parameters:
            if line := self._used.get(id(parameter)):
                self.adding.setdefault(line)
            self._used[id(parameter)] = ""

    def end_step(self) -> None:
        """Note that a step has ended."""
        self.reached.clear()
        self.reached_nodes.clear()
        self._retaining.clear()
        self._inputs.clear()

    def _note_inputs(self, losses: list[Any], leaves: list[Tensor], line: str) -> None:
        """Note what is saved only for gradients of inputs, where an optimizer has other leaves."""
        inputs = [each for each in leaves if not isinstance(each, nn.Parameter) and id(each) not in self._used]
        trained = {id(each) for each in leaves} - {id(each) for each in inputs}
        if inputs and trained & self._used.keys():
            self._inputs += map(weakref.ref, inputs)
            self.frozen_bytes[line] = self._ops.bytes_made(saved_for_no_leaf(losses, trained))

    def _reach(self, leaves: list[Tensor], nodes: set[int]) -> None:
        for place, kept in self._retaining:
            if not kept.isdisjoint(nodes):
                self.noted[place] = replace(self.noted[place], retains_graph=False)
        self.reached_nodes |= nodes
        self.reached.update(map(id, leaves))
        self.ever_reached.update(map(id, leaves))

    def _note(self, losses: list[Any], weights: list[Tensor], *, retains_graph: bool) -> None:
        ops, line = self._ops, calling_line()
        leaves, nodes = reached_from(losses)
        ops.mark_saved(each for each in losses if isinstance(each, Tensor))
        is_in_checkpoint = torch._C._current_autograd_node() is not None
        if ops.in_optimizer or is_in_checkpoint:  # in the optimizer a closure calls it
            self._reach(leaves, nodes)
            return
        self._note_inputs(losses, leaves, line)
        versions = {id(each): each._version for each in leaves}
        # By hand, as to the weights nearby of sharpness-aware minimization.
        self._updates += any(self._versions.get(key, now) != now for key, now in versions.items())
        self._versions |= versions
        loses = any(id(each) in self.reached and each.grad is None for each in leaves) and not self.is_sharded
        zero_bytes = 0
        with ops.paused():
            scalings = [*map(scaling_of, losses)]
            for leaf in leaves:
                is_fresh = id(leaf) not in self.reached
                if leaf.grad is None or leaf.grad.layout is not torch.strided:
                    self._used.pop(id(leaf), None)
                elif is_fresh or id(leaf) in self._used:
                    if not bool(leaf.grad.any()):
                        self._used.pop(id(leaf), None)
                        zero_bytes += leaf.grad.nbytes * is_fresh
                    elif is_fresh and id(leaf) in self._used:
                        self._used[id(leaf)] = line
        self.noted.append(
            Backward(
                line=line,
                step=ops.position.step,
                updates_before=self._updates,
                leaves=hash(frozenset(map(id, leaves))),
                # What hooks of parameters do with gradients is not known.
                is_scaled=bool(weights)
                or any(is_scaled for is_scaled, _ in scalings)
                or any(leaf._backward_hooks for leaf in leaves),
                divisors=frozenset().union(*(divisors for _, divisors in scalings)),
                retains_graph=retains_graph,
                reduces=tuple(self._reducing({*map(id, leaves)})),
                zero_gradient_bytes=zero_bytes,
                loses_gradients=loses,
            )
        )
        self._reach(leaves, nodes)
        if retains_graph:
            self._retaining.append((len(self.noted) - 1, nodes))

    def _reducing(self, leaves: set[int]) -> Iterator[str]:
        """The DDP models of whose parameters this backward reduces the gradients over ranks."""
        for prefix, model in self._ops.modules.alive():
            if getattr(model, "require_backward_grad_sync", False) and _has_any(model, leaves):
                yield prefix


def _has_any(model: nn.Module, leaves: set[int]) -> bool:
    return any(id(each) in leaves for each in model.parameters())
