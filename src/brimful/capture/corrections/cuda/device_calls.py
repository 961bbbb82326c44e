"""Code that names the device "cuda" or the host runs, and what it copies between them is counted.

Private torch API used here: `torch._C._get_dispatch_mode` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from brimful.capture.corrections.rule import Rule
from brimful.capture.fakes.outside import is_real
from brimful.capture.recording.places import Place
from brimful.torch_utils.replaced import replaced
from brimful.trace import Category


class DeviceCalls(Rule):
    """Take "cuda" for the CPU that the fakes are on, and count what is copied there from the host.

    That is the batch, what code made on the host, and real tensors that it holds on the CPU. What is copied to
    the host by name is not in the device's memory; see `Places`.

    A model is on the device from the start, so moving it there does nothing. `torch.autocast("cuda")` and
    `GradScaler("cuda")`, which turn themselves off without a GPU, are in force.
    """

    name = "device_calls"
    source = "torch.Tensor.to, cpu, cuda and pin_memory, torch/amp/autocast_mode.py (checked: 2.13)"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of what moves a tensor."""
        return {
            Tensor.to: self._to,
            Tensor.cpu: lambda tensor, **_kwargs: self._on_host(tensor, Place.HOST),
            Tensor.cuda: lambda tensor, *_args, **_kwargs: self._on_device(tensor),
            Tensor.pin_memory: lambda tensor, *_args: tensor,
        }

    @contextmanager
    def context(self) -> Iterator[None]:
        """Let modules move as their tensors do while the context is open; autocast and scaling work."""
        make_autocast, make_scaler = autocast.__init__, GradScaler.__init__
        move_module = nn.Module.to

        def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            device = next((value for value in args if _is_device(value)), kwargs.get("device"))
            if device is not None:
                self._move_module(module, device)
            args = tuple(value for value in args if not _is_device(value))
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
            return move_module(module, *args, **kwargs) if args or kwargs else module

        def on_cpu(make: Callable[..., None]) -> Callable[..., None]:
            def init(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
                kwargs.pop("device_type", None)
                kwargs.pop("device", None)
                if make is make_autocast and not args and kwargs.get("dtype") is None and _is_cuda(device):
                    kwargs["dtype"] = torch.float16  # autocast's default on CUDA; on a CPU it is bfloat16
                make(self, "cpu" if _is_cuda(device) else device, *args, **kwargs)

            return init

        with (
            replaced(nn.Module, "to", move),
            replaced(nn.Module, "cuda", lambda module, *_: self._move_module(module, "cuda")),
            replaced(autocast, "__init__", on_cpu(make_autocast)),
            replaced(GradScaler, "__init__", on_cpu(make_scaler)),
        ):
            yield

    def _move_module(self, module: nn.Module, device: Any) -> nn.Module:
        """Put a module's fake tensors in a place, without another copy: the ones before are gone."""
        places = self.recorder.places
        is_named = places.names_host(device, of_module=True)
        for tensor in (*module.parameters(), *module.buffers()):
            if is_named and isinstance(tensor, FakeTensor):
                places.note_moved_to_cpu(tensor)
        is_host = is_named and not places.cpu_is_device  # else it is the job's model that is moved
        for tensor in (*module.parameters(), *module.buffers()):
            if isinstance(tensor, FakeTensor) and str(device) != "meta":
                places.put(tensor, Place.NAMED if is_host else Place.DEVICE)
        return module

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        like = kwargs.pop("other", None)
        if args and _is_device(args[0]):
            device, args = args[0], args[1:]
        elif args and isinstance(args[0], Tensor):
            like, args = args[0], args[1:]
        kwargs.pop("non_blocking", None)
        if isinstance(like, Tensor):
            kwargs |= {"dtype": like.dtype}
            tensor = self._beside(tensor, like)
        elif device is not None:
            tensor = self._moved(tensor, device)
        return tensor.to(*args, **kwargs) if args or kwargs else tensor

    def _beside(self, tensor: Tensor, other: Tensor) -> Tensor:
        """The tensor where another one is: `other.device` is the CPU for both places of a captured GPU."""
        places = self.recorder.places
        if isinstance(other, FakeTensor) and places.of(other) is Place.DEVICE:
            return self._on_device(tensor)
        return self._moved(tensor, other.device)

    def _moved(self, tensor: Tensor, device: Any) -> Tensor:
        places = self.recorder.places
        if places.names_host(device):
            places.note_moved_to_cpu(tensor)
        # To any other device: where torch sees no GPU, a script that asks for one names the CPU.
        return self._on_host(tensor, Place.NAMED) if places.names_host(device) else self._on_device(tensor)

    def _on_host(self, tensor: Tensor, place: Place) -> Tensor:
        places = self.recorder.places
        if not isinstance(tensor, FakeTensor):
            return tensor
        if places.of(tensor) is Place.BATCH and place is Place.NAMED:
            places.put(tensor, place)  # should it be read with the model, "cpu" is the device
        return tensor if places.is_on_host(tensor) else self._copied(tensor, place)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """A recorded copy of what lies on the host; anything else is on the device already."""
        is_outside = _is_captured() and is_real(tensor) and tensor.device.type == "cpu"
        if not is_outside and self.recorder.places.of(tensor) is Place.DEVICE:
            return tensor
        copy = self._copied(tensor, Place.DEVICE)
        if not is_outside:
            self.recorder.mark([copy], Category.INPUTS)
        self.count(copy.nbytes)
        return copy

    def _copied(self, tensor: Tensor, place: Place) -> Tensor:
        copy: Tensor = _Copy.apply(tensor, place, self)
        return copy

    def copied(self, tensor: Tensor, place: Place) -> Tensor:
        """A copy in a place, with the same values where they are known."""
        with self.recorder.places.making(place):
            return self.recorder.values.empty_copy(tensor)


class _Copy(torch.autograd.Function):
    """A copy in a place, whose gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: Place, rule: DeviceCalls) -> Tensor:
        ctx.back = Place.HOST if place is Place.DEVICE else Place.DEVICE
        ctx.rule = rule
        return rule.copied(tensor, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rule.copied(gradient, ctx.back), None, None


def _is_captured() -> bool:
    """Whether what runs is of the step, and not the following of its values, which works on real tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, int, torch.device)) and not isinstance(value, bool)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")
