"""An optimizer whose state is in the host's memory and which computes there.

In a step, gradients and parameters go to the host some at a time, the optimizer updates the parameters there,
and they go back:

    to the host      1   2       3       4
    on the host          1 . . . 2 . . . 3 . . . 4 . . .
    to the device                1       2       3       4

They pass through two staging buffers in turns, so the third group waits until the first has left.

The parameters on the device are authoritative: the host holds none between steps, so whatever changes them on
the device, a save that is loaded or an average, needs to notify nothing here. The optimizer is the user's own,
with its groups and its state by parameter; only while it steps, it is given the host's copies of parameters.

It computes what it would compute on the device, rounded as the host's kernels round.

Private torch API used here: `DTensor._spec`, by which FSDP2 makes parts on the host, too (checked: torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.batches import map_leaves, own_part
from brimful.errors import UsageError
from brimful.execution.update_in_backward import steps_one_by_one
from brimful.memory import pinned_bytes
from brimful.optimizers import has_gaps
from brimful.transforms.host_link import arrived_on_host, send_to_device, send_to_host, to_device_done
from brimful.utils.quantities import MIB, format_bytes

BUCKET_BYTES = 64 * MIB
"""Bytes of gradients and parameters that go to the host at once, unless a single one is larger: a copy of some
MiB comes to the rate of the link. A choice."""

_ALIGNMENT = 64
"""Bytes of a cache line."""


class UpdateOnHost:
    """An optimizer of `torch.optim`, or brimful's own, that steps on the host, with its state there.

    `around_host` gives a context around what runs on the host in the host's memory. Raises `UsageError` if the
    optimizer may look at several parameters together or is for a GPU alone (`capturable`), or if there is not
    enough memory for the staging buffers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        around_host: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not steps_one_by_one(optimizer):
            raise UsageError(
                f"offload_optimizer updates some parameters after others, and {type(optimizer).__name__} may "
                "look at all of them together. Take one of torch.optim's others, such as adamw, or leave it "
                "out."
            )
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise UsageError(
                f"this {type(optimizer).__name__} is capturable, which kernels on the host are not. Make it "
                "without capturable=True, or leave offload_optimizer out."
            )
        self._optimizer = optimizer
        self._around_host = around_host
        self.has_begun = False
        """Whether the step that is running, or that ran last, may have changed something."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        is_pinned = any(own_part(parameter).is_cuda for parameter in parameters)
        rooms = [_room(parameter) for parameter in parameters]
        capacity = max([min(BUCKET_BYTES, sum(rooms)), *rooms])
        rows = 1 if sum(rooms) <= capacity else 2
        with around_host():
            self.staging = [_memory(capacity, is_pinned=is_pinned) for _ in range(rows)]
            """Staging buffers, used in turns, of bytes; one alone if everything fits in it."""
            for parameter, state in optimizer.state.items():
                optimizer.state[parameter] = _state_on_host(state)

    @torch.no_grad()
    def run(self, step: Callable[[], object]) -> None:
        """Run a step; `step` is the optimizer's own, called for one bucket of parameters after another.

        Raises `UsageError` if a gradient is sparse.
        """
        self.has_begun = False
        if _found_inf(self._optimizer):
            return
        buckets = list(self._buckets())  # checks all before the first is updated
        sent = map(self._send, buckets, cycle(self.staging))  # begun one by one
        back: list[Tensor] = []
        here = next(sent, None)
        try:
            while here is not None:
                arrived_on_host(here.parameters)
                following = next(sent, None)
                self.has_begun = True
                with self._around_host(), _without_found_inf(self._optimizer):
                    self._step_with(here.copies, step)
                send_to_device(here.copied, here.parameters)
                back += here.parameters
                here = following
        finally:
            if back:
                increment_version(back)
                to_device_done(back)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, the optimizer's parameters are on the host, and so is a state that it loads.

        If it loads none, it keeps its own.
        """
        copies = {
            parameter: _as_part(parameter, torch.empty_like(own_part(parameter), device="cpu"))
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        groups = [[*group["params"]] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [copies[parameter] for parameter in group["params"]]
        try:
            yield
        finally:
            state = self._optimizer.state
            for parameter, copy in copies.items():
                if copy in state:
                    state[parameter] = state.pop(copy)
            for group, parameters in zip(self._optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """The parameters with gradients, in order, in groups that fit a staging buffer."""
        bucket: list[nn.Parameter] = []
        room = BUCKET_BYTES
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout is not torch.strided:
                    raise UsageError(
                        f"a gradient is {parameter.grad.layout}, and offload_optimizer takes dense ones. Make "
                        "embeddings with sparse=False, or leave offload_optimizer out."
                    )
                taken = _room(parameter)
                if bucket and taken > room:
                    yield bucket
                    bucket, room = [], BUCKET_BYTES
                bucket.append(parameter)
                room -= taken
        if bucket:
            yield bucket

    def _send(self, bucket: Sequence[nn.Parameter], memory: Tensor) -> _Sent:
        """Begin the copies of some parameters and their gradients to the host."""
        sources: list[Tensor] = []
        for parameter in bucket:
            assert parameter.grad is not None
            sources += [own_part(parameter.detach()), own_part(parameter.grad)]
        copied: list[Tensor] = []
        begin = 0
        for source in sources:
            copied.append(_like(source, memory[begin : begin + source.nbytes]))
            begin += _aligned(source.nbytes)
        send_to_host(sources, copied)
        return _Sent(
            parameters=sources[::2],
            copied=copied[::2],
            copies={
                parameter: _with_gradient(parameter, *copied[2 * i : 2 * i + 2])
                for i, parameter in enumerate(bucket)
            },
        )

    def _step_with(self, copies: dict[nn.Parameter, nn.Parameter], step: Callable[[], object]) -> None:
        """Let the optimizer step with the host's copies of some of its parameters."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        of_copies = [
            {name: _on_host(value) if isinstance(value, Tensor) else value for name, value in group.items()}
            | {"params": [copies[p] for p in group["params"] if p in copies]}
            for group in groups
        ]
        optimizer.param_groups = [group for group in of_copies if group["params"]]
        optimizer.state = defaultdict(
            dict, {copy: _state_on_host(state[p]) for p, copy in copies.items() if p in state}
        )
        try:
            step()
        finally:
            state.update({p: optimizer.state[copy] for p, copy in copies.items() if copy in optimizer.state})
            optimizer.param_groups, optimizer.state = groups, state


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of this rank's optimizer state between steps, including step counts."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(own_part(value).nbytes for value in tensors if isinstance(value, Tensor))


@dataclass(frozen=True, slots=True)
class _Sent:
    """Parameters and gradients whose copies to the host have begun."""

    parameters: list[Tensor]
    """Parameters on the device; this rank's shards of sharded ones."""
    copied: list[Tensor]
    """Copies of the parameters on the host."""
    copies: dict[nn.Parameter, nn.Parameter]
    """By parameter, its copy on the host, with its gradient."""


def _room(parameter: Tensor) -> int:
    """Bytes of a staging buffer that a parameter and its gradient take."""
    return 2 * _aligned(own_part(parameter).nbytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _memory(size_bytes: int, *, is_pinned: bool) -> Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        taken = pinned_bytes(size_bytes) if is_pinned else size_bytes
        how = f"{'pin' if is_pinned else 'take'} {format_bytes(taken)}"
        raise UsageError(
            f"offload_optimizer cannot {how} of the host's memory, twice, for gradients and parameters on "
            f"their way: {error}. Leave offload_optimizer out."
        ) from error


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """A tensor of equal shape and type in some memory; laid out alike where `tensor` has no gaps."""
    flat = memory.view(tensor.dtype)
    return flat.view(tensor.size()) if has_gaps(tensor) else flat.as_strided(tensor.size(), tensor.stride())


def _with_gradient(parameter: nn.Parameter, copied: Tensor, gradient: Tensor) -> nn.Parameter:
    copy = _as_part(parameter, copied)
    copy.grad = _as_part(parameter, gradient).detach()
    return copy


def _as_part(parameter: Tensor, own: Tensor) -> nn.Parameter:
    """Wrap a rank's shard `own` on the host as `parameter` is: a `DTensor` for a sharded one."""
    if isinstance(parameter, DTensor):
        own = DTensor(own, parameter._spec, requires_grad=False)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def _state_on_host(state: Any) -> Any:
    return map_leaves(state, Tensor, _on_host, into_objects=False)


def _on_host(tensor: Tensor) -> Tensor:
    """A tensor of the state on the host: itself, or a copy of one that is on a device."""
    own = own_part(tensor)
    if own.device.type == "cpu":
        return tensor
    return own.cpu() if own is tensor else _as_part(tensor, own.cpu()).detach()


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether a loss scaler makes a fused optimizer skip the step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


@contextmanager
def _without_found_inf(optimizer: Optimizer) -> Iterator[None]:
    """Within, a fused optimizer ignores the scaler's `found_inf`, which is on the device."""
    if getattr(optimizer, "found_inf", None) is None:
        yield
        return
    found, optimizer.found_inf = optimizer.found_inf, None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.found_inf = found  # type: ignore[attr-defined]
