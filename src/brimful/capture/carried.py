"""State that a forward carries to the next one: what it writes, and what outlives it.

With k micro-batches such state changes k times a step, and each sees other values than a whole batch would: a
teacher that follows by an average, a queue of negatives, spectral norm's vectors, a temperature that falls with
each call. Which values are held, and which storages ops read and write, shows such state:

* A tensor that was there before and is written to is state, unless it counts forwards, or the write makes no
  difference when it is done again (`Embedding(max_norm=…)`, clamped weights).
* A tensor in the place of another is state if the forward read the one before.
* What is new, such as an entry of a list, is state if another forward reads it, and replaces it or adds to it.
* A number that changes is state if another forward changes it too, and compares it, or gives it or what it
  makes of it to an op. What is made in the first forward only, such as a table of positions, is a cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from brimful.batches import own_part, tensors_in
from brimful.capture.fakes.outside import is_state
from brimful.torch_utils.held_values import HeldValues
from brimful.torch_utils.module_names import plain_namer
from brimful.torch_utils.op_writes import has_writes, written_tensors
from brimful.torch_utils.wrapper_tensors import inner_tensors

aten = torch.ops.aten

_IDEMPOTENT = frozenset(
    {aten.embedding_renorm_.default, aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default}
)
"""Ops that change nothing if they are done twice."""
_OVERWRITE = frozenset({aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
"""Ops that do not read what they write to."""


class OpUse:
    """The storages that ops read and write and, with `has_numbers`, the numbers that ops are given."""

    def __init__(self, *, has_numbers: bool = False) -> None:
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.numbers: list[Any] | None = [] if has_numbers else None
        """Each op with the numbers that it is given; None without `has_numbers`."""

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an op and its arguments."""
        written = (
            list(written_tensors(func, args, kwargs)) if has_writes(func) and func not in _IDEMPOTENT else []
        )
        for tensor in written:
            self.written.update(storages_of(tensor))
        for tensor in tensors_in((args, kwargs)):
            if not (written and func in _OVERWRITE and tensor is written[0]):
                self.read.update(storages_of(tensor))
        if self.numbers is not None:
            numbers = [each for each in tree_leaves((args, kwargs)) if isinstance(each, int | float)]
            self.numbers.append((func, numbers))


class _Before:
    """A tensor that was held before a forward, and may be freed during it."""

    def __init__(self, tensor: Tensor, use: OpUse) -> None:
        self.storages = frozenset(storages_of(tensor))
        self._use = use
        self._was_read = False
        self.tensor = weakref.ref(tensor, self._end)

    @property
    def was_read(self) -> bool:
        """Whether an op of the forward read the tensor."""
        return self._was_read or (self.tensor() is not None and bool(self.storages & self._use.read))

    def _end(self, _tensor: object) -> None:
        self._was_read = bool(self.storages & self._use.read)


