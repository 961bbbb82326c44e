"""What ops return on fake tensors, remembered by the shapes they are given.

A step runs the same ops on the same shapes again and again, once for each block of a model. Fake tensors
remember results too, but tell cases apart in greater detail than a capture needs, which takes most of its time.

Private torch APIs used here: `torch._subclasses.fake_tensor` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


class _Fresh(NamedTuple):
    """A tensor in a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class FakeResults:
    """The results of ops that only make new tensors.

    Within one capture nothing else decides what they return than their arguments: tensors by shape, strides and
    type, all else by value.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[_Fresh | None, ...]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op returns.

        Args:
            func: The op. Its schema says that it neither writes to its arguments nor returns views of them.
            args: Its arguments, fake tensors among them.
            kwargs: Its keyword arguments.

        Returns:
            New fake tensors, singly or as the op packs them.
        """
        fakes: list[FakeTensor] = []
        try:
            key = (func, _key(args, fakes), _key(tuple(kwargs.items()), fakes))
            known = self._known.get(key) if fakes else None
        except _NotRememberedError:
            return func(*args, **kwargs)
        if known is not None:
            return _remade(func, known, fakes[0])
        out = func(*args, **kwargs)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        if fakes and all(map(_is_fresh, outputs)) and _lie_apart((*fakes, *outputs), len(outputs)):
            self._known[key] = tuple(
                None if tensor is None else _Fresh(tensor.shape, tensor.stride(), tensor.dtype)
                for tensor in outputs
            )
        return out


class _NotRememberedError(Exception):
    """An argument decides in a way that is not looked at."""


def _key(value: Any, fakes: list[FakeTensor]) -> Hashable:
    """An argument as far as it decides what is returned; leaves its tensors in `fakes`."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _NotRememberedError
        fakes.append(value)
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return tuple([_key(item, fakes) for item in value])
    if isinstance(value, (Tensor, torch.Generator)):
        raise _NotRememberedError
    return kind, value  # 1, 1.0 and True are equal


def _is_fresh(tensor: Any) -> bool:
    """Whether a result is nothing, or a tensor that fills a storage."""
    if tensor is None:
        return True
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return False
    numel = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed_bytes = numel * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == needed_bytes


def _lie_apart(tensors: Sequence[Tensor | None], count: int) -> bool:
    """Whether the last tensors share their storages with no other."""
    addresses = [None if tensor is None else tensor.untyped_storage()._cdata for tensor in tensors]
    last = [address for address in addresses[-count:] if address is not None]
    return len(set(last)) == len(last) and not set(last) & set(addresses[:-count])


def _remade(func: Any, known: tuple[_Fresh | None, ...], like: FakeTensor) -> Any:
    mode, device = like.fake_mode, like.fake_device
    made = [None if fresh is None else _empty(fresh, mode, device) for fresh in known]
    returns = func._schema.returns
    if len(returns) == 1:
        return made if isinstance(returns[0].type, torch.ListType) else made[0]
    return tuple(made)


def _empty(fresh: _Fresh, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(fresh.shape, fresh.stride, dtype=fresh.dtype, device="meta")
    return FakeTensor(mode, meta, device)
