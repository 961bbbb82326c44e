"""Arrays and lists on the host, and tensors made of them: matching by SciPy, metrics, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from brimful.capture.corrections.rule import Rule
from brimful.capture.recording.places import Place
from brimful.torch_utils.replaced import replaced


class HostArrays(Rule):
    """Hand out the values of fake tensors as real arrays and lists: true ones where they are known.

    Unknown values are 1 where they are whole, true where they are conditions, and else lie about 1 and differ,
    so that a matrix of them can be inverted. A single one is 1, as where one number is read. What is made of
    lists or arrays is on the host, unless another device is asked for.
    """

    name = "host_arrays"
    source = "torch.Tensor.numpy, __array__ and tolist, torch.tensor, as_tensor and from_numpy (checked: 2.13)"
    device_kinds = ("cuda", "cpu")

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of what turns a tensor into an array, and an array or a list into a tensor."""
        return {
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._array,
            torch.tensor: self._making(torch.tensor),
            torch.as_tensor: self._making(torch.as_tensor),
        }

    @contextmanager
    def context(self) -> Iterator[None]:
        """Replace what function modes do not see: `from_numpy`, and how a fake becomes a list, one by one."""
        with (
            replaced(FakeTensor, "tolist", lambda tensor: self._tolist(tensor)),
            replaced(torch, "from_numpy", self._making(torch.from_numpy)),
        ):
            yield

    def _making(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that makes tensors of what the host has, which counts what is in the device's memory."""

        def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.get("device")
            places = self.recorder.places
            is_named = device is not None and places.names_host(device)
            is_moved = device is not None and places.names_device(device)
            on_fakes = {"device": "cpu"} if is_named or is_moved else {}
            with places.making(Place.DEVICE if is_moved else Place.HOST):
                tensor = make(data, *args, **kwargs | on_fakes)
            if isinstance(data, Tensor) or tensor.dim() == 0 or not isinstance(tensor, FakeTensor):
                return tensor
            is_shared = isinstance(data, np.ndarray) and make is not torch.tensor
            if is_moved or (self.target.kind == "cpu" and not is_shared):
                self.recorder.ledger.track(tensor, make.__name__)
            elif places.are_two:
                places.put(tensor, Place.NAMED if is_named else Place.HOST)
            return tensor

        return made

    def _numpy(self, tensor: Tensor, *, force: bool = False) -> np.ndarray[Any, Any]:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self._real(tensor).requires_grad_(tensor.requires_grad).numpy(force=force)

    def _array(self, tensor: Tensor, dtype: Any = None) -> np.ndarray[Any, Any]:
        array = self._numpy(tensor)
        return array if dtype is None else array.astype(dtype, copy=False)

    def _tolist(self, tensor: Tensor) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self._real(tensor).tolist()

    def _real(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, as a real one with memory of its own; a real tensor itself."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        known = self.recorder.values.array_of(tensor)
        return _plausible(tensor) if known is None else known.clone(memory_format=torch.contiguous_format)


def _plausible(tensor: Tensor) -> Tensor:
    """Numbers that a tensor might hold."""
    if not tensor.is_floating_point() or tensor.numel() == 1:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, tuple(tensor.shape))
    return torch.tensor(numbers, dtype=tensor.dtype)