class CarriedState:
    """Finds the state that forwards carry from one to the next.

    `model` is in training mode. `others` are values, by name, that the loss is computed with beside the model.
    `stand_in` returns the tensor that ops read in the place of another.
    """

    def __init__(
        self,
        model: nn.Module,
        others: dict[str, Any],
        stand_in: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._model, self._others, self._stand_in = model, others, stand_in
        self._plain_name = plain_namer(model)
        self.use: OpUse | None = None
        """What the ops of the forward that runs read and write; None between forwards."""
        self.changed: dict[str, None] = {}
        """Names of state that was found."""
        self._new: dict[str, Any] = {}
        """New tensors and changed numbers: another forward shows whether they are used."""
        self._new_tensors: dict[str, None] = {}
        """Names of new tensors, until another forward runs. The tensors would live longer here than in a real
        step, such as the weights that weight normalisation makes in each forward."""
        self._tensors: dict[str, _Before] = {}
        self._numbers: dict[str, float] = {}
        self._before: set[str] = set()
        """Names that were held when another forward began."""

    @property
    def is_settled(self) -> bool:
        """Whether no other forward is needed."""
        return not (self._new or self._new_tensors)

    def begin(self) -> None:
        """Note what is held before a forward."""
        self.use = OpUse()
        held = self._held().values
        self._tensors = {
            name: _Before(each, self.use) for name, each in held.items() if isinstance(each, Tensor)
        }
        self._numbers = {name: each for name, each in held.items() if not isinstance(each, Tensor)}

    def end(self) -> set[int]:
        """Find what the forward changed; return the storages that it wrote to and that are not held."""
        use, self.use = self.use, None
        assert use is not None
        there = frozenset().union(*map(self._still_there, self._tensors.values()))
        # Running statistics are known by their layer.
        norms = {path for path, module in self._model.named_modules() if isinstance(module, _NormBase)}
        for name, value in self._held().values.items():
            if not isinstance(value, Tensor):
                if name in self._numbers and value != self._numbers[name]:
                    self._new[name] = value
            elif is_state(value) and name.rpartition(".")[0] not in norms:
                self._compare(name, value, use, there)
        self._tensors = {}
        return use.written - there

    def settle(self, forward: Callable[[], object]) -> None:
        """Find out by another forward which new values are state.

        `forward` computes the loss, each time from the same random state, with ops noted in `use`.
        """
        if self.is_settled:
            return
        held = self._held()
        self._new |= {name: held.values[name] for name in self._new_tensors if name in held.values}
        self._new_tensors.clear()
        used: dict[str, None] = {}
        tensors = {
            name: self._storages(value) for name, value in self._new.items() if isinstance(value, Tensor)
        }
        numbers = [name for name in self._new if name not in tensors]
        self._before = set(held.values)
        for name in numbers:
            note = partial(used.setdefault, name)
            put = held.puts.get(name)
            if put is None:
                note()
            else:
                put(_watched(self._new[name], note))
        try:
            with _Arguments():
                first = self._use_of(forward)
            if numbers and self._use_of(forward).numbers != first.numbers:
                used.update(dict.fromkeys(numbers))
        except Exception:  # whatever it raises, this forward cannot follow the one before
            used.update(dict.fromkeys(self._new))
        else:
            used.update({name: None for name, storages in tensors.items() if storages & first.read})
            found = tuple(used)  # comparing watched numbers uses them
            again = self._changed_again()
            used = {name: None for name in found if name in again}
        self._new.clear()
        self.changed.update({self._plain_name(name): None for name in used})

    def _changed_again(self) -> set[str]:
        """Names that another forward changed too, or beside which it made others: a cache is made only once."""
        now = self._held().values
        beside = {name.rpartition(".")[0] for name in now.keys() - self._before}
        return {
            name
            for name, value in self._new.items()
            if (now.get(name) is not value if isinstance(value, Tensor) else now.get(name) != value)
            or (name.rpartition(".")[0] in beside and name.rpartition(".")[2].isdigit())
        }

    def _use_of(self, forward: Callable[[], object]) -> OpUse:
        use = self.use = OpUse(has_numbers=True)
        try:
            forward()
        finally:
            self.use = None
        return use

    def _compare(self, name: str, value: Tensor, use: OpUse, there: frozenset[int]) -> None:
        """Compare a tensor with what had its name; `there` are storages that were there before."""
        storages, before = self._storages(value), self._tensors.get(name)
        if storages & there:
            is_carried = bool(storages & use.written)
        elif before is not None and before.was_read:
            is_carried = True
        else:
            is_carried = False
            self._new_tensors[name] = None
        if is_carried:
            self.changed.setdefault(self._plain_name(name))

    def _held(self) -> HeldValues:
        return HeldValues(self._model, self._others)

    def _still_there(self, before: _Before) -> frozenset[int]:
        tensor = before.tensor()
        is_same = tensor is not None and before.storages == frozenset(storages_of(tensor))
        return self._storages(tensor) if is_same and tensor is not None else frozenset()

    def _storages(self, tensor: Tensor) -> frozenset[int]:
        return frozenset((*storages_of(tensor), *storages_of(self._stand_in(tensor))))


def storages_of(tensor: Tensor) -> Iterator[int]:
    """Addresses of the storages that a tensor is made of; nothing for a tensor without storages."""
    for inner in inner_tensors(own_part(tensor)):
        if inner.layout is torch.strided:
            yield inner.untyped_storage()._cdata


def running_statistics(model: nn.Module) -> Iterator[str]:
    """Paths of per-sample norms whose running statistics change without a change of their tensor version."""
    for path, module in model.named_modules():
        is_other_norm = isinstance(module, _NormBase) and not isinstance(module, _BatchNorm)
        if is_other_norm and module.training and module.running_mean is not None:
            yield path


class _WatchedNumber:
    """A number that calls `note` where it is used for more than computing another one."""

    note: Callable[[], object]


class _WatchedInt(int, _WatchedNumber):
    pass


class _WatchedFloat(float, _WatchedNumber):
    pass


_COMPUTE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPUTE_ALONE = ("neg", "pos", "abs")
_USE = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "round", "trunc", "floor", "ceil")


def _watched(value: float, note: Callable[[], object]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    made = _WatchedInt(value) if isinstance(value, int) else _WatchedFloat(value)
    made.note = note
    return made


def _watch(kind: type, base: type) -> None:
    """Define the methods of a watched number."""

    def computing(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: _watched(plain(self, *others), self.note)

    def using(plain: Callable[..., Any]) -> Callable[..., Any]:
        def used(self: Any, *others: Any) -> Any:
            self.note()
            return plain(self, *others)

        return used

    both = (*_COMPUTE, *(f"r{name}" for name in _COMPUTE), *_COMPUTE_ALONE)
    for names, define in ((both, computing), (_USE, using)):
        for method in (f"__{name}__" for name in names):
            if method in vars(base):
                setattr(kind, method, define(getattr(base, method)))
    kind.__hash__ = base.__hash__  # type: ignore[method-assign]


_watch(_WatchedInt, int)
_watch(_WatchedFloat, float)


class _Arguments(TorchFunctionMode):
    """Notes the use of a watched number that is an argument of a torch function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        for leaf in tree_leaves((args, kwargs)):
            for number in (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,):
                if isinstance(number, _WatchedNumber):
                    number.note()
        return func(*args, **(kwargs or {}))
