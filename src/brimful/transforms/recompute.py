"""Recompute a module's forward during backward instead of keeping what it saved.

This uses non-reentrant `torch.utils.checkpoint`, and corrects the following:

* Buffers that the forward changes (BatchNorm's running statistics and counters, spectral norm's vectors) would
  change a second time in the recomputation. It works on throwaway copies instead, with the values they had
  before the forward. (BatchNorm counting twice is a known open bug of plain checkpointing.)
* Attributes that the forward changes (counts, lists, tensors) would change a second time too. Their values from
  before the forward are restored during the recomputation.
* `checkpoint` restores torch's random state only. Here the states of Python's `random` and NumPy's global
  generator are restored too, and those of generators and arrays that modules hold.
* `checkpoint` restores the random state only of devices on which it finds a tensor among the positional
  arguments (checked: torch 2.13). Arguments given by keyword are therefore passed to it by position.
* `torch.compile` traces `checkpoint` into its graphs, but not the contexts used here. So a unit that is
  recomputed runs eagerly, between compiled graphs of the rest.

Private torch APIs used here: `torch._compile._disable_dynamo`, which is `torch.compiler.disable` without
importing the compiler until the first call, and `_NormBase`, the class of all layers with running statistics
(checked: torch 2.13).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from brimful.batches import tensors_in
from brimful.errors import UsageError
from brimful.settings import UnitAction
from brimful.torch_utils.dispatch_mode import compiled_code_runs_eagerly
from brimful.torch_utils.held_values import HeldSnapshot, HeldValues, mark_of
from brimful.torch_utils.op_writes import WrittenStorages
from brimful.transforms.segments import Call, Link, gathers_its_weights
from brimful.transforms.selective import SavedOps

CarryOut = Callable[[Callable[..., Any], Sequence[nn.Module]], Callable[..., Any]]
"""From a unit's function, and the modules that it calls, makes the function that is called instead."""

_Pair = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""The context of a forward and that of its recomputation."""


class UnitForward:
    """Replaces a module's `forward` by what `carry_out` makes of it.

    It is set as an attribute of the instance, so the class, the parameters' names, `state_dict` and hooks stay
    as they were.
    """

    def __init__(self, module: nn.Module, carry_out: CarryOut) -> None:
        self.forward: Callable[..., Any] = module.forward
        """The original bound method."""
        self._instead = carry_out(self.forward, [module])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement of the forward, whose result equals the forward's."""
        return self._instead(*args, **kwargs)


class UnitRuns:
    """Replaces the `forward` of a plain Sequential, and runs some of its children in another way.

    `runs` has, for each run, the positions of its first child and after its last one, and how to run it; runs
    do not overlap.
    """

    def __init__(self, sequential: nn.Sequential, runs: Iterable[tuple[int, int, CarryOut]]) -> None:
        self.forward: Callable[..., Any] = sequential.forward
        """The original bound method."""
        self._sequential = sequential
        self._children = list(sequential)
        self._parts: list[Callable[[Any], Any]] = []
        position = 0
        for start, stop, carry_out in sorted(runs, key=lambda run: run[0]):
            run = self._children[start:stop]
            self._parts += [_Run(self._children[position:start]), carry_out(_Run(run), run)]
            position = stop
        self._parts.append(_Run(self._children[position:]))

    def __call__(self, input: Any) -> Any:
        """Run the Sequential; raises `UsageError` if its children have changed since the plan was applied."""
        if list(self._sequential) != self._children:
            raise UsageError(
                "a Sequential of which parts are recomputed or offloaded has other children now than when the "
                "plan was applied. Remove the plan, change the model, apply the plan again."
            )
        for part in self._parts:
            input = part(input)
        return input


