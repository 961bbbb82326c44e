"""Views of fake tensors, which the recorder makes by a way of its own, are those that torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.recorder import Recorder
from brimful.capture.values.known import KnownValues

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(2, -1),
    "view of another type": lambda x: x.view(torch.int16),
    "t": lambda x: x[0].t(),
    "permute": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[:, 1:3:2],
    "select": lambda x: x[1],
    "expand": lambda x: x[:, :1].expand(-1, 5, -1),
    "detach": lambda x: x.detach(),
    "as_strided": lambda x: x.as_strided((3, 2), (1, 4), 2),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "split": lambda x: x.split(1, 1),
    "unbind": lambda x: x.unbind(0),
    "chunk": lambda x: x.chunk(2, 2),
    "real part": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).real,
}


def described(x: Tensor, views: Any) -> list[tuple[Any, ...]]:
    address = x.untyped_storage()._cdata
    return [
        (v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.untyped_storage()._cdata == address)
        for v in (views if isinstance(views, (tuple, list)) else [views])
    ]


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_what_torch_makes_of_a_fake_tensor(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 4)
        expected = VIEWS[name](x)
        with Recorder(ModuleCalls(torch.nn.Identity()), KnownValues()) as recorder:
            found = VIEWS[name](x)
    assert described(x, found) == described(x, expected)
    assert type(found) is type(expected)
    assert not recorder.ops  # nothing was computed


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_gradient_is_differentiated(name: str) -> None:
    with FakeTensorMode(), Recorder(ModuleCalls(torch.nn.Identity()), KnownValues()):
        x = torch.empty(2, 3, 4, requires_grad=True)
        views = VIEWS[name](x)
        first = views if isinstance(views, Tensor) else views[0]
    has_gradient = first.dtype.is_floating_point and name != "detach"
    assert first.requires_grad is has_gradient
