"""Records every op and every block of memory of code that runs under it.

A dispatch mode sees each op below autograd. A storage is known by its address while it lives; its finalizer
fires when the last owner, Python's or autograd's, drops it. So saved tensors, views, in-place ops, stolen
gradients and recomputation come out right without being modelled.

Private torch APIs used here: `UntypedStorage._cdata`, `torch._C._current_autograd_node`,
`torch._subclasses.fake_tensor`, `torch.utils._pytree` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from brimful.batches import own_part, tensors_in
from brimful.capture.choices import CHOICES
from brimful.capture.corrections.base import Rule
from brimful.capture.flops import count_flops
from brimful.capture.lines import calling_line
from brimful.capture.memo import FakeResults, Remembered, spanned_bytes
from brimful.capture.modules import OPTIMIZER, ModuleCalls
from brimful.capture.outside import OutsideTensors, is_real
from brimful.capture.shapes import SHAPED_BY_VALUES, run_with_known_shape, run_with_largest_shape
from brimful.capture.values import KnownValues, NotKnownError, has_writes, is_followed
from brimful.capture.wrapping import Wrapper
from brimful.optimizers import SPARSE_ARGUMENT, check_op_makes_dense_gradient
from brimful.quantities import MIB
from brimful.trace import Category, Event, EventKind, Guess, Kernel, Op, Phase, Storage
from brimful.transforms.host_link import to_host

aten = torch.ops.aten

_WITHOUT_COST = frozenset({aten._local_scalar_dense.default})
"""Ops that neither make a storage nor read one, beside those whose schema says they return a view."""
_LIST_WRITES = ("aten._foreach_", "aten._fused_")
"""How ops begin that write to every tensor of lists."""
_WITHOUT_WRITE = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
)
_KINDS = (EventKind.FREE, EventKind.ALLOCATE)
"""By whether an event is an allocation."""
_CONVOLUTION_WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Where the weights are among the arguments."""
UNKNOWN_NUMBER = 1.0
"""What code reads where a number cannot be known: that of a step count, or of a label that counts."""
_ASSUMED = {
    Guess.EXPECTED: "assumed to spread evenly over the options",
    Guess.MOST: "assumed to be the same for all rows, after each option once",
    Guess.LEAST: "assumed to be the same for all rows",
}
"""What is assumed of choices."""
_READ_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_LOCATED_BYTES = MIB
"""Ops that write less are not looked for in the code: walking the stack takes longer than recording them."""
_GATHERS = frozenset(
    {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
)
"""Ops that read of their first argument only as much as they return."""


@dataclass(frozen=True, slots=True)
class _OpInfo:
    name: str
    is_question: bool
    """Asks a tensor for its device, say; does nothing."""
    is_view: bool
    is_free: bool
    """Neither makes a storage nor reads one."""
    is_random: bool
    reads_values: bool
    """Cannot be run on fake tensors alone: its result, or its result's shape, depends on values."""
    makes_anew: bool
    """Neither writes to its arguments nor returns views of them, so far as its schema says."""
    writes_over: bool
    """Writes to its first argument alone, which stays as large as it is, and returns it."""
    is_list_write: bool
    """Writes to every tensor of lists and returns nothing, so that on fake tensors there is nothing to run."""
    written_arguments: tuple[int, ...]
    """Of an op that returns nothing: the arguments that it writes to."""
    writes: bool
    """Writes to any of its arguments."""
    chooses: bool
    """Returns what rows of numbers choose, such as the largest."""
    before: tuple[Callable[..., None], ...]
    """Rules to call before it."""
    after: tuple[Callable[..., None], ...]
    """Rules to call after it."""


class _Work(NamedTuple):
    """What an op does, as far as its arguments' shapes, strides and types tell."""

    flops: int
    read_bytes: int
    written_bytes: int
    dtype: str
    weight_bytes: int
    may_be_known: bool
    """Whether its results are few enough numbers for their values to be followed."""


class _StorageEnd(weakref.ref[Any]):
    """Tells when a storage is dropped, and its address."""

    __slots__ = ("address",)

    address: int


class Recorder(TorchDispatchMode):
    """Records ops, storages and events while it is entered.

    Args:
        modules: Says which module an op belongs to.
        known: The values of some tensors.
        rules: Corrections that look at ops.
        outside: Has fakes for real tensors that ops read beside the model; None leaves those as they are.
        host_is_device: Whether copies on the host are in the device's memory, as on a CPU.
    """

    def __init__(
        self,
        modules: ModuleCalls,
        known: KnownValues,
        rules: Iterable[Rule] = (),
        *,
        outside: OutsideTensors | None = None,
        host_is_device: bool = False,
    ) -> None:
        super().__init__()
        self.host_is_device = host_is_device
        self.is_on_host = False
        """Whether what runs is the host's work, where the device is another."""
        self._elsewhere = frozenset() if host_is_device else frozenset({to_host})
        """Ops whose results are not in the device's memory."""
        self._modules = modules
        self._known = known
        self._outside = outside
        self._watching = [rule for rule in rules if rule.watches_ops]
        self._infos: dict[Any, _OpInfo] = {}
        self._wrapper = Wrapper()
        self._results = FakeResults(self._wrapper)
        self._live: dict[int, int] = {}
        """Index of the live storage at an address."""
        self._ends: dict[int, _StorageEnd] = {}
        self._phase = Phase.SETUP
        self._looks_away = False
        self._phase = Phase.SETUP
        self._step = 0
        self._micro_batch = 0
        self._is_updating = False
        """Whether the optimizer runs in backward."""
        self.ops: list[Op] = []
        self.events: list[tuple[bool, int, int]] = []
        """(is allocation, storage, op)."""
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.makers: list[int | None] = []
        self.marked: dict[int, Category] = {}
        self.most: dict[int, int] = {}
        """The most bytes of storages whose size is not known for sure."""
        self.kernels: dict[int, Kernel] = {}
        """What decides the size of storages inside kernels."""
        self._temporaries: list[tuple[int, str, int | None, Kernel | None]] = []
        """Of the op that is being recorded."""
        self.global_batch: tuple[int, ...] = ()
        """Storages that hold the samples of the global batch."""
        self.uncertain: dict[str, None] = {}
        self.host_state_bytes = 0
        """Of optimizer state in the host's memory."""
        self.host_staging_bytes = 0
        """Of pinned memory on the way to and from there."""
        self.sizes_depend_on_values = False
        """Whether values of the batch decided the size of anything, so that another batch may have others."""
        self.sizes_are_guessed = False
        """Whether values that are not known decided sizes."""
        self.first_choice = ""
        """The first op that chose, and where."""
        self._lines: dict[int, str] = {}
        """Where the forward op was called whose autograd node has a number."""

    def at(self, phase: Phase, micro_batch: int, step: int | None = None) -> None:
        """Say which part of which step the following ops belong to."""
        self._phase, self._micro_batch = phase, micro_batch
        self._step = self._step if step is None else step

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within, what runs in backward is the optimizer's."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within, what runs is the host's work, and what it makes is in the host's memory."""
        before, self.is_on_host = self.is_on_host, not self.host_is_device
        try:
            yield
        finally:
            self.is_on_host = before

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Within, what runs is no part of the step."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def mark(self, tensors: Iterable[Tensor], category: Category, labels: Iterable[str] = ()) -> None:
        """Say what tensors hold, and what they are called; those not known yet are taken as allocated now."""
        names = iter(labels)
        for tensor in tensors:
            name = next(names, None)
            own = own_part(tensor)
            if self._outside is not None:
                own = self._outside.known_stand_in(own)
            index = self._see(own, None, str(category))
            if index is not None:
                self.marked[index] = category
                self.labels[index] = self.labels[index] if name is None else name

    def mark_input(self, tensor: Tensor) -> None:
        """Say that a tensor is of the batch."""
        self.mark([tensor], Category.INPUTS)

    def mark_global_batch(self, tensors: Iterable[Tensor], labels: Iterable[str]) -> None:
        """Say that tensors are parts of the global batch, as there before the first op."""
        marked = list(tensors)
        self.mark(marked, Category.INPUTS, labels)
        indices = (self._live[tensor.untyped_storage()._cdata] for tensor in marked if tensor.dim())
        self.global_batch = tuple(dict.fromkeys(indices))

    def empty_copy(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and type, on the device, with the same values where they are known."""
        copied = torch.empty_like(tensor)
        self._known.carry_over(tensor, copied)
        return copied

    def note_uncertain(self, what: str) -> None:
        """Tell the reader of the trace what is not known for sure."""
        self.uncertain.setdefault(what)

    def see(self, tensor: Tensor, label: str) -> None:
        """Record a tensor that no op made as allocated now, until it is dropped."""
        self._see(tensor, None, label)

    def values_of(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, which then decide sizes.

        Args:
            tensor: A fake one, or a real one, which has its own.

        Returns:
            A real tensor on the CPU.

        Raises:
            NotKnownError: They are not known.
        """
        values = self._known.of(tensor)
        self._note_decision(tensor)
        return values

    def array_of(self, tensor: Tensor) -> Tensor | None:
        """The values of a fake tensor that the host reads together; None, and a note, if they are not known.

        Whole numbers are taken to decide sizes.
        """
        try:
            values = self._known.of(tensor)
        except NotKnownError:
            if not self._is_in_optimizer():
                self.uncertain.setdefault(f"numbers read from a tensor in {self._modules.owner()!r}")
            return None
        if not values.is_floating_point() and not self._is_in_optimizer():
            self._note_decision(tensor)
        return values

    def remember(self, fake: Tensor, real: Tensor) -> None:
        """Say what values a fake tensor stands for."""
        self._known.remember(fake, real)

    def allocate_block(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> int:
        """Record a block that no tensor stands for, such as a library's workspace.

        Args:
            size_bytes: What it is taken to be.
            label: What it is.
            most_bytes: What it may be at most, where that is not known for sure.

        Returns:
            Its index, to release it by; without that it stays to the end.
        """
        block = self._new_storage(size_bytes, None, label)
        if most_bytes is not None:
            self.most[block] = most_bytes
        return block

    def release_block(self, block: int) -> None:
        """Record that a block is free from now on."""
        self.events.append((False, block, len(self.ops) - 1))

    def add_temporary(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> None:
        """Record memory that the op just run took beside its outputs and gave back before it ended.

        Args:
            size_bytes: What it is taken to be.
            label: What it is.
            most_bytes: What it may be at most, where that is not known for sure.
        """
        self._temporaries.append((size_bytes, label, most_bytes, None))

    def add_kernel(self, kernel: Kernel, label: str) -> int:
        """Record what a kernel took inside the op just run; its bytes."""
        size_bytes = kernel.size_bytes()
        self._temporaries.append((size_bytes, label, None, kernel))
        return size_bytes

    def release_early(self, tensor: Tensor) -> int:
        """Record that the storage of a tensor is free from now on; its bytes, 0 if it was so already."""
        index = self._live.pop(tensor.untyped_storage()._cdata, None)
        if index is None:
            return 0
        self.release_block(index)
        return self.sizes[index]

    def never_made(self, tensors: Iterable[Tensor]) -> None:
        """Say that what was recorded as allocated was not: it holds no bytes."""
        for tensor in tensors:
            index = self._live.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self.sizes[index] = 0

    @property
    def live_bytes(self) -> int:
        """What tensors hold now, without blocks that no tensor stands for."""
        return sum(self.sizes[index] for index in self._live.values())

    @property
    def live_storages(self) -> frozenset[int]:
        """Indices of the storages of tensors now."""
        return frozenset(self._live.values())

    def storages(self) -> tuple[Storage, ...]:
        """All blocks seen, with what they hold."""
        freed_in = {index: op for is_allocation, index, op in self.events if not is_allocation}
        return tuple(
            Storage(
                size_bytes=size_bytes,
                category=self._category(index, maker, freed_in.get(index)),
                op=maker,
                label=label,
                most_bytes=self.most.get(index),
                kernel=self.kernels.get(index),
            )
            for index, (size_bytes, maker, label) in enumerate(
                zip(self.sizes, self.makers, self.labels, strict=True)
            )
        )

    def event_records(self) -> tuple[Event, ...]:
        """All allocations and releases, in order.

        What lies outside of the model and stays to the end was there before the first op that reads it.
        Releases that follow one another are put in the order of their storages. What is free afterwards is the
        same, and what torch releases in the order of addresses, as autocast its casts, differs from run to run.
        """
        freed = {storage for is_allocation, storage, _ in self.events if not is_allocation}
        outside = (index for index, category in self.marked.items() if category is Category.OTHER_TENSORS)
        from_the_start = dict.fromkeys(index for index in outside if index not in freed)
        records = [Event(kind=EventKind.ALLOCATE, storage=storage, op=-1) for storage in from_the_start]
        others = (event for event in self.events if event[1] not in from_the_start)
        for is_allocation, group in groupby(others, key=itemgetter(0)):
            events = [Event(kind=_KINDS[is_allocation], storage=storage, op=op) for _, storage, op in group]
            records += events if is_allocation else sorted(events, key=lambda event: (event.op, event.storage))
        return tuple(records)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap every call to keep its compiler out."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._looks_away:
            return func(*args, **kwargs)
        if DTensor in types:
            return NotImplemented  # it calls its ops on this rank's parts, which come here again
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = _describe(func, self._watching)
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked often; through the fake mode the answer takes 30 times as long
        if info.is_question:
            return func(*args, **kwargs)
        if self._outside is not None and self._outside.are_read_by(func, args, kwargs):
            args, kwargs = tree_map_only(Tensor, self._fake_of, (args, kwargs))
        in_backward = self._phase is Phase.BACKWARD or torch._C._current_autograd_node() is not None
        for before_op in info.before:
            before_op(func, args, in_backward=in_backward)
        inputs: list[Tensor] | None = None
        remembered: Remembered | None = None
        if info.is_view and _can_be_viewed(args[0]):
            out = self._view(func, args, kwargs)
        elif info.is_list_write and _has_no_value(args[0]):
            out = None
        elif info.reads_values:
            out = self._read_values(func, args, kwargs)
        elif info.makes_anew or info.writes_over:
            out, inputs, remembered = self._results.run(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # modes need not see what is asked of tensors here
            self._record(info, func, args, kwargs, out, inputs, remembered)
        return out

    def _fake_of(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor; one from outside of the model is there from the start."""
        if self._outside is None or not is_real(tensor) or tensor.untyped_storage()._cdata in self._live:
            return tensor
        fake, is_new = self._outside.stand_in(tensor)
        if is_new and (self.host_is_device or tensor.dim() or tensor.device.type != "cpu"):
            shape = "×".join(map(str, tensor.shape)) or "1"
            line = calling_line()
            label = f"{shape} {str(tensor.dtype).removeprefix('torch.')}" + (f" read in {line}" if line else "")
            self.mark([fake], Category.OTHER_TENSORS, [label])
        return fake

    def _record(
        self,
        info: _OpInfo,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor] | None,
        remembered: Remembered | None,
    ) -> None:
        """Record an op that was run, what it made, and what rules know of it."""
        if inputs is None:
            inputs = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(out))
        for after_op in info.after:
            after_op(func, args, kwargs, outputs)
        work = None if remembered is None else remembered.about
        may_be_known = work.may_be_known if work else all(map(is_followed, outputs))
        if info.writes or info.chooses or may_be_known or self._known.has_choices:
            self._follow_values(info, func, args, kwargs, inputs, outputs)
        if info.is_free:
            return
        if work is None:
            work = _work(info, func, args, kwargs, out, inputs, outputs)
            if remembered is not None and all(map(_is_told_by_its_shape, inputs)):
                remembered.about = work
        made_ops_ago = self._made_ops_ago(args[0]) if info.writes_over else 0
        self.ops.append(self._op(info, work, made_ops_ago))
        for tensor in () if self.is_on_host or func in self._elsewhere else outputs:
            self._see(tensor, len(self.ops) - 1, info.name)
        self._record_temporaries()

    def _follow_values(
        self,
        info: _OpInfo,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        if info.chooses and not self.first_choice:
            self.first_choice = f"{info.name} in {self._modules.owner()!r}"
        if not info.is_random:
            self._known.follow(func, args, kwargs, inputs, outputs)
        elif self._known.follow_draw(func, args, kwargs, outputs):
            self.uncertain.setdefault(
                f"a number drawn at random in {self._modules.owner()!r}, taken for its mean"
            )

    def _read_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose result is no tensor, or one of a shape that depends on values."""
        if func is aten._local_scalar_dense.default and type(args[0]) is FakeTensor:  # fakes take longer
            if args[0].constant is None:
                return self._number(func, args, kwargs)
            with torch._C._DisableTorchDispatch():
                return args[0].constant.item()
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self._number(func, args, kwargs)
        except DynamicOutputShapeException:
            with suppress(NotKnownError):
                out = run_with_known_shape(self._known, func, args, kwargs)
                self._note_decision(args, kwargs)
                return out
            with suppress(NotKnownError):
                out = run_with_largest_shape(self._known, func, args, kwargs)
                self.sizes_are_guessed = True
                extent = "smallest" if self._known.guess is Guess.LEAST else "largest"
                self.uncertain.setdefault(
                    f"{func} in {self._modules.owner()!r}, assumed at its {extent} possible size"
                )
                return out
            raise

    def _note_decision(self, *values: Any) -> None:
        """Note that known values decided a size, which were assumed perhaps."""
        self.sizes_depend_on_values = True
        if self._known.are_assumed(values):
            self.sizes_are_guessed = True
            assumed = _ASSUMED[self._known.guess]
            self.uncertain.setdefault(f"sizes that depend on choices (first {self.first_choice}), {assumed}")

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | bool:
        """What an op returns that reads a number: the true one, or else what is said to be read."""
        with suppress(NotKnownError):
            if func is aten._local_scalar_dense.default:
                number = self._known.number_of(args[0])
                if type(number) is int and not self._is_in_optimizer():
                    self._note_decision(args)
                return number
            answer: bool = self._known.compute(func, args, kwargs)
            return answer
        if not self._is_in_optimizer():
            self.uncertain.setdefault(f"a number read from a tensor in {self._modules.owner()!r}")
        return _as_number(UNKNOWN_NUMBER, func, args[0])

    def _made_ops_ago(self, tensor: object) -> int:
        """How many ops before the one to be recorded a tensor's memory was made; 0 if not by one."""
        if self._is_in_optimizer() or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return 0
        index = self._live.get(tensor.untyped_storage()._cdata)
        maker = None if index is None else self.makers[index]
        return 0 if maker is None else len(self.ops) - maker

    def _op(self, info: _OpInfo, work: _Work, made_ops_ago: int) -> Op:
        return Op(
            name=info.name,
            module=OPTIMIZER if self._is_in_optimizer() else self._modules.owner(),
            phase=self._phase,
            step=self._step,
            micro_batch=self._micro_batch,
            flops=work.flops,
            read_bytes=work.read_bytes,
            written_bytes=work.written_bytes,
            dtype=work.dtype,
            recomputed=self._phase is Phase.BACKWARD and _is_recomputing(),
            random=info.is_random,
            weight_bytes=work.weight_bytes,
            made_ops_ago=made_ops_ago,
            on_host=self.is_on_host,
            line=self._line() if work.written_bytes >= _LOCATED_BYTES else "",
        )

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a fake tensor's mode returns for a view of it, in an eighth of the time."""
        base = args[0]
        mode, device = base.fake_mode, base.fake_device
        with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self._wrapper.fake(mode, out, device)
        return type(out)(self._wrapper.fake(mode, view, device) for view in out)

    def _line(self) -> str:
        """Where in Python the op is called; in backward, where its forward op was."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            return self._lines.get(node._sequence_nr(), "")
        line = calling_line()
        if torch.is_grad_enabled():
            # Autograd makes an op's node, and so counts on, before the op comes here.
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = line
        return line

    def _is_in_optimizer(self) -> bool:
        return self._is_updating or self._phase is Phase.OPTIMIZER or self._phase is Phase.SETUP

    def _see(self, tensor: Tensor, maker: int | None, label: str) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and other layouts without one storage
            self.uncertain.setdefault(f"a {tensor.layout} tensor made by {label}")
            return None
        address = storage._cdata
        index = self._live.get(address)
        if index is not None:
            if self.sizes[index] == storage.nbytes():
                return index
            self.release_block(index)  # resized: another block from now on
            maker, label = self.makers[index], self.labels[index]
        fresh = self._new_storage(storage.nbytes(), maker, label)
        if index is None:
            end = self._ends[address] = _StorageEnd(storage, self._freed)
            end.address = address
        elif index in self.marked:
            self.marked[fresh] = self.marked[index]
        self._live[address] = fresh
        return fresh

    def _record_temporaries(self) -> None:
        if not self._temporaries:
            return
        blocks = []
        for size_bytes, label, most_bytes, kernel in self._temporaries:
            blocks.append(self.allocate_block(size_bytes, label, most_bytes=most_bytes))
            if kernel is not None:
                self.kernels[blocks[-1]] = kernel
        for block in blocks:
            self.release_block(block)
        self._temporaries.clear()

    def _new_storage(self, size_bytes: int, maker: int | None, label: str) -> int:
        index = len(self.sizes)
        self.sizes.append(size_bytes)
        self.makers.append(maker)
        self.labels.append(label)
        self.events.append((True, index, len(self.ops) - 1))
        return index

    def _freed(self, end: _StorageEnd) -> None:
        self._ends.pop(end.address, None)
        index = self._live.pop(end.address, None)
        if index is not None:
            self.release_block(index)

    def _category(self, index: int, maker: int | None, freed_in: int | None) -> Category:
        if index in self.marked:
            return self.marked[index]
        phase = None if maker is None else self.ops[maker].phase
        if phase is not Phase.FORWARD and phase is not Phase.EMBEDDING:
            return Category.TEMPORARIES
        if freed_in is None or self.ops[freed_in].phase is not phase:
            return Category.SAVED_TENSORS
        return Category.TEMPORARIES


def _overrides(rule: Rule, method: str) -> bool:
    return getattr(type(rule), method) is not getattr(Rule, method)


def _can_be_viewed(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided


def _describe(func: Any, rules: Iterable[Rule]) -> _OpInfo:
    returns = func._schema.returns
    is_view = func is aten._unsafe_view.default or any(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    watching = [rule for rule in rules if rule.watches_op(func)]
    return _OpInfo(
        name=str(func),
        is_question=func.namespace in ("prim", "profiler"),
        is_view=is_view,
        is_free=is_view or func in _WITHOUT_COST,
        # Fused attention is tagged as random even where it draws nothing, so the tag alone is not believed.
        is_random=torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func),
        reads_values=not _READ_VALUES.isdisjoint(func.tags) or func in SHAPED_BY_VALUES,
        makes_anew=bool(returns) and not any(a.alias_info for a in (*func._schema.arguments, *returns)),
        writes_over=_writes_over(func),
        is_list_write=not returns and str(func).startswith(_LIST_WRITES),
        written_arguments=tuple(
            index
            for index, argument in enumerate(func._schema.arguments)
            if not returns and argument.alias_info is not None and argument.alias_info.is_write
        ),
        writes=has_writes(func),
        chooses=func in CHOICES,
        before=(
            *([check_op_makes_dense_gradient] if func in SPARSE_ARGUMENT else []),
            *(rule.before_op for rule in watching if _overrides(rule, "before_op")),
        ),
        after=tuple(rule.after_op for rule in watching if _overrides(rule, "after_op")),
    )


def _writes_over(func: Any) -> bool:
    """Whether an op writes to its first argument alone and returns it as large as it was, by its schema."""
    aliases = [value.alias_info for value in (*func._schema.arguments, *func._schema.returns)]
    first, *others, returned = aliases if len(aliases) > 1 else (None, None)
    if first is None or returned is None or not (first.is_write and returned.is_write) or any(others):
        return False
    return torch.Tag.inplace_view not in func.tags and "resize" not in str(func)


def _work(
    info: _OpInfo,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> _Work:
    written = 0 if func in _WITHOUT_WRITE else sum(map(_view_bytes, outputs))
    if info.written_arguments:
        written = sum(map(_view_bytes, tensors_in([args[i] for i in info.written_arguments if i < len(args)])))
    if func in _GATHERS:
        read = written + sum(map(_view_bytes, inputs[1:]))
    elif func in _WITHOUT_WRITE:
        read = 0
    else:
        read = sum(map(_view_bytes, inputs))
    main = max(inputs or outputs, key=_view_bytes, default=None)
    return _Work(
        flops=count_flops(func, args, kwargs, out),
        read_bytes=read,
        written_bytes=written,
        dtype="" if main is None else str(main.dtype).removeprefix("torch."),
        weight_bytes=_weight_bytes(func, args),
        may_be_known=all(map(is_followed, outputs)),
    )


def _as_number(value: float, func: Any, tensor: Tensor) -> float | bool:
    """A number as what an op returns that reads one: of the tensor's own type, or whether tensors are equal."""
    if func is not aten._local_scalar_dense.default or tensor.dtype is torch.bool:
        return bool(value)
    return value if tensor.is_floating_point() else int(value)


def _is_recomputing() -> bool:
    """Whether a backward node runs a piece of forward: backward itself runs without gradients."""
    return torch.is_grad_enabled() and torch._C._current_autograd_node() is not None


def _has_no_value(tensors: Any) -> bool:
    """Whether all of a list are fakes without a value; torch keeps it for scalars such as a step count."""
    return all(type(tensor) is FakeTensor and tensor.constant is None for tensor in tensors)


def _weight_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of a convolution's weights, by where its schema has them."""
    position = _CONVOLUTION_WEIGHTS.get(func)
    return 0 if position is None else _view_bytes(args[position])


def _view_bytes(tensor: Tensor) -> int:
    """Bytes a kernel touches for a tensor; an expanded one is no larger than what it views."""
    own = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return own
    return min(own, tensor.untyped_storage().nbytes())


def _is_told_by_its_shape(tensor: Tensor) -> bool:
    """Whether shape and strides alone tell `_view_bytes`, whatever storage the tensor lies in."""
    return tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= spanned_bytes(tensor)