class _Run:
    """Consecutive modules, each called with what the one before it returned."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def __call__(self, value: Any) -> Any:
        for module in self._modules:
            value = module(value)
        return value


class RecomputedRegion:
    """A function that is recomputed in backward instead of keeping what it saved.

    With gradients disabled it is called directly. `modules` are the modules that it calls, `unit` is the plan's
    action for it, and `link` its place in a nested segment.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[nn.Module], unit: UnitAction, link: Link
    ) -> None:
        self._function = function
        self._module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._link = link
        self._buffers, self._attributes = _ForwardBuffers(modules), _ForwardAttributes(modules)
        self._saved = SavedOps(unit, modules)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; with gradients enabled, its saved tensors are not kept but recomputed.

        Without tensor arguments, the device of random numbers is unknown; then all saved tensors are kept.
        """
        if not torch.is_grad_enabled() or not _has_tensor((args, kwargs)):
            return self._function(*args, **kwargs)
        return self._recomputed(*args, **kwargs)

    @_disable_dynamo
    def _recomputed(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._link:
            return self._linked(args, kwargs)
        function, names, positional = self._function, tuple(kwargs), len(args)

        def call(*values: Any) -> Any:
            return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=self._contexts)

    def _state(self) -> Iterator[_Pair]:
        """Contexts of attributes and of buffers: attributes are restored before copies replace buffers."""
        yield self._attributes.contexts()
        yield self._buffers.contexts()

    def _linked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a part of a nested segment."""
        random_state = _TorchRandomState({tensor.device for tensor in tensors_in((args, kwargs))})
        contexts = self._contexts((random_state.noted(), random_state))
        call = Call(self._function, self._module, contexts, args, kwargs, self._link)
        del args, kwargs
        returned = call.forward()
        if self._link.own is not None and not any(map(gathers_its_weights, self._module.modules())):
            self._link.own.remember(call, returned)
        return returned

    def _contexts(self, *others: _Pair) -> _Pair:
        """The context of the forward and that of its recomputation."""
        random_state = _HostRandomState()
        contexts = [*others, (random_state.watched(), random_state), *self._state()]
        if self._attributes.is_watching() or self._buffers.is_watching():
            contexts.append((nullcontext(), _Eagerly()))  # as the forward, under a dispatch mode
        if self._saved:
            contexts.append(self._saved.contexts())
        forwards, recomputations = zip(*contexts, strict=True)
        return _All(forwards), _All(recomputations)


