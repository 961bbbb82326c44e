"""Plans put the optimizer on the host where nothing else fits, or where that is the fastest way to fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture.cache import CachedCapture
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.execution.host_optimizer import BUCKET_BYTES
from brimful.planner import Plan
from brimful.prediction.estimator import ROUGH_SIZES
from brimful.trace import Trace
from brimful.utils.quantities import MIB

WIDTH, LAYERS, VOCABULARY = 2048, 8, 32_000
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
GPU = "RTX 3090"


class Deep(nn.Module):
    """Layers whose weights and state are most of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Words(nn.Module):
    """A large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


JOB = bf.Job(
    name="deep",
    model=Deep,
    loss=lambda model, x: model(x).square().mean(),
    batch=lambda n: torch.randn(n, 64, WIDTH),
    optimizer="adamw",
)


def planned(budget: str | int | None, job: bf.Job = JOB, **asked: Any) -> Plan:
    """The fastest plan that is predicted within the budget."""
    fastest: dict[str, Any] = {"effort": "max", "max_exceedance": 1}
    return bf.plan(job, GPU, global_batch_size=64, budget=budget, **fastest, **asked)


@pytest.fixture(scope="module")
def smallest_on_device() -> int:
    """The least that any plan takes with the optimizer on the device, context included."""
    with pytest.raises(InfeasibleError) as found:
        planned(find_device(GPU).context_bytes + MIB, offload_optimizer=False)
    assert "you asked for: no optimizer on the host" in str(found.value)
    return found.value.smallest_peak_bytes


def test_where_nothing_else_fits_it_is_on_the_host(smallest_on_device: int) -> None:
    budget = smallest_on_device - PARAMETER_BYTES
    plan = planned(budget)
    assert plan.settings.offload_optimizer
    assert plan.predicted_peak_device_bytes <= budget
    assert 2 * PARAMETER_BYTES <= plan.predicted_host_state_bytes <= 2 * PARAMETER_BYTES + MIB
    assert plan.predicted_pinned_host_bytes >= 2 * BUCKET_BYTES
    assert any("is in the host's memory" in note for note in plan.notes)
    assert any("With its optimizer on the device a plan takes about" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()) == plan


def test_where_there_is_room_it_stays_on_the_device() -> None:
    plan = planned(None)
    assert not plan.settings.offload_optimizer
    assert plan.predicted_host_state_bytes == 0


def test_permitting_it_never_makes_a_plan_slower_nor_a_larger_budget(smallest_on_device: int) -> None:
    times = []
    for more in (0.0, 0.3, 1.2):
        budget = smallest_on_device + int(more * PARAMETER_BYTES)
        times.append(planned(budget).predicted_step_seconds)
        assert times[-1] <= planned(budget, offload_optimizer=False).predicted_step_seconds
        assert times[-1] <= planned(budget, offload_optimizer=True).predicted_step_seconds
    assert times == sorted(times, reverse=True)


def test_what_the_host_may_give_limits_it(smallest_on_device: int) -> None:
    tight = partial(planned, smallest_on_device - PARAMETER_BYTES)
    state = 2 * PARAMETER_BYTES + MIB
    for too_little in (64 * MIB, state):  # with what is on its way to and from there it takes more
        with pytest.raises(InfeasibleError, match=r"stays on the device: it needs .* permits"):
            tight(host_memory=too_little)
    assert tight(host_memory=state + 2 * BUCKET_BYTES).settings.offload_optimizer
    with pytest.raises(InfeasibleError, match="you asked for: no offload"):
        tight(offload_activations=False)


def test_too_little_room_on_the_host_is_found_by_one_capture(
    smallest_on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []
    of_cache = CachedCapture.__call__

    def noting(capture: CachedCapture, settings: bf.Settings, steps: int = 1) -> Trace:
        captured.append(settings)
        return of_cache(capture, settings, steps)

    monkeypatch.setattr(CachedCapture, "__call__", noting)
    with pytest.raises(InfeasibleError, match="stays on the device"):
        planned(smallest_on_device - PARAMETER_BYTES, host_memory=2 * PARAMETER_BYTES + MIB)
    sizes = {each.micro_batch_size for each in captured if each.offload_optimizer}
    assert ROUGH_SIZES[0] in sizes
    assert ROUGH_SIZES[1] not in sizes


def test_a_loss_over_a_vocabulary_is_chunked_beside_it() -> None:
    """Both spare what the other does not."""
    job = replace(JOB, model=Words, loss=next_word, batch=lambda n: torch.zeros(n, 512, dtype=torch.long))
    with pytest.raises(InfeasibleError) as found:
        planned(find_device(GPU).context_bytes + MIB, job, offload_optimizer=False)
    plan = planned(found.value.smallest_peak_bytes - 64 * MIB, job)
    assert plan.settings.offload_optimizer
    assert plan.settings.chunked_loss is not None


@pytest.mark.parametrize("other", ["adamw8bit", "muon"])
def test_permitting_an_optimizer_that_cannot_go_there_takes_nothing_away(
    other: str, smallest_on_device: int
) -> None:
    """AdamW8bit may look at several parameters together; Muon multiplies matrices, at a rate nobody knows."""
    budget = smallest_on_device - int(1.75 * PARAMETER_BYTES)
    plan = planned(budget, allow_optimizers=other)
    assert plan.settings.offload_optimizer
    assert plan.settings.optimizer is None
    assert any(note.startswith(f"{other} stays on the device") for note in plan.notes)


def test_a_measured_rate_of_the_host_is_said_to_be_one(smallest_on_device: int) -> None:
    budget = smallest_on_device - PARAMETER_BYTES
    assumed = planned(budget)
    device = replace(find_device(GPU), measured_host_update_bytes_per_second=10e9)
    fastest: dict[str, Any] = {"effort": "max", "max_exceedance": 1}
    measured = bf.plan(JOB, device, global_batch_size=64, budget=budget, **fastest)
    assert any("25.6 GB/s (assumed" in note for note in assumed.notes)
    assert any("10 GB/s (measured)" in note for note in measured.notes)
    slower = 7 * PARAMETER_BYTES * (1 / 10e9 - 1 / 25.6e9)
    assert measured.predicted_step_seconds - assumed.predicted_step_seconds == pytest.approx(slower, rel=0.2)
