"""Save what chosen ops of a recomputed forward return; recompute the rest.

Two dispatch modes see every op of a unit below autograd. In the forward one keeps what the chosen ops return;
in the recomputation the other returns it instead of running the op, each once, so it is freed as it is used.
Unlike torch's own selective checkpointing this one

* knows an op by its kind and its number within the unit. Numbers mean the same ops as long as the ops of these
  kinds come in the same order as in the unit's first forward; if they do not (a layer is skipped, another
  shape takes another branch), nothing more is saved. The sequences of a forward and its recomputation are
  compared too: from where they differ, everything is recomputed. Both give one warning per unit. Casts may
  differ, because autocast caches those of weights;
* works with in-place ops: one that overwrites a saved result is skipped in the recomputation like the op that
  made it (torch's raises "mutated"). A result that another op reads before it is overwritten is recomputed;
* saves random ops individually: after a saved one, the generator is set to its state after that op in the
  forward;
* recomputes if a saved result is no longer there, as in a second backward through the same graph (torch's
  raises).

Private torch APIs used here: `torch._C._SetExcludeDispatchKeyGuard`, `UntypedStorage._cdata`
(checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from brimful.batches import map_tensors, tensors_in
from brimful.settings import UnitAction, op_kind
from brimful.torch_utils.dispatch_mode import EagerDispatchMode
from brimful.transforms.input_ops import are_running

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""An op that shares its argument's memory, though its schema does not say so."""

_UNCOUNTED = frozenset({"_to_copy", "detach", "prim.device", "empty"})
"""Kinds of ops that may run in only one of a forward and its recomputation: autocast keeps casts of weights;
checkpointing itself detaches and asks for devices; FSDP2 makes room for weights."""

_QUESTIONS = frozenset({"prim.device", "detach"})
"""Uncounted kinds that read no values: Python gets the device of a fake tensor by an op."""

_UNCOUNTED_LIBRARIES = ("fsdp.", "c10d.", "_c10d_functional.", "profiler.")
"""Prefixes of uncounted kinds: FSDP2 gathers the weights of modules within a unit in the forward; the
recomputation finds them gathered."""

_Key = tuple[str, int]
"""An op of a unit: its kind, and its number among those of the kind."""


class SavedOps:
    """The ops of a unit whose results are saved.

    `unit.saved` names them: "addmm#2" is the third addmm of the unit's forward. `modules` are those that
    the unit calls.
    """

    def __init__(self, unit: UnitAction, modules: Iterable[nn.Module]) -> None:
        numbers: dict[str, set[int]] = defaultdict(set)
        for name in unit.saved:
            kind, _, number = name.partition("#")
            numbers[kind].add(int(number))
        self._numbers = {kind: frozenset(chosen) for kind, chosen in numbers.items()}
        self._fqn = unit.fqn
        self._modules = tuple(modules)
        self._orders: dict[tuple[bool, ...], _Order] = {}
        """Order of ops, by the training flags of the modules."""
        self._said: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The context of one forward and that of its recomputation, as `checkpoint` asks for them."""
        call = _Call()
        flags = tuple(inner.training for module in self._modules for inner in module.modules())
        order = self._orders.setdefault(flags, _Order())
        return _Saving(self._numbers, call, order, self._say), _Returning(call, self._say)

    def _say(self, what: str, reason: str) -> None:
        """Warn once for each `what`."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"unit {self._fqn!r}: {what} ({reason}). Shown once.", stacklevel=2)


_Say = Callable[[str, str], None]
"""Called with a deviation from the plan and its reason."""


@dataclass(slots=True)
class _Order:
    """The order of ops of the saved kinds in a unit's forward."""

    kinds: list[str] = field(default_factory=list)
    """Kinds in the order of the first forward."""
    is_known: bool = False


@dataclass(slots=True)
class _Call:
    """Results and order of ops of one forward of a unit, for its recomputation."""

    results: dict[_Key, _Result] = field(default_factory=dict)
    sequence: list[str] = field(default_factory=list)
    """The kinds of all ops that are counted, in order."""
    overwrites: dict[int, _Key] = field(default_factory=dict)
    """By position in the sequence: the result that an in-place op overwrites."""

    def kind_at(self, position: int) -> str | None:
        """Kind of the op at a position of the sequence; None behind its end."""
        return self.sequence[position] if position < len(self.sequence) else None


@dataclass(slots=True)
class _Result:
    """The result of a saved op."""

    value: Any
    random_states: tuple[Tensor, ...]
    """States of the generators after the op, if it is random: the host's and that of its device."""
    versions: tuple[int, ...] = ()
    """Versions of its tensors when the unit's forward ended."""

    def is_unchanged(self) -> bool:
        """Whether nothing has written to the result since the unit's forward."""
        return self.versions == _versions(self.value)


@dataclass(frozen=True, slots=True)
class _OpInfo:
    kind: str
    is_counted: bool
    is_random: bool
    is_view: bool
    """Whether the op neither reads nor writes the memory of its arguments."""
    is_in_place: bool
    """Whether the op writes to its first argument, to no other, and returns it."""
    writes: bool
    """Whether the op writes to some argument."""


