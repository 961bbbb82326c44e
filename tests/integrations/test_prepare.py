"""`bf.prepare` in loops of other frameworks and of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.errors import UsageError
from brimful.execution.in_force import Prepared
from brimful.settings import Action, Settings, UnitAction

SAMPLES, MICRO = 16, 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 5))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(SAMPLES, 32), torch.randint(0, 5, (SAMPLES,))) for _ in range(3)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def settings(**changes: Any) -> Settings:
    units = tuple(UnitAction(fqn=str(place), action=Action.RECOMPUTE) for place in range(4))
    options = {"gradient_accumulation_steps": SAMPLES // MICRO, "units": units, **changes}
    return Settings(micro_batch_size=MICRO, **options)


def trained_plainly() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_alike(found: dict[str, Tensor]) -> None:
    for name, value in trained_plainly().items():
        assert torch.allclose(value, found[name], atol=1e-5), name


def test_a_loop_of_one_s_own() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), model, optimizer)
    assert isinstance(prepared, Prepared)
    assert optimizer.param_groups[0]["fused"]
    for x, y in batches():
        for part_x, part_y in zip(x.split(MICRO), y.split(MICRO), strict=True):
            (loss_of(model, part_x, part_y) * len(part_x) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.remove()
    assert not optimizer.param_groups[0]["fused"]
    assert not any("forward" in vars(module) for module in model.modules())
    assert_alike(model.state_dict())


def test_an_accelerate_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=SAMPLES // MICRO)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [part for x, y in batches() for part in zip(x.split(MICRO), y.split(MICRO), strict=True)]
    model, optimizer = accelerator.prepare(model, optimizer)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), model, optimizer)
    assert optimizer.param_groups[0]["fused"]
    for x, y in parts:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
    prepared.remove()
    assert_alike(accelerator.unwrap_model(model).state_dict())


def test_a_loop_of_fabric() -> None:
    fabric_of = pytest.importorskip("lightning.fabric")
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = model
    model, optimizer = fabric.setup(model, optimizer)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), own, optimizer)
    assert optimizer.optimizer.param_groups[0]["fused"]
    for x, y in batches():
        for part_x, part_y in zip(x.split(MICRO), y.split(MICRO), strict=True):
            fabric.backward(loss_of(model, part_x, part_y) * len(part_x) / len(x))
        optimizer.step()
        optimizer.zero_grad()
    prepared.remove()
    assert_alike(own.state_dict())


@pytest.mark.parametrize("what", ["offload_optimizer", "prefetch_inputs"])
def test_what_only_the_step_carries_out_is_refused(what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} is carried out by the step of `bf.apply`"):
        bf.prepare(settings(**{what: True}), net())
