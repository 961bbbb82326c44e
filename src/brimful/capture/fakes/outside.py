"""Tensors that ops read besides the model's: a teacher's weights, a table that the loss closes over.

They are real, while a capture computes nothing. So each op gets a fake tensor in their place, which shares its
storage with those of other views. The real ones keep their values, their gradients and their modules.

Private torch APIs used here: `UntypedStorage._cdata`, `torch._C._DisableTorchDispatch`, `Module._buffers`,
`_BatchNorm`, `torch._subclasses.fake_tensor` (checked: torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from brimful.capture.fakes.wrapper import Wrapper
from brimful.capture.values.known import KnownValues

aten = torch.ops.aten

_READ_NOTHING = frozenset(
    {
        aten.lift.default,  # makes a fake tensor of known value of what `torch.tensor` returns
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Ops that look at no more than the shape of a real tensor."""


def is_real(value: Any) -> bool:
    """Whether a value is a tensor that has values, as those of a captured model and batch have not."""
    if not isinstance(value, Tensor) or isinstance(value, (FakeTensor, DTensor)):
        return False
    return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized


class OutsideTensors:
    """The real tensors that ops read, and the fake ones that take their place.

    `known` keeps the values of small ones that are not parameters.
    """

    def __init__(self, mode: FakeTensorMode, known: KnownValues) -> None:
        self._mode, self._known = mode, known
        self._wrapper = Wrapper()
        self._fakes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._storages: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}
        """By the address of a real storage: a weak reference to it, and the fake one in its place."""
        self._gradients: list[tuple[weakref.ref[Tensor], Tensor | None]] = []
        """Gradients of real leaves, as they were."""
        self._attributes: dict[int, tuple[weakref.ref[nn.Module], dict[str, Any]]] = {}
        """Tensors of modules outside of the model, as they were."""
        self.changed: dict[str, None] = {}
        """Tensors that forwards were seen to change, by a name for a reader."""
        self.batch_norms: dict[str, None] = {}
        """BatchNorm layers that normalise with the statistics of the batch, by a name for a reader."""

    def are_read_by(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is given any real tensor to read."""
        return (_has_real(args) or _has_real(kwargs.values())) and func not in _READ_NOTHING

    def stand_in(self, real: Tensor) -> tuple[FakeTensor, bool]:
        """The fake tensor in the place of a real one, the same each time, and whether its storage is new."""
        fake = self._fakes.get(real)
        if fake is not None:
            return fake, False
        storage, is_new = self._storage(real.untyped_storage())
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=real.dtype, device="meta")
            meta.set_(storage, real.storage_offset(), real.shape, real.stride())
        fake = self._fakes[real] = self._wrapper.fake(self._mode, meta, torch.device("cpu"))
        if not isinstance(real, nn.Parameter):  # as of the model's parameters, no values are known
            self._known.remember(fake, real)
        if real.is_leaf and real.requires_grad:
            self._gradients.append((weakref.ref(real), real.grad))
        return fake, is_new

    def known_stand_in(self, tensor: Tensor) -> Tensor:
        """The fake tensor in the place of a real one, if an op has read it; any other tensor is its own."""
        fake: Tensor | None = self._fakes.get(tensor) if is_real(tensor) else None
        return tensor if fake is None else fake

    def end_forward(self, written: Container[int]) -> None:
        """Find the tensors that a forward changed, by the addresses of the storages that it wrote to."""
        for real, fake in [*self._fakes.items()]:
            if fake.untyped_storage()._cdata in written and is_state(real):
                shape = "×".join(map(str, real.shape))
                self.changed.setdefault(f"a tensor of {shape} outside of the model")
        for module, name, value in self._replaced():
            if value is not None and is_state(value):
                self.changed.setdefault(f"{type(module).__name__}.{name} outside of the model")

    @contextmanager
    def left_alone(self, model: nn.Module) -> Iterator[None]:
        """Let modules outside of `model` run; afterwards they and real tensors are as before."""
        own = {id(module) for module in model.modules()}

        def note(module: nn.Module, _args: Any) -> None:
            if id(module) not in own and id(module) not in self._attributes:
                if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                    self.batch_norms.setdefault(f"{type(module).__name__} outside of the model")
                kept = {
                    name: value
                    for name, value in (*vars(module).items(), *module._buffers.items())
                    if value is None or is_real(value)
                }
                self._attributes[id(module)] = weakref.ref(module), kept

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
            self._restore()

    def _storage(self, real: torch.UntypedStorage) -> tuple[torch.UntypedStorage, bool]:
        address = real._cdata
        known = self._storages.get(address)
        if known is not None:
            return known[1], False
        fake = torch.UntypedStorage(real.nbytes(), device="meta")
        storages = self._storages
        self._storages[address] = weakref.ref(real, lambda _end: storages.pop(address, None)), fake
        return fake, True

    def _restore(self) -> None:
        for tensor, gradient in self._gradients:
            leaf = tensor()
            if leaf is not None and leaf.grad is not gradient:
                leaf.grad = gradient
        for module, name, value in self._replaced():
            setattr(module, name, value)

    def _replaced(self) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
        """Attributes of modules outside of the model that are fake now, and what they were."""
        for reference, kept in self._attributes.values():
            module = reference()
            for name, value in kept.items() if module is not None else ():
                if isinstance(getattr(module, name, None), FakeTensor):
                    assert module is not None
                    yield module, name, value


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor that a forward changes is more than a count of forwards."""
    return tensor.numel() > 1 or tensor.is_floating_point() or tensor.is_complex()


def _has_real(values: Any) -> bool:
    return any(
        _has_real(value) if type(value) in (list, tuple) else type(value) is not FakeTensor and is_real(value)
        for value in values
    )
