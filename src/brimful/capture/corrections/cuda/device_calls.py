"""Code that names the device "cuda" runs, and what it copies there is counted.

Private torch API used here: `torch._C._get_dispatch_mode` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from brimful.capture.corrections.rule import Rule
from brimful.capture.fakes.batch import HOST_MARK
from brimful.capture.fakes.outside import is_real
from brimful.replaced import replaced
from brimful.trace import Category


class DeviceCalls(Rule):
    """Take "cuda" for the CPU that the fakes are on; what is moved from the host to any device is copied.

    That is the batch, and real tensors that the code holds on the CPU.

    A model is on the device from the start, so moving it does nothing. `torch.autocast("cuda")` and
    `GradScaler("cuda")`, which turn themselves off without a GPU, are in force.
    """

    name = "device_calls"
    source = "torch.Tensor.to, torch.Tensor.cuda, torch/amp/autocast_mode.py (checked: 2.13)"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """`Tensor.to`, `Tensor.cuda` and `Tensor.pin_memory`."""
        return {Tensor.to: self._to, Tensor.cuda: self._cuda, Tensor.pin_memory: lambda tensor, *_: tensor}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Modules stay where they are while the context is open; autocast and scaling work."""
        make_autocast, make_scaler = autocast.__init__, GradScaler.__init__
        move_module = nn.Module.to

        def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            args = tuple(value for value in args if not _is_device(value))
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
            return move_module(module, *args, **kwargs) if args or kwargs else module

        def on_cpu(make: Callable[..., None]) -> Callable[..., None]:
            def init(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
                kwargs.pop("device_type", None)
                kwargs.pop("device", None)
                if make is make_autocast and not args and kwargs.get("dtype") is None and is_cuda(device):
                    kwargs["dtype"] = torch.float16  # autocast's default on CUDA; on a CPU it is bfloat16
                make(self, "cpu" if is_cuda(device) else device, *args, **kwargs)

            return init

        with (
            replaced(nn.Module, "to", stay),
            replaced(nn.Module, "cuda", lambda module, *_: module),
            replaced(autocast, "__init__", on_cpu(make_autocast)),
            replaced(GradScaler, "__init__", on_cpu(make_scaler)),
        ):
            yield

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        if args and _is_device(args[0]):
            device, args = args[0], args[1:]
        kwargs.pop("non_blocking", None)
        # To any device: where torch sees no GPU, a loop that asks for one names the CPU.
        moved = tensor if device is None else self._copied(tensor)
        return moved.to(*args, **kwargs) if args or kwargs else moved

    def _cuda(self, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return self._copied(tensor)

    def _copied(self, tensor: Tensor) -> Tensor:
        """A recorded copy of what lies on the host; anything else is on the device already."""
        is_input = getattr(tensor, HOST_MARK, False)
        is_on_host = is_input or (_is_captured() and is_real(tensor) and tensor.device.type == "cpu")
        if not is_on_host:
            return tensor
        copy: Tensor = self.recorder.values.empty_copy(tensor)
        if is_input:
            self.recorder.mark([copy], Category.INPUTS)
        self.count(copy.nbytes)
        return copy


def _is_captured() -> bool:
    """Whether what runs is of the step, and not the following of its values, which works on real tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, int, torch.device)) and not isinstance(value, bool)


def is_cuda(device: Any) -> bool:
    """Whether a device that code asks for is a GPU."""
    return isinstance(device, int) or str(device).startswith("cuda")
