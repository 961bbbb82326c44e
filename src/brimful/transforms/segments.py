"""Nested segments: recomputed units whose inputs are not held either.

A segment is a recomputed unit, its anchor, and the nested units behind it. Only the anchor's input is held. The
input of a nested unit is the output of the unit before it; it is freed. When the last unit of the segment needs
its input in backward, the forwards of the anchor and of all units between run again, and keep each nested
unit's input until its own backward has used it. So every unit but the last has one more forward, and only the
inputs of one segment are in memory at a time.

* An input is freed if it is the unchanged tensor that the unit before returned. If it was changed on the way,
  it is held like the input of any recomputed unit, which is correct but takes more memory.
* What runs again runs as in the forward: with gradients, because kernels and fast paths are chosen by that, and
  with what autograd would save dropped; with the same autocast, random states and buffers. Autocast's cache is
  off: a weight's cast without its place in the graph must not serve the recomputation around it.
* Under FSDP2 a module has its weights in its own forward and backward only: what such a unit returned is held.
* Torch's checkpoint holds nothing here and restores no random state: a call holds its own arguments, detached,
  and so both the forwards that run again and the recomputation start from the same.

Undocumented parts of torch used here: `torch.utils.weak.WeakIdKeyDictionary`, `Tensor._version`
(checked: torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from operator import methodcaller
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from brimful.batches import map_leaves, tensors_in
from brimful.settings import Action, UnitAction, has_input_ops


class Returned:
    """Outputs of a unit's calls, as long as they exist. A copy of this object is empty."""

    def __init__(self) -> None:
        self._tensors = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[Returned], tuple[()]]:
        return Returned, ()

    def remember(self, call: Call, returned: Any) -> None:
        """Record which call returned a nest of tensors."""
        for index, tensor in enumerate(tensors_in(returned)):
            self._tensors[tensor] = call, index, tensor._version

    def let_go(self, tensor: Tensor) -> LetGo | None:
        """The argument that replaces a returned tensor; None for other tensors and those written to since."""
        call, index, version = self._tensors.get(tensor, (None, 0, 0))
        if call is None or tensor._version != version:
            return None
        return LetGo(call, index, requires_grad=tensor.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The place of a recomputed unit in its segment."""

    before: Returned | None = None
    """Outputs of the unit before, if this one is nested."""
    own: Returned | None = None
    """Outputs of this unit, if the next one is nested."""
    derived: Callable[[Tensor], Argument | None] | None = None
    """Gives what replaces an argument that is made again, if the ops that make its input belong to the unit."""

    def __bool__(self) -> bool:
        return not (self.before is None and self.own is None and self.derived is None)

    def argument(self, tensor: Tensor) -> Argument | None:
        """What replaces a tensor that need not be held; None for any other."""
        found = None if self.before is None else self.before.let_go(tensor)
        return found if found is not None or self.derived is None else self.derived(tensor)


def links(
    units: Iterable[UnitAction], derived: Callable[[Tensor], Argument | None] | None = None
) -> Iterator[Link]:
    """The place of each unit of a plan, in execution order; a nested unit follows one that is recomputed.

    `derived` gives what replaces an argument that is made again, for units with the ops that make their input.
    """
    in_order = list(units)
    own = None
    for unit, behind in zip_longest(in_order, in_order[1:]):
        before = own if unit.action is Action.NEST else None
        own = Returned() if behind is not None and behind.action is Action.NEST else None
        yield Link(before=before, own=own, derived=derived if has_input_ops(unit.fqn) else None)


def gathers_its_weights(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module, which then has its weights in its own forward and backward only."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


class Argument:
    """A tensor among the arguments of a call that can be run again."""

    def read(self) -> Tensor:
        """The tensor, for a forward that runs again."""
        raise NotImplementedError

    def take(self) -> Tensor:
        """The tensor, for the recomputation, after which the argument is not needed."""
        raise NotImplementedError


class Held(Argument):
    """An argument that is held, without the graph that made it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._requires_grad = tensor.requires_grad
        self._version = _version(tensor)

    def read(self) -> Tensor:
        """The tensor; raises `RuntimeError` if something has written to it since the forward."""
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                f"a unit cannot be recomputed: an argument of it, of shape {tuple(self._tensor.shape)}, has "
                "been modified by an inplace operation since its forward. Keep the unit, or write to a copy."
            )
        return self._tensor.detach().requires_grad_(self._requires_grad)

    def take(self) -> Tensor:
        """The tensor, as `read` returns it."""
        return self.read()


