"""The dispatch mode of a capture: sees each op below autograd, runs it on fake tensors and records it.

Private torch APIs used here: `torch._ops`, `torch._subclasses.fake_tensor`, `torch.utils._python_dispatch`,
`torch.utils._pytree` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from brimful.batches import own_part, tensors_in
from brimful.capture.carried import CarriedState
from brimful.capture.corrections.rule import Rule
from brimful.capture.fakes.cache import OpResult
from brimful.capture.fakes.outside import OutsideTensors, is_real
from brimful.capture.recording.facts import StepFacts
from brimful.capture.recording.ledger import StorageLedger
from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.op_info import OpInfo, describe_op
from brimful.capture.recording.op_log import OpLog
from brimful.capture.recording.places import DEVICE, Place, Places
from brimful.capture.recording.position import StepPosition
from brimful.capture.recording.runner import FakeRunner
from brimful.capture.recording.traffic import depends_on_shape_alone
from brimful.capture.recording.update import Mark
from brimful.capture.recording.value_reader import ValueReader
from brimful.capture.recording.work import work_of
from brimful.capture.values.known import KnownValues, is_followed
from brimful.errors import CaptureError
from brimful.torch_utils.lines import calling_line
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts
from brimful.trace import Category, Op, Phase

_DEVICE_OF = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):
    """Records ops, blocks of memory and what is uncertain of them while it is entered.

    `known` has the values of some tensors, and `rules` are corrections that watch ops. `outside` has fakes for
    real tensors that ops read beside the model; None leaves those as they are. `host_is_device` says that
    copies on the host are in the device's memory, as on a CPU; `runs_own_loop` that the job's own loop runs,
    which sets torch's flags itself; and `cpu_is_device` that code is known to call its device "cpu", see
    `Places`.
    """

    def __init__(
        self,
        modules: ModuleCalls,
        known: KnownValues,
        rules: Iterable[Rule] = (),
        *,
        outside: OutsideTensors | None = None,
        host_is_device: bool = False,
        runs_own_loop: bool = False,
        cpu_is_device: bool = False,
    ) -> None:
        super().__init__()
        self.runs_own_loop = runs_own_loop
        self.host_is_device = host_is_device
        self.facts = StepFacts()
        self.position = StepPosition(host_is_device=host_is_device)
        self.values = ValueReader(known, modules, self.position, self.facts)
        self._log = OpLog(modules, self.position)
        self.ledger = StorageLedger(self._log.ops, self.facts)
        self.places = Places(self.ledger, are_two=not host_is_device, cpu_is_device=cpu_is_device)
        self._runner = FakeRunner(self.values)
        self._outside = outside
        self._rules = tuple(rules)
        self._infos: dict[Any, OpInfo] = {}
        self._is_paused = False
        self.carried: CarriedState | None = None
        """Finds what forwards write to."""

    @property
    def ops(self) -> list[Op]:
        """The ops recorded so far."""
        return self._log.ops

    def mark_here(self) -> Mark:
        """A mark of how much is recorded so far."""
        return Mark(len(self.ops), len(self.ledger.blocks), len(self.ledger.events))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing while the context is open: what runs is not part of the step."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def mark(self, tensors: Iterable[Tensor], category: Category, labels: Iterable[str] = ()) -> None:
        """Set what tensors hold, and their names; those that are not tracked yet are allocated now."""
        names = iter(labels)
        for tensor in tensors:
            name, own = next(names, None), own_part(tensor)
            own = own if self._outside is None else self._outside.known_stand_in(own)
            self.ledger.mark(own, category, name)

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap every call to keep its compiler out."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            # Two of three calls; through the fake mode the answer takes 30 times as long.
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if any(map(calls_ops_on_parts, types)):
            return NotImplemented  # the ops on the parts come here again
        with torch._C.DisableTorchFunction():  # modes need not see what is asked of tensors here
            info = self._infos.get(func)
            if info is None:
                if isinstance(func, HigherOrderOperator):
                    raise CaptureError(
                        f"torch's operator {func.name()} in {calling_line()} cannot be captured: which of its "
                        "functions runs, or how often, depends on values that fake tensors do not have. In its "
                        "place, write a loop, or call the function that takes most memory."
                    )
                info = self._infos[func] = describe_op(func, self._rules)
            if info.is_metadata:
                return func(*args, **kwargs)
            if self.carried is not None and self.carried.use is not None and not info.is_view:
                self.carried.use.note(func, args, kwargs)
            if self._outside is not None and self._outside.are_read_by(func, args, kwargs):
                args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs))
            if kwargs.get("device") == DEVICE:
                kwargs = {**kwargs, "device": torch.device("cpu")}  # where the fakes are
            in_backward = self.position.phase is Phase.BACKWARD or torch._C._current_autograd_node() is not None
            for before_op in info.before:
                before_op(func, args, in_backward=in_backward)
            was_in_op, self.places.runs_op = self.places.runs_op, True
            try:
                result = self._runner.run(info, func, args, kwargs)
            finally:
                self.places.runs_op = was_in_op
            self._record(info, func, args, kwargs, result)
            return result.out

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The fake in the place of a real tensor; one from outside of the model is there from the start."""
        if self._outside is None or not is_real(tensor) or self.ledger.index_of(tensor) is not None:
            return tensor
        fake, is_new = self._outside.stand_in(tensor)
        if is_new and (self.host_is_device or tensor.dim() or tensor.device.type != "cpu"):
            shape = "×".join(map(str, tensor.shape)) or "1"
            line = calling_line()
            label = f"{shape} {str(tensor.dtype).removeprefix('torch.')}" + (f" read in {line}" if line else "")
            self.mark([fake], Category.OTHER_TENSORS, [label])
            if tensor.device.type == "cpu":
                self.places.note_unnamed(fake)
        return fake

    def _record(
        self, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: OpResult
    ) -> None:
        """Record an op that was run, what it made, and what rules know of it."""
        out, found, cached = result
        inputs = list(tensors_in((args, kwargs))) if found is None else found
        outputs = list(tensors_in(out))
        place, decided_by = self.places.of_results(func, inputs)
        is_on_host = place in (Place.NAMED, Place.HOST)
        for after_op in () if is_on_host else info.after:
            after_op(func, args, kwargs, outputs)
        work = None if cached is None else cached.work
        may_be_known = work.may_be_known if work else all(map(is_followed, outputs))
        if info.writes or info.chooses or may_be_known or self.values.known.has_choices:
            self.values.follow(info, func, args, kwargs, inputs, outputs)
        if info.has_no_cost:
            return
        if work is None:
            work = work_of(info, func, args, kwargs, out, inputs, outputs)
            if cached is not None and all(map(depends_on_shape_alone, inputs)):
                cached.work = work
        made_ops_ago = self._made_ops_ago(args[0]) if info.is_in_place else 0
        with self.position.on_host() if is_on_host else nullcontext():
            op = self._log.add(info, work, made_ops_ago)
        if not self.position.is_on_host and (self.host_is_device or not info.is_copy_to_host):
            for tensor in outputs:
                self._place(tensor, place, decided_by, info.name, op)
        self.ledger.record_temporaries()

    def _place(self, tensor: Tensor, place: Place, decided_by: tuple[int, ...], label: str, op: int) -> None:
        """Record a tensor that an op made or wrote to, unless it is on the host."""
        if self.places.is_on_host(tensor):
            return
        if place in (Place.NAMED, Place.HOST) and self.ledger.index_of(tensor) is None:
            self.places.put(tensor, place)
            return
        is_new = self.ledger.index_of(tensor) is None
        self.ledger.track(tensor, label, op)
        if place is Place.UNNAMED and is_new:
            self.places.note_unnamed(tensor, decided_by)

    def _made_ops_ago(self, tensor: object) -> int:
        """How many ops before the one to be recorded a tensor's memory was made; 0 if no op made it."""
        if (
            self.position.is_in_optimizer
            or not isinstance(tensor, Tensor)
            or tensor.layout is not torch.strided
        ):
            return 0
        index = self.ledger.index_of(tensor)
        maker = None if index is None else self.ledger.blocks[index].op
        return 0 if maker is None else len(self.ops) - maker