@cache
def _describe(op: OpOverload) -> _OpInfo:
    arguments, returns = op._schema.arguments, op._schema.returns
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    aliases = [r.alias_info for r in returns]
    kind = op_kind(str(op))
    return _OpInfo(
        kind=kind,
        is_counted=kind not in _UNCOUNTED and not kind.startswith(_UNCOUNTED_LIBRARIES),
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_view=op is _UNSAFE_VIEW
        or (bool(aliases) and all(a is not None and not a.is_write for a in aliases)),
        is_in_place=written == [0] and len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write,
        writes=bool(written),
    )


class _Saving(EagerDispatchMode):
    """Saves the results of a forward's chosen ops, and records the sequence of all ops that are counted."""

    def __init__(self, numbers: dict[str, frozenset[int]], call: _Call, order: _Order, say: _Say) -> None:
        super().__init__()
        self._numbers = numbers
        self._call = call
        self._order = order
        self._ordered = 0
        """How many ops of the saved kinds there have been."""
        self._say = say
        self._seen: Counter[str] = Counter()
        self._owners: dict[int, _Key] = {}
        """The result that is held in the storage at an address."""
        self._read: set[_Key] = set()
        """Results that an op has read."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap every call to keep its compiler out."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        info = _describe(func)
        if info.is_view or info.kind in _QUESTIONS:
            return out
        if self._owners:
            self._note_use(info, args, kwargs)
        if info.is_counted:
            self._call.sequence.append(info.kind)
            if info.kind in self._numbers:
                self._follow_order(info.kind)
            key = info.kind, self._seen[info.kind]
            self._seen[info.kind] += 1
            if key[1] in self._numbers.get(info.kind, ()) and not info.writes:
                self._save(key, out, is_random=info.is_random)
        return out

    def __exit__(self, *error: Any) -> None:
        for result in self._call.results.values():
            result.versions = _versions(result.value)
        self._order.is_known = True
        super().__exit__(*error)

    def _follow_order(self, kind: str) -> None:
        """Save nothing more where the numbers may mean other ops than they did in the first forward."""
        kinds, position = self._order.kinds, self._ordered
        self._ordered += 1
        if not self._order.is_known:
            kinds.append(kind)
        elif position < len(kinds) and kinds[position] != kind:
            self._numbers = {}
            self._say(
                "the rest of what the plan saves of it is recomputed where its forward runs other ops than the "
                "first one did",
                f"{kind} in place of {kinds[position]}",
            )

    def _save(self, key: _Key, out: Any, *, is_random: bool) -> None:
        value = _detached(out)
        self._call.results[key] = _Result(value, _random_states(value) if is_random else ())
        self._owners.update({_address(tensor): key for tensor in tensors_in(value)})

    def _note_use(self, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Record results that an op reads; drop those that it overwrites, if read before or if it must run."""
        for tensor in tensors_in((args[1:] if info.is_in_place else args, kwargs)):
            owner = self._owners.get(_address(tensor))
            if owner is not None:
                self._read.add(owner)
        if not info.writes:
            return
        can_be_skipped = info.is_in_place and not info.is_random
        for tensor in tensors_in(args[:1] if info.is_in_place else (args, kwargs)):
            owner = self._owners.get(_address(tensor))
            if owner is None:
                continue
            if can_be_skipped and owner not in self._read:
                self._call.overwrites[len(self._call.sequence)] = owner
            else:
                self._call.results.pop(owner, None)
                self._owners = {address: key for address, key in self._owners.items() if key != owner}


class _Returning(EagerDispatchMode):
    """Returns saved results instead of running ops again, as long as the ops match the forward's."""

    def __init__(self, call: _Call, say: _Say) -> None:
        super().__init__()
        self._call = call
        self._say = say

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; see `_Saving`."""
        return False

    def __enter__(self) -> Any:
        self._seen: Counter[str] = Counter()
        self._position = -1
        self._is_alike = True
        self._returned: set[_Key] = set()
        """Every write to these results has happened already."""
        return super().__enter__()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        info = _describe(func)
        if not info.is_counted or info.is_view or are_running():
            return func(*args, **(kwargs or {}))
        self._position += 1
        if self._is_alike and (kind := self._call.kind_at(self._position)) != info.kind:
            self._is_alike = False
            if self._call.results:
                self._say(
                    "what the plan saves of it is recomputed from where its recomputation runs other ops than "
                    "its forward",
                    f"op {self._position} is {info.kind}, and was {kind or 'not there'}",
                )
        key = info.kind, self._seen[info.kind]
        self._seen[info.kind] += 1
        if self._call.overwrites.get(self._position) in self._returned:
            return args[0]
        result = self._call.results.pop(key, None) if self._is_alike else None
        if result is None or not result.is_unchanged():
            return func(*args, **(kwargs or {}))
        _set_random_states(result)
        self._returned.add(key)
        return _detached(result.value)


def _detached(value: Any) -> Any:
    """A copy of a nest whose tensors are detached: they share memory and version, and have no history.

    Autograd gives the tensor itself a history; held here, it would keep the whole graph alive.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return map_tensors(value, Tensor.detach)


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_in(value))


def _random_states(value: Any) -> tuple[Tensor, ...]:
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda_devices(value)))


def _set_random_states(result: _Result) -> None:
    if result.random_states:
        host, *others = result.random_states
        torch.set_rng_state(host)
        for device, state in zip(_cuda_devices(result.value), others, strict=True):
            torch.cuda.set_rng_state(state, device)


def _cuda_devices(value: Any) -> list[torch.device]:
    return sorted({t.device for t in tensors_in(value) if t.device.type == "cuda"}, key=str)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
