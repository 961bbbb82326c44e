"""Shares of a step's time by kind of operation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.cost.kinds import ARITHMETIC_KINDS, BYTE_KINDS
from brimful.cost.time_shares import time_shares
from brimful.devices.data_rows import read_rows
from brimful.prediction.estimate import Estimate

# B batch


class Mixer(nn.Module):
    """Linear layers, a softmax and a norm: (B, 1024) to (B, 1024)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.relu(self.first(x)).softmax(-1)))


def estimate(
    samples: int,
    device: str = "RTX 3090",
    model: Callable[[], nn.Module] = Mixer,
    shape: tuple[int, ...] = (1024,),
) -> Estimate:
    job = bf.Job(
        model=model,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=lambda size: {"x": torch.randn(size, *shape)},
        optimizer="adamw",
    )
    return bf.estimate(job, device, micro_batch_size=samples)


@pytest.mark.parametrize("device", ["RTX 3090", "cpu"])
def test_shares_add_up_to_one_and_are_those_of_the_step(device: str) -> None:
    found = estimate(64, device)
    shares = dict(found.predicted_time_shares)
    assert sum(shares.values()) == pytest.approx(1)
    assert {"matmul", "normalization", "pointwise", "optimizer"} <= set(shares)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    optimizer_seconds = shares["optimizer"] * found.predicted_step_seconds
    assert optimizer_seconds <= found.step_time.optimizer_seconds * (1 + 1e-9)


def test_a_larger_batch_moves_time_from_the_optimizer_to_products() -> None:
    few, many = (dict(estimate(size).predicted_time_shares) for size in (16, 4096))
    assert many["matmul"] > few["matmul"]
    assert many["normalization"] > few["normalization"]
    assert many["optimizer"] < few["optimizer"] / 4
    assert many.get("host", 0.0) < few["host"]


def test_convolutions_of_one_element_are_no_pointwise_operations() -> None:
    model = lambda: nn.Sequential(*(nn.Conv2d(256, 256, 1) for _ in range(16)))  # noqa: E731
    shares = dict(estimate(16, model=model, shape=(256, 56, 56)).predicted_time_shares)
    assert shares["convolution"] > 0.5
    assert shares.get("pointwise", 0.0) < 0.1
    assert "matmul" not in shares


def test_every_class_of_kernels_has_a_kind() -> None:
    """A new class must be added to the table; what the cost model does not know is shown as unknown."""
    names = {*(row["kernel"] for row in read_rows("kernel_factors.csv")), *ARITHMETIC_KINDS, *BYTE_KINDS}
    assert {name for name in names if time_shares([(name, 1.0)]) == (("unknown", 1.0),)} == {"unknown"}


def test_waiting_for_offloaded_tensors_is_a_transfer_and_not_the_hosts() -> None:
    """Copies of what these layers save take longer than their products, and nothing hides the rest."""
    job = bf.Job(
        model=lambda: nn.Sequential(*(Mixer() for _ in range(4))),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        batch=lambda size: {"x": torch.randn(size, 1024)},
        optimizer="adamw",
    )
    kept, offloaded = (
        bf.estimate(job, "RTX 3090", micro_batch_size=8192, offload_activations=offloads)
        for offloads in (False, True)
    )
    more_seconds = offloaded.predicted_step_seconds - kept.predicted_step_seconds
    assert more_seconds > 0.1 * kept.predicted_step_seconds
    seconds = {
        name: share * offloaded.predicted_step_seconds for name, share in offloaded.predicted_time_shares
    }
    plain = {name: share * kept.predicted_step_seconds for name, share in kept.predicted_time_shares}
    assert seconds["transfers"] - plain["transfers"] == pytest.approx(offloaded.step_time.link_seconds)
    assert 0.5 * more_seconds < offloaded.step_time.link_seconds <= more_seconds
    assert seconds.get("host", 0.0) < plain.get("host", 0.0) + 0.01 * more_seconds


def test_a_step_without_time_has_no_shares() -> None:
    assert time_shares([]) == ()
