"""Trains a model plainly and with unit actions applied, and compares everything that training changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.execution.precision import autocast
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.transforms import apply_units

Loss = Callable[[nn.Module, Tensor], Tensor]


WIDTH = 16


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def vectors(samples: int = 4, count: int = 2) -> list[Tensor]:
    return [torch.randn(samples, WIDTH) for _ in range(count)]


def images(samples: int = 4, count: int = 2) -> list[Tensor]:
    return [torch.randn(samples, 3, 16, 16) for _ in range(count)]


def tokens(samples: int = 2, count: int = 2) -> list[Tensor]:
    return [torch.randint(40, (samples, 12)) for _ in range(count)]


class Between(nn.Module):
    """A linear layer, the part under test as `unit`, a linear layer."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), unit, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unit(self.first(x)))


@pytest.fixture
def without_collection() -> Iterator[None]:
    """What reference cycles keep is not freed, and so is seen."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def recomputing(*units: str) -> Settings:
    """Settings that recompute the units named."""
    actions = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in units)
    return Settings(micro_batch_size=1, units=actions)


def nesting(*segments: tuple[str, ...]) -> Settings:
    """Settings of nested segments: the first unit of each is recomputed, the others nested."""
    actions = tuple(
        UnitAction(fqn=unit, action=Action.NEST if position else Action.RECOMPUTE)
        for segment in segments
        for position, unit in enumerate(segment)
    )
    return Settings(micro_batch_size=1, units=actions)


def saving(unit: str, *ops: str) -> Settings:
    """Settings that recompute a unit but for the ops named."""
    action = UnitAction(fqn=unit, action=Action.SAVE, saved=ops)
    return Settings(micro_batch_size=1, units=(action,))


@dataclass(frozen=True)
class Step:
    """What one step came to, cloned."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(
    model: nn.Module,
    micro_batches: list[Tensor],
    *,
    loss: Loss = mean_square,
    precision: Precision = Precision.FP32,
    steps: int = 3,
    seed: int = 1,
) -> list[Step]:
    """Some steps of SGD; the random stream is seeded once, so a draw too many anywhere shows ever after."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    history = []
    for _ in range(steps):
        losses = []
        for micro_batch in micro_batches:
            with autocast(model, precision):
                value = loss(model, micro_batch)
            (value / len(micro_batches)).backward()
            losses.append(value.detach().clone())
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        history.append(
            Step(
                losses=losses,
                gradients=gradients,
                parameters={n: p.detach().clone() for n, p in model.named_parameters()},
                buffers={n: b.clone() for n, b in model.named_buffers()},
            )
        )
    return history


def assert_identical(plain: list[Step], other: list[Step]) -> None:
    """Bit for bit: losses, gradients, parameters and buffers of every step."""
    for step, (ours, theirs) in enumerate(zip(plain, other, strict=True)):
        for index, (left, right) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
            assert torch.equal(left, right), f"loss of micro-batch {index} in step {step}"
        for kind in ("gradients", "parameters", "buffers"):
            left_tensors, right_tensors = getattr(ours, kind), getattr(theirs, kind)
            assert left_tensors.keys() == right_tensors.keys()
            for name, left in left_tensors.items():
                right = right_tensors[name]
                same = left is right is None or (left is not None and torch.equal(left, right))
                assert same, f"{kind} of {name} in step {step}"


def assert_trains_identically(
    model: nn.Module,
    units: tuple[str, ...],
    micro_batches: list[Tensor],
    *,
    loss: Loss = mean_square,
    precision: Precision = Precision.FP32,
    steps: int = 3,
) -> None:
    """Training is bit for bit the same with the units recomputed, and they really are recomputed."""
    other = copy.deepcopy(model)
    plain = train(model, micro_batches, loss=loss, precision=precision, steps=steps)
    with saved_bytes() as saved_plainly:
        loss(model, micro_batches[0])
    apply_units(other, recomputing(*units))
    assert_identical(plain, train(other, micro_batches, loss=loss, precision=precision, steps=steps))
    with saved_bytes() as saved:
        loss(other, micro_batches[0])
    assert saved.total_bytes < saved_plainly.total_bytes, "nothing was recomputed"


class saved_bytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass leaves for backward; what a checkpoint drops does not get here."""

    def __init__(self) -> None:
        self.total_bytes = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> saved_bytes:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        self.total_bytes += tensor.numel() * tensor.element_size()
        return tensor
