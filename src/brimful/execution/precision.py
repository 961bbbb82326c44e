"""Precision and device of a step: autocast, TF32, loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from brimful.settings import Precision


def autocast(model: nn.Module, precision: Precision) -> torch.autocast:
    """The autocast context of `precision` on the device of `model`; it does nothing for FP32 and TF32."""
    dtype = precision.autocast_dtype
    return torch.autocast(
        device_of(model).type,
        dtype=getattr(torch, dtype) if dtype else None,
        enabled=dtype is not None,
    )


@contextmanager
def no_autocast_of_caller() -> Iterator[None]:
    """Within, autocast that the caller has entered is disabled: a step has the precision of its settings."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Within, float32 matmuls and convolutions use TF32 only if `precision` is TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision is Precision.TF32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU if it has none."""
    for tensor in chain(model.parameters(), model.buffers()):  # lazily: every micro-batch asks
        if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != tensor.device.type:
            return torch.device(tensor.device_mesh.device_type)  # its part is on the host meanwhile
        return tensor.device
    return torch.device("cpu")


def make_scaler(precision: Precision, device_type: str) -> GradScaler | None:
    """The loss scaler that FP16 needs; None for other precisions."""
    return GradScaler(device_type) if precision is Precision.FP16 else None


def unused_scaler(scaler: GradScaler, device_type: str) -> GradScaler:
    """A loss scaler with the state of another, without what that found about a step's gradients."""
    unused = GradScaler(device_type)
    unused.load_state_dict(scaler.state_dict())
    return unused