class _All(AbstractContextManager[None]):
    """Several contexts as one, which can be entered repeatedly if each of them can."""

    def __init__(self, contexts: Sequence[AbstractContextManager[object]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:  # leaves those that were entered where a later one raises
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Eagerly(AbstractContextManager[None]):
    """Lets compiled code run eagerly. It can be entered repeatedly."""

    def __enter__(self) -> None:
        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:
            self._stack.enter_context(compiled_code_runs_eagerly())

    def __exit__(self, *_error: object) -> None:
        self._stack.close()


class _TorchRandomState(AbstractContextManager[None]):
    """Restores torch's generators for a recomputation: on entry to noted states, on exit to where they were.

    The generators are the host's and those of the CUDA devices among `devices`.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({str(device) for device in devices if device.type == "cuda"})
        self._interrupted: list[Tensor] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """The context of the forward."""
        self._before = self._now()
        yield

    def __enter__(self) -> None:
        self._interrupted = self._now()
        self._set(self._before)

    def __exit__(self, *_error: object) -> None:
        self._set(self._interrupted)
        self._interrupted = []

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


class _HostRandomState(AbstractContextManager[None]):
    """Restores Python's and NumPy's generators for a recomputation: on entry to their states before the watched
    forward, if that drew anything; on exit to where they were."""

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = None
        self._interrupted: tuple[Any, Any] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The context of the forward."""
        before = self._now()
        yield
        if _drawn_between(before, self._now()):
            self._before = before

    def __enter__(self) -> None:
        if self._before is not None:
            self._interrupted = self._now()
            self._set(self._before)

    def __exit__(self, *_error: object) -> None:
        if self._interrupted is not None:
            self._set(self._interrupted)
            self._interrupted = None

    @staticmethod
    def _now() -> tuple[Any, Any]:
        return random.getstate(), np.random.get_state(legacy=True)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _drawn_between(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    python_drew = before[0] != after[0]
    (_, keys, *rest), (_, keys_after, *rest_after) = before[1], after[1]
    return python_drew or rest != rest_after or not np.array_equal(keys, keys_after)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


_BufferName = tuple[str, str]
"""Path of the module that holds a buffer, and its name there."""


class _ForwardBuffers:
    """Keeps the buffers of some modules from changing twice.

    The first forward of each training mode copies all buffers and finds which of them change, by the ops that
    write to them; later forwards copy only these, and those that change later by a tensor's version.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._module = nn.ModuleList(modules)
        self._changing: dict[tuple[bool, ...], frozenset[_BufferName]] = {}
        """Buffers that change, by the training flags of all modules inside."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context of the forward and that of its recomputation, as `checkpoint` asks for them."""
        if next(self._module.buffers(), None) is None:
            return nullcontext(), nullcontext()
        before: dict[_BufferName, Tensor] = {}
        return self._watched(before), _StandIns(self._module, before)

    def is_watching(self) -> bool:
        """Whether the next forward is the first in its training mode, whose ops are watched."""
        has_any = next(self._module.buffers(), None) is not None
        return has_any and self._mode() not in self._changing

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._module.modules())

    @contextmanager
    def _watched(self, before: dict[_BufferName, Tensor]) -> Iterator[None]:
        """Store in `before` the buffer values that the recomputation must work on."""
        mode = self._mode()
        buffers = dict(self._named_buffers())
        known = self._changing.get(mode)
        before.update(
            {name: buffer.clone() for name, buffer in buffers.items() if known is None or name in known}
        )
        stamps = {name: mark_of(buffer) for name, buffer in buffers.items()}
        written = WrittenStorages(buffers.values()) if known is None else None
        with written or nullcontext():
            yield
        after = dict(self._named_buffers())
        changed = {name for name, stamp in stamps.items() if name in after and mark_of(after[name]) != stamp}
        if written is not None:
            changed |= {name for name, buffer in buffers.items() if written.has(buffer)}
        for name in changed - before.keys():
            # It never changed before now. Its old value is lost, but it shall not change a second time.
            before[name] = after[name].clone()
        if known is None:
            changed |= set(self._running_statistics())
        self._changing[mode] = (known or frozenset()) | changed
        for name in before.keys() - self._changing[mode]:
            del before[name]

    def _named_buffers(self) -> Iterator[tuple[_BufferName, Tensor]]:
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (path, name), buffer

    def _running_statistics(self) -> Iterator[_BufferName]:
        """Buffers that change without a new tensor version, because batch norm's kernels do not declare it."""
        for path, module in self._module.named_modules():
            if isinstance(module, _NormBase):
                yield from ((path, name) for name, buffer in module._buffers.items() if buffer is not None)


class _ForwardAttributes:
    """Keeps attributes of some modules, such as counts and lists, from changing twice.

    The first forward finds whether any attribute changes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._module = nn.ModuleList(modules)
        self._change: bool | None = None
        """Whether any forward so far changed any; None before the first."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context of the forward and that of its recomputation, as `checkpoint` asks for them."""
        if self._change is False:
            return nullcontext(), nullcontext()
        before: list[HeldSnapshot] = []
        return self._watched(before), _HeldAgain(self._module, before)

    def is_watching(self) -> bool:
        """Whether the next forward is the first, whose ops are watched."""
        return self._change is None

    @contextmanager
    def _watched(self, before: list[HeldSnapshot]) -> Iterator[None]:
        snapshot = HeldSnapshot(self._module)
        frozen = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad and not snapshot.has_copy(name)
        }
        stamps = {name: mark_of(parameter) for name, parameter in frozen.items()}
        copied = snapshot.copied()
        written = WrittenStorages((*frozen.values(), *copied)) if self._change is None else None
        with written or nullcontext():
            yield
        for name, parameter in self._module.named_parameters():
            is_written = written is not None and name in frozen and written.has(parameter)
            if is_written or stamps.get(name, mark_of(parameter)) != mark_of(parameter):
                raise UsageError(
                    f"a unit that is to be recomputed writes to its parameter {name.partition('.')[2]!r} in "
                    "its forward, and would do so again in backward. Plan with recompute='none' (--recompute "
                    "none), or move the write out of the unit."
                )
        is_written = written is not None and any(map(written.has, copied))
        self._change = self._change or is_written or bool(snapshot.changed())
        if self._change:
            before.append(snapshot)


class _HeldAgain(AbstractContextManager[None]):
    """Restores earlier values of a module's attributes. It can be entered repeatedly: backward may run twice.

    `before` has these values; it is filled by the time the context is entered, if a forward changes any.
    """

    def __init__(self, module: nn.Module, before: Sequence[HeldSnapshot]) -> None:
        self._module, self._before = module, before

    def __enter__(self) -> None:
        self._now = HeldValues(self._module) if self._before else None
        for snapshot in self._before:
            snapshot.stand_in()

    def __exit__(self, *_error: object) -> None:
        if self._now is not None:
            self._now.restore()
        self._now = None


class _StandIns(AbstractContextManager[None]):
    """Replaces a module's buffers by copies. It can be entered repeatedly: backward may run twice.

    `values` has the values to copy; it is filled by the time the context is entered.
    """

    def __init__(self, module: nn.Module, values: Mapping[_BufferName, Tensor]) -> None:
        self._module = module
        self._values = values
        self._real: dict[_BufferName, Tensor | None] = {}

    def __enter__(self) -> None:
        for (path, name), value in self._values.items():
            buffers = self._module.get_submodule(path)._buffers
            self._real[path, name], buffers[name] = buffers[name], value.clone()

    def __exit__(self, *_error: object) -> None:
        for (path, name), buffer in self._real.items():
            self._module.get_submodule(path)._buffers[name] = buffer
        self._real.clear()
