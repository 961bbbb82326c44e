"""The protocol of a correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch.overrides import TorchFunctionMode

from brimful.devices import Device
from brimful.settings import Settings
from brimful.trace import Correction, Kernel


class Recording(Protocol):
    """What a rule may tell the recorder, and ask it; see `Recorder`."""

    is_on_host: bool

    @property
    def live_bytes(self) -> int: ...  # noqa: D102
    def add_temporary(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> None: ...  # noqa: D102
    def add_kernel(self, kernel: Kernel, label: str) -> int: ...  # noqa: D102
    def allocate_block(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> int: ...  # noqa: D102
    def release_block(self, block: int) -> None: ...  # noqa: D102
    def release_early(self, tensor: torch.Tensor) -> int: ...  # noqa: D102
    def empty_copy(self, tensor: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def mark_input(self, tensor: torch.Tensor) -> None: ...  # noqa: D102
    def see(self, tensor: torch.Tensor, label: str) -> None: ...  # noqa: D102
    def values_of(self, tensor: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def array_of(self, tensor: torch.Tensor) -> torch.Tensor | None: ...  # noqa: D102
    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None: ...  # noqa: D102
    def note_uncertain(self, what: str) -> None: ...  # noqa: D102


@dataclass
class Rule:
    """One thing that a device does and fake tensors on a CPU do not show.

    A rule replaces torch functions, watches ops, or opens a context around the capture. It counts what it
    changed in the last captured step, so that a result can list its contribution.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    watches_ops: ClassVar[bool] = False
    lasts: ClassVar[bool] = False
    """Whether what it changes once stays for all further steps."""

    target: Device
    """The device whose decisions the capture follows."""
    settings: Settings
    recorder: Recording = field(init=False, repr=False, compare=False)
    """Records the steps; set before the contexts are opened."""
    occurrences: int = 0
    changed_bytes: int = 0

    def applies(self) -> bool:
        """Whether the target decides otherwise under these settings."""
        return self.target.kind == "cuda"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Torch functions and what stands in for them."""
        return {}

    def context(self) -> AbstractContextManager[object]:
        """A context that is open during the capture."""
        return nullcontext()

    def watches_op(self, func: Any) -> bool:
        """Whether `before_op` and `after_op` have anything to do with an op; asked once, if `watches_ops`."""
        return True

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Called before each op that is watched."""

    def after_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> None:
        """Called after each op that is watched, before its outputs are recorded."""

    def begin_step(self) -> None:
        """Called before each captured step: what it changed in earlier ones counts no more, unless it lasts."""
        if not self.lasts:
            self.occurrences = self.changed_bytes = 0

    def count(self, changed_bytes: int) -> None:
        """Note one occurrence and the bytes it allocates more (positive) or less."""
        self.occurrences += 1
        self.changed_bytes += changed_bytes

    def add(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> None:
        """Record and count memory that the op just run took inside and gave back; none is nothing.

        Args:
            size_bytes: What it is taken to be.
            label: What it is.
            most_bytes: What it may be at most, where that is not known for sure.
        """
        if size_bytes or most_bytes:
            self.recorder.add_temporary(size_bytes, label, most_bytes=most_bytes)
            self.count(size_bytes)

    def add_kernel(self, kernel: Kernel, label: str) -> None:
        """Record and count what a kernel took inside the op just run, which may be nothing at this size."""
        size_bytes = self.recorder.add_kernel(kernel, label)
        if size_bytes:
            self.count(size_bytes)

    def record(self) -> Correction:
        """What the rule did in the last captured step."""
        return Correction(
            name=self.name,
            source=self.source,
            occurrences=self.occurrences,
            changed_bytes=self.changed_bytes,
        )


class CorrectedFunctions(TorchFunctionMode):
    """Calls the functions of the rules instead of torch's, in backward too.

    A function mode is out of force inside `Tensor.backward`; a recomputation there would choose other ops than
    the forward did. So backward runs under the mode once more.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        super().__init__()
        self._stand_ins = {
            function: stand_in for rule in rules for function, stand_in in rule.functions().items()
        }
        self._tell_backward: Callable[[bool], None] = lambda _begins: None
        self._backward_depth = 0
        """Reentrant checkpointing runs a backward pass inside another."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            with self._in_backward():
                return func(*args, **kwargs)
        stand_in = self._stand_ins.get(func)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}  # where the fakes are
        return func(*args, **kwargs)

    @contextmanager
    def backward_told(self, tell: Callable[[bool], None]) -> Iterator[None]:
        """Call `tell` with True as a backward pass begins and with False as it ends."""
        before, self._tell_backward = self._tell_backward, tell
        try:
            yield
        finally:
            self._tell_backward = before

    def _backward(
        self,
        tensors: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        grad_tensors: Any = None,
        **_unused: Any,
    ) -> None:
        roots = tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)
        given = gradient if gradient is not None else grad_tensors
        if given is None:
            with torch.no_grad():
                given = tuple(torch.ones_like(root) for root in roots)
        elif isinstance(given, torch.Tensor):
            given = (given,)
        wanted = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        with self._in_backward(), self:
            torch.autograd.graph._engine_run_backward(
                roots,
                tuple(given),
                create_graph if retain_graph is None else retain_graph,
                create_graph,
                wanted,
                allow_unreachable=True,
                accumulate_grad=True,
            )

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        if self._backward_depth == 0:
            self._tell_backward(True)
        self._backward_depth += 1
        try:
            yield
        finally:
            self._backward_depth -= 1
            if self._backward_depth == 0:
                self._tell_backward(False)
