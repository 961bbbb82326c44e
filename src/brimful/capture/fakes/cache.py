"""The results of ops on fake tensors, cached by the shapes of their arguments.

A step runs the same ops on the same shapes repeatedly, once for each block of a model, and captures of one
search do again. Fake tensors have a cache too, but its keys distinguish more cases than a capture needs, and
computing them takes most of its time.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch._C.DisableTorchFunction`,
`torch._C._DisableTorchDispatch` (checked: torch 2.13; the first two in 2.11 too).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brimful.capture.fakes.wrapper import Wrapper


class _Fresh(NamedTuple):
    """A tensor in a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class CachedResult:
    """The cached results of equal calls, and their work."""

    __slots__ = ("_device", "_made", "work")

    def __init__(self, made: tuple[_Fresh | int | None, ...] | None, device: torch.device) -> None:
        self._made = made  # None: they write to their first argument and return it
        self._device = device
        self.work: Any = None
        """`OpWork` of all equal calls, once it is computed; None where it is not the same for all."""


class OpResult(NamedTuple):
    """The cached result of an op call."""

    out: Any
    inputs: list[Tensor] | None
    """The tensors among the op's arguments, in order; None where they were not looked for."""
    cached: CachedResult | None
    """The cache's entry for equal calls; None if the result is not cached."""


_shared: dict[Hashable, CachedResult] | None = None
"""What captures share while `results_shared` is open."""


@contextmanager
def results_shared() -> Iterator[None]:
    """Let captures share the results of ops while the context is open; only one thread captures at a time.

    The captures have the same corrections of what ops return: those of one call of the public functions do,
    between which code may register other kernels.
    """
    global _shared
    before, _shared = _shared, {} if _shared is None else _shared
    try:
        yield
    finally:
        _shared = before


class FakeCache:
    """The results of ops that only make new tensors, and of those that only write over their first argument.

    Within one capture nothing else decides what they return than their arguments: tensors by shape, strides and
    type, all else by value.
    """

    def __init__(self, wrapper: Wrapper | None = None) -> None:
        self._wrapper = wrapper or Wrapper()
        self._known: dict[Hashable, CachedResult] = {} if _shared is None else _shared

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpResult:
        """Run an op, or return what equal calls returned.

        The schema of `func` says that it neither writes to its arguments nor returns views of them; or that it
        writes to the first, without changing its shape, and returns it. The result has new fake tensors, singly
        or as the op packs them.
        """
        fakes: list[Tensor] = []
        key = _key_of_call(func, args, kwargs, fakes)
        known = None if key is None else self._known.get(key)
        if known is not None:
            made = args[0] if known._made is None else self._remade(func, known, _mode_of(fakes))
            return OpResult(made, fakes, known)
        out = func(*args, **kwargs)
        return (
            OpResult(out, None, None)
            if key is None
            else OpResult(out, fakes, self._store(key, args, fakes, out))
        )

    def _store(
        self, key: Hashable, args: tuple[Any, ...], fakes: list[Tensor], out: Any
    ) -> CachedResult | None:
        if type(out) is FakeTensor and out is args[0]:
            self._known[key] = cached = CachedResult(None, out.fake_device)
            return cached
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        if not tensors or not all(map(_is_fresh, outputs)) or not _lie_apart((*fakes, *tensors), len(tensors)):
            return None
        made = tuple(
            _Fresh(each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
            for each in outputs
        )
        self._known[key] = cached = CachedResult(made, tensors[0].fake_device)  # type: ignore[attr-defined]
        return cached

    def _remade(self, func: Any, known: CachedResult, mode: FakeTensorMode) -> Any:
        assert known._made is not None
        made = [
            self._wrapper.empty(mode, *each, known._device) if isinstance(each, _Fresh) else each
            for each in known._made
        ]
        returns = func._schema.returns
        if len(returns) == 1:
            return made if isinstance(returns[0].type, torch.ListType) else made[0]
        return tuple(made)


class _NotCachedError(Exception):
    """The result depends on an argument in a way that the cache's key does not cover."""


def _key_of_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[Tensor]
) -> Hashable | None:
    """The key of a call; None if its result depends on more. Appends the call's tensors to `fakes`."""
    try:
        key = (func, _key(args, fakes), _key(tuple(kwargs.items()), fakes))
    except _NotCachedError:
        return None
    if fakes:
        return key if len(set(map(id, fakes))) == len(fakes) else (*key, _repeated(fakes))
    is_typed = kwargs.get("dtype") is not None  # else torch's default type decides
    return key if is_typed and _mode_of(fakes) is not None else None


def _mode_of(fakes: Sequence[Tensor]) -> Any:
    """The fake mode that a call's tensors are of; the one in force, if any, where it has none."""
    if fakes:
        return fakes[0].fake_mode  # type: ignore[attr-defined]
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _repeated(fakes: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the first place where it stands: a call that reads one twice has other work."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(fake), place) for place, fake in enumerate(fakes))


def _key(value: Any, fakes: list[Tensor]) -> Hashable:
    """An argument as far as it decides what is returned; leaves its tensors in `fakes`."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _NotCachedError
        fakes.append(value)
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return tuple([_key(item, fakes) for item in value])
    if isinstance(value, (Tensor, torch.Generator)):
        raise _NotCachedError
    return kind, value  # 1, 1.0 and True are equal


def _is_fresh(result: Any) -> bool:
    """Whether a result is nothing, an integer, or a tensor that fills a storage."""
    if result is None or type(result) is int:
        return True
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return False
    return result.storage_offset() == 0 and result.untyped_storage().nbytes() == spanned_bytes(result)


def spanned_bytes(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _lie_apart(tensors: Sequence[Tensor], count: int) -> bool:
    """Whether the last tensors share their storages with no other."""
    addresses = [tensor.untyped_storage()._cdata for tensor in tensors]
    last = set(addresses[-count:])
    return len(last) == count and not last & set(addresses[:-count])