class LetGo(Argument):
    """An argument that is not held: a call of the unit before, `maker`, returns it again as its tensor `index`.

    `requires_grad` is as in the forward.
    """

    def __init__(self, maker: Call, index: int, *, requires_grad: bool) -> None:
        self.maker = maker
        self.index = index
        self._requires_grad = requires_grad
        self._value: Tensor | None = None
        maker.wanted.add(self)

    @property
    def is_missing(self) -> bool:
        """Whether the tensor has not been made again, or has been taken."""
        return self._value is None

    def put(self, value: Tensor) -> None:
        """Store the tensor."""
        self._value = value.detach().requires_grad_(self._requires_grad)

    def read(self) -> Tensor:
        """The tensor, which must not be missing."""
        assert self._value is not None
        return self._value

    def take(self) -> Tensor:
        """The tensor; if it is missing, all calls from the anchor on that lead here run again first."""
        pending = [self.maker]
        while self.is_missing:
            before = next((each.maker for each in pending[-1].let_go if each.is_missing), None)
            if before is None:
                pending.pop().run_again()
            else:
                pending.append(before)
        value, self._value = self.read(), None
        return value


class Call:
    """A call of a unit of a segment, which can be run again.

    Args:
        function: The unit's function.
        module: The unit; for a run of children, the container of its modules.
        contexts: The context of the forward, and that of every later run; each can be entered repeatedly.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        link: Says which arguments need not be held.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        link: Link,
    ) -> None:
        self.module = module
        self.wanted: weakref.WeakSet[LetGo] = weakref.WeakSet()
        """Arguments of the next unit that this call returns."""
        self.let_go: list[LetGo] = []
        """Arguments that are not held."""
        self._function = function
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(args, kwargs)]
        """The arguments themselves, until the forward begins."""
        self._arguments = map_leaves(
            (args, kwargs), Tensor, lambda tensor: self._argument(tensor, link), into_objects=False
        )
        self._contexts = contexts
        self._autocast = _Autocast({tensor.device.type for tensor in tensors_in((args, kwargs))} | {"cpu"})

    def forward(self) -> Any:
        """Call the function; backward will run it again."""
        return checkpoint(
            self._run, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: self._contexts
        )

    def run_again(self) -> None:
        """Run the function again and store its results where they are needed. No argument may be missing."""
        with (
            self._contexts[1],
            self._autocast.without_cache(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_drop, _is_dropped),
        ):
            args, kwargs = map_leaves(self._arguments, Argument, methodcaller("read"), into_objects=False)
            tensors = list(tensors_in(self._function(*args, **kwargs)))
        for argument in list(self.wanted):
            argument.put(tensors[argument.index])

    def _argument(self, tensor: Tensor, link: Link) -> Argument:
        argument = link.argument(tensor)
        if isinstance(argument, LetGo):
            self.let_go.append(argument)
        return Held(tensor) if argument is None else argument

    def _run(self) -> Any:
        """The function that checkpoint runs: the forward, then its recomputations."""
        if self._given:
            args, kwargs = self._given.pop()
        else:
            args, kwargs = map_leaves(self._arguments, Argument, methodcaller("take"), into_objects=False)
        return self._function(*args, **kwargs)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been written to; None for one made in inference mode, which has no version."""
    return None if tensor.is_inference() else tensor._version


def _drop(_tensor: Tensor) -> None:
    """Drop a tensor saved for a backward that does not run."""


def _is_dropped(_nothing: None) -> Never:
    raise RuntimeError(
        "a unit runs a backward inside of its forward, which cannot run again for the nested unit behind it. "
        "Give that one the action 'recompute'."
    )


class _Autocast:
    """The state of autocast for some device types, when this object is made."""

    def __init__(self, types: Iterable[str]) -> None:
        self._states = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Context of this state without autocast's cache, so that nothing remains in the cache."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield
