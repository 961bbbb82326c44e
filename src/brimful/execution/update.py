"""An optimizer step that ends well although memory runs out in the middle of it.

An optimizer changes the parameters and its own state op by op; where memory runs out between two of them, some
are changed and others are not. Nothing is copied beforehand for that rare case. Instead it is known afterwards
how often each tensor was changed: torch counts the changes of a tensor (its version) by ops on single tensors,
and a dispatch mode counts those by ops on lists of tensors (`foreach`, `fused`), which torch does not; they are
few. The step is then run once more, and the changes that were made already are left out. Where it computes
something from a tensor that is ahead of it, the result is wrong and followed: a change that is still to be made
from it is refused. So the step ends as if memory had not run out, or says that it cannot. Only until it is
known how often a step changes each tensor, usually in the first two steps, are parameters and state copied to
the host, and a step is taken back instead.

Any other error is raised to the caller. Parameters and state are then as before the step if nothing was changed
yet, or if there are copies; else the error is a `PartialUpdateError`.

If there is not enough memory for all parameters at once (`foreach` takes a copy of all) they are taken by
halves, quarters, … down to single ones, which compute the same.

Private torch API used here: `OpOverload._schema`, `Tensor._version` (checked: torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from brimful.batches import map_leaves, tensors_in
from brimful.dispatch_mode import EagerDispatchMode
from brimful.errors import PartialUpdateError
from brimful.execution.out_of_memory import RanOut, unless_out_of_memory

_Place = tuple[int, int]
"""Where a tensor's bytes are, and how many: the same for a tensor and a view of the whole of it."""


class AtomicUpdate:
    """An optimizer's step that is taken whole or ends the run.

    For parameters that are divided over ranks, and for updates on the host, which take nothing of the device.

    Args:
        what: Is updated.
        way_out: Called with what was said of memory that ran out; returns how the user can continue.
        has_begun: Whether the step that is running may have changed something.
    """

    def __init__(
        self, what: str, way_out: Callable[[str], str], has_begun: Callable[[], bool] = lambda: True
    ) -> None:
        self._what = what
        self._way_out = way_out
        self._has_begun = has_begun

    def run(self, step: Callable[[], object]) -> None:
        """Run one step.

        Args:
            step: Calls the optimizer's `step`. What it raises before it has begun is raised as it is.

        Raises:
            PartialUpdateError: An error was raised once the step had begun.
        """
        try:
            ran_out = _whether_ran_out(step)
        except PartialUpdateError:
            raise
        except BaseException as error:
            if not self._has_begun():
                raise
            raise _half_updated(f"the optimizer's update of {self._what}", error) from error
        if ran_out is None:
            return
        if not self._has_begun():
            raise torch.OutOfMemoryError(ran_out.message)
        raise PartialUpdateError(
            f"memory ran out in the optimizer's update of {self._what}: {ran_out.message}.\n"
            f"  {self._way_out(ran_out.message)}"
        )


class ResumableUpdate:
    """An optimizer's step in whose course memory may run out.

    Args:
        optimizer: With or without state.
        make_room: Called each time that memory ran out.
    """

    def __init__(self, optimizer: Optimizer, make_room: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._make_room = make_room
        # brimful's own is made of torch's
        self._is_of_torch = type(optimizer).step.__module__.startswith(("torch.optim", "brimful.optimizers"))
        self._layout: _Layout | None = None
        self._usual: dict[int, tuple[int, ...]] = {}
        """Changes that a step makes to a parameter and its state, by id; empty until they are known."""

    def run(self, step: Callable[[], object]) -> None:
        """Carry out one step.

        Args:
            step: Calls the optimizer's `step`. Where it raises, all is as before, or there is a
                `PartialUpdateError`.

        Raises:
            torch.OutOfMemoryError: Memory ran out, and the step cannot be finished; all is as before.
            PartialUpdateError: An error was raised, and the step can neither be finished nor taken back.
        """
        before = _Before(self._optimizer, self._layout)
        self._layout = before.layout
        is_known = all(id(parameter) in self._usual for parameter in before.parameters)
        copies = None if is_known else _Copies(self._optimizer, before)
        try:
            with before.counting():
                ran_out = _whether_ran_out(step)
            if ran_out is None:
                if not is_known and before.has_seen_all():
                    self._usual |= before.changes_by_parameter()
                return
            self._make_room()
            ran_out = self._finish(step, before) if copies is None else self._take_again(step, before, copies)
            if ran_out is not None:
                raise self._unfinished(ran_out, is_undone=copies is not None)
        except PartialUpdateError:
            raise
        except BaseException as error:
            self._undo(before, copies, error)
            raise

    def _unfinished(self, ran_out: RanOut, *, is_undone: bool) -> Exception:
        """The error of a step that memory ran out in."""
        what = f"memory ran out in the update by {type(self._optimizer).__name__}, and it cannot be finished"
        with_less = (
            "with less: another optimizer_implementation ('fused' takes no temporaries), a smaller optimizer, "
            "or a smaller budget."
        )
        if is_undone:
            return torch.OutOfMemoryError(f"{what}: {ran_out.message}. Train {with_less}")
        return PartialUpdateError(
            f"{what}: {ran_out.message}. Some parameters are updated and others not. Resume from the last "
            f"checkpoint, {with_less}"
        )

    def _undo(self, before: _Before, copies: _Copies | None, error: BaseException) -> None:
        """Leave parameters and state as before a step that raised, or raise PartialUpdateError."""
        if copies is None and not (self._is_of_torch and before.has_changed_nothing()):
            raise _half_updated(f"the update by {type(self._optimizer).__name__}", error) from error
        try:
            if copies is not None:
                copies.restore(before.parameters)
            before.restore_numbers()
        except BaseException as failure:
            raise _half_updated("taking back an update", failure) from error

    def _take_again(self, step: Callable[[], object], before: _Before, copies: _Copies) -> RanOut | None:
        """Take a step from its beginning, which is restored."""

        def attempt(some: Sequence[nn.Parameter]) -> RanOut | None:
            copies.restore(some)
            before.restore_numbers()
            return _whether_ran_out(step)

        return self._by_parts(before.parameters, attempt)

    def _finish(self, step: Callable[[], object], before: _Before) -> RanOut | None:
        """Go on with a step that memory ran out in."""
        if not self._is_of_torch:
            return RanOut("what an optimizer of another library has written cannot be told")

        def attempt(some: Sequence[nn.Parameter]) -> RanOut | None:
            before.restore_numbers()
            with before.counting():
                return _whether_ran_out(partial(_replay, step, before.changes(), self._optimizer, some))

        changes = before.changes_by_parameter()
        return self._by_parts(
            [p for p in before.parameters if changes[id(p)] != self._usual.get(id(p))], attempt
        )

    def _by_parts(
        self, parameters: Sequence[nn.Parameter], attempt: Callable[[Sequence[nn.Parameter]], RanOut | None]
    ) -> RanOut | None:
        """Attempt all, halves, quarters, …; what was said last if not even one parameter could be updated."""
        pending = [parameters] if parameters else []
        while pending:
            some = pending.pop()
            with _only(self._optimizer, some):
                ran_out = attempt(some)
            if ran_out is None:
                continue
            self._make_room()
            if len(some) == 1 or not self._is_of_torch:  # others may not treat parameters one by one
                return ran_out
            middle = len(some) // 2
            pending += [some[middle:], some[:middle]]
        return None


class _Layout:
    """Where an optimizer keeps what; the same from step to step once its state is made."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        self.tensors = {id(p): (p, *_state_tensors(optimizer, p)) for p in parameters}
        """Of each parameter: itself and its state."""
        self.all_tensors = [tensor for each in self.tensors.values() for tensor in each]
        self.ids = tuple(map(id, self.all_tensors))
        self.holders_of_numbers = [holder for holder in states if _numbers_in(holder)]
        self._known = [(id(parameter), len(state)) for parameter, state in zip(parameters, states, strict=True)]

    def is_of(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether nothing was added or taken away since."""
        state = optimizer.state
        return self._known == [(id(p), len(state[p]) if p in state else 0) for p in parameters]


class _Before:
    """What an optimizer's tensors and numbers were before a step, and how often each tensor changed since."""

    def __init__(self, optimizer: Optimizer, layout: _Layout | None) -> None:
        self._optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        is_known = layout is not None and layout.is_of(optimizer, self.parameters)
        self.layout = layout if layout is not None and is_known else _Layout(optimizer, self.parameters)
        self._gradients: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
        takes_lists = any(map(_takes_lists, optimizer.param_groups))
        ids = (*self.layout.ids, *map(id, self._gradients))
        self._counter = _Counter(ids) if takes_lists else None
        versions = self._counter is None
        self._versions = [tensor._version for tensor in self.layout.all_tensors] if versions else []
        self._gradient_versions = [gradient._version for gradient in self._gradients] if versions else []
        holders = (*optimizer.param_groups, *self.layout.holders_of_numbers)
        self._numbers = [(holder, _numbers_in(holder)) for holder in holders]

    def counting(self) -> AbstractContextManager[object]:
        """Within, changes are counted, if torch does not."""
        return nullcontext() if self._counter is None else self._counter

    def has_seen_all(self) -> bool:
        """Whether the step made no state of which it was not known before."""
        return self.layout.is_of(self._optimizer, self.parameters)

    def has_changed_nothing(self) -> bool:
        """Whether parameters and state are what they were, numbers aside."""
        kept = islice(self._changes(), len(self.layout.all_tensors))  # the gradients come after them
        return self.has_seen_all() and not any(times for _tensor, times in kept)

    def changes(self) -> dict[_Place, int]:
        """How often each tensor was changed since."""
        return {_place(tensor): times for tensor, times in self._changes()}

    def changes_by_parameter(self) -> dict[int, tuple[int, ...]]:
        """The same of each parameter and its state."""
        changes = {id(tensor): times for tensor, times in self._changes()}
        return {
            key: tuple(changes[id(tensor)] for tensor in tensors)
            for key, tensors in self.layout.tensors.items()
        }

    def restore_numbers(self) -> None:
        """Give state and groups their numbers back; a step that is run again changes them again."""
        for holder, numbers in self._numbers:
            holder.update(numbers)

    def _changes(self) -> Iterator[tuple[Tensor, int]]:
        tensors = [*self.layout.all_tensors, *self._gradients]
        if self._counter is not None:
            yield from ((tensor, self._counter.changes(tensor)) for tensor in tensors)
            return
        for tensor, version in zip(tensors, [*self._versions, *self._gradient_versions], strict=True):
            yield tensor, tensor._version - version


def _numbers_in(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if isinstance(value, int | float)}


class _Copies:
    """Copies on the host of parameters and state before a step."""

    def __init__(self, optimizer: Optimizer, before: _Before) -> None:
        self._optimizer = optimizer
        self._parameters = {id(p): _Copy(p) for p in before.parameters}
        state = optimizer.state
        self._states = {
            id(p): map_leaves(dict(state[p]), Tensor, _Copy, into_objects=False)
            for p in before.parameters
            if p in state
        }

    def restore(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the step back for some parameters."""
        for parameter in parameters:
            self._parameters[id(parameter)].restored()
            if id(parameter) not in self._states:
                self._optimizer.state.pop(parameter, None)
                continue
            state = self._optimizer.state[parameter]
            before = map_leaves(self._states[id(parameter)], _Copy, _Copy.restored, into_objects=False)
            state.clear()
            state.update(before)


class _Copy:
    """A tensor and a copy of its values on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = tensor.detach().to("cpu", copy=True)

    def restored(self) -> Tensor:
        """The tensor, with the values that were copied."""
        with torch.no_grad():
            self._tensor.copy_(self._values)
        return self._tensor


def _state_tensors(optimizer: Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return list(filter(_is_tensor, optimizer.state.get(parameter, {}).values()))


class _Counter(EagerDispatchMode):
    """Counts the changes of tensors.

    Args:
        ids: Of those to count, which live longer than this.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        super().__init__()
        self._changes = dict.fromkeys(ids, 0)

    def changes(self, tensor: Tensor) -> int:
        """How often a tensor was changed."""
        return self._changes[id(tensor)]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        changes = self._changes
        for key in map(id, _written(func, args, kwargs or {})):
            if key in changes:
                changes[key] += 1
        return result


class _ReplayMode(EagerDispatchMode):
    """Leaves out changes that were made already, and refuses to compute a change from what is ahead.

    Args:
        ahead: How many changes of each parameter, gradient and state were made already.
    """

    def __init__(self, ahead: dict[_Place, int]) -> None:
        super().__init__()
        self._ahead = dict(ahead)
        self._wrong = WeakTensorKeyDictionary()
        """Temporaries whose values are not those of the first run."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        were_made = [self._times_ahead(tensor) > 0 for tensor in written]
        if any(were_made):
            return self._leave_out(func, args, kwargs, written, were_made)
        if not any(self.is_wrong(leaf) for leaf in tree_leaves((args, dict(kwargs))) if _is_tensor(leaf)):
            return func(*args, **kwargs)
        if any(_place(tensor) in self._ahead or tensor._is_view() for tensor in written):
            self._refuse(func)
        result = func(*args, **kwargs)
        wrong = [*written, *filter(_is_tensor, tree_leaves(result))]
        if not wrong:  # a number, on which the step may decide
            self._refuse(func)
        for tensor in wrong:
            self._wrong[tensor] = True
        return result

    def _leave_out(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: list[Tensor],
        were_made: list[bool],
    ) -> Any:
        if not all(were_made):
            self._refuse(func)
        for tensor in written:
            self._ahead[self._counted_at(tensor)] -= 1
        if not func._schema.returns:
            return None
        return args[0] if args else next(iter(kwargs.values()))

    def _times_ahead(self, tensor: Tensor) -> int:
        return self._ahead.get(self._counted_at(tensor), 0)

    def _counted_at(self, tensor: Tensor) -> _Place:
        """Where the changes of a tensor are counted; those of a part with those of the whole."""
        place = _place(tensor)
        whole = tensor._base
        return place if place in self._ahead or whole is None else _place(whole)

    def is_wrong(self, tensor: Tensor) -> bool:
        """Whether a tensor's value is not that of the first run at this point."""
        return tensor in self._wrong or self._times_ahead(tensor) > 0

    def _refuse(self, func: torch._ops.OpOverload) -> None:
        raise PartialUpdateError(
            f"memory ran out in the optimizer's update, which cannot be completed: {func} needs a value "
            "that was overwritten since. Resume from the last checkpoint."
        )


def _half_updated(where: str, error: BaseException) -> PartialUpdateError:
    return PartialUpdateError(
        f"an error was raised in {where}: {type(error).__name__}: {error}. Some parameters may be updated and "
        "others not. Resume from the last checkpoint."
    )


def _whether_ran_out(step: Callable[[], object]) -> RanOut | None:
    found = unless_out_of_memory(step)
    return found if isinstance(found, RanOut) else None


def _replay(
    step: Callable[[], object],
    ahead: dict[_Place, int],
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
) -> None:
    had_state = [bool(optimizer.state.get(parameter)) for parameter in parameters]
    with _ReplayMode(ahead) as again:
        step()
    for parameter, had in zip(parameters, had_state, strict=True):
        made = not had and ahead.get(_place(parameter))
        if made or any(map(again.is_wrong, _state_tensors(optimizer, parameter))):
            raise PartialUpdateError(
                "memory ran out in the optimizer's update, which cannot be completed: state was made from a "
                "value that was overwritten since. Resume from the last checkpoint."
            )


@contextmanager
def _only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, all other parameters have no gradient, so that a step passes them over."""
    chosen = {id(parameter) for parameter in parameters}
    others = [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in chosen
    ]
    for parameter, _gradient in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others:
            parameter.grad = gradient


def _takes_lists(group: Mapping[str, Any]) -> bool:
    """Whether a group of parameters is updated by ops on lists of tensors; on CUDA that is torch's default."""
    on_cuda = any(parameter.is_cuda for parameter in group["params"][:1])
    return bool(group.get("fused") or group.get("foreach") or (group.get("foreach") is None and on_cuda))


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an op changes."""
    found: list[Tensor] = []
    for position, name in _written_arguments(func):
        given = args[position] if position < len(args) else kwargs.get(name)
        found += given if isinstance(given, list) else tensors_in(given)
    return found


@cache
def _written_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an op changes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.nbytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
