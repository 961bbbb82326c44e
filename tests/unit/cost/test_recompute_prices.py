"""Prices of recomputing add up to what the whole costs, however much the host is behind or ahead."""

from dataclasses import replace

import pytest

from brimful.cost import RecomputePrices, saving_seconds, step_seconds
from brimful.devices import Device, find_device
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Phase, Trace, unit_of_each_op
from brimful.trace.units import find_units
from helpers.planned_jobs import SAMPLES, capture, with_action

GPU = find_device("A100 80GB SXM")


def captured(accumulation: int) -> tuple[Trace, Trace]:
    settings = Settings(
        micro_batch_size=SAMPLES, gradient_accumulation_steps=accumulation, precision=Precision.BF16
    )
    everything = capture("gpt", settings, GPU.name)
    units = find_units(everything)
    return everything, capture("gpt", with_action(settings, units, Action.RECOMPUTE), GPU.name)


def total(prices: RecomputePrices, recomputed: Trace) -> float:
    """Of all regions and ops of the step."""
    last = recomputed.captured_micro_batches - 1
    again = [op for op in recomputed.ops if op.recomputed and op.micro_batch == last]
    once = sum(map(prices.op_seconds, again)) + len(recomputed.settings.recomputed) * prices.region_seconds()
    return once * recomputed.settings.gradient_accumulation_steps


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_host_that_is_behind_makes_ops_cost_their_launches(accumulation: int) -> None:
    """These ops take less than a microsecond of the GPU: what counts is launching them."""
    everything, recomputed = captured(accumulation)
    more = step_seconds(recomputed, GPU).total_seconds - step_seconds(everything, GPU).total_seconds
    assert total(RecomputePrices(everything, recomputed, GPU), recomputed) == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gpu_that_is_behind_hides_the_host(accumulation: int) -> None:
    slow: Device = replace(GPU, memory_bandwidth_bytes_per_second=1e6, bf16_flops_per_second=1e6)
    everything, recomputed = captured(accumulation)
    prices = RecomputePrices(everything, recomputed, slow)
    more = step_seconds(recomputed, slow).total_seconds - step_seconds(everything, slow).total_seconds
    assert total(prices, recomputed) == pytest.approx(more, rel=0.01)
    assert prices.region_seconds() == pytest.approx(0, abs=1e-9)
    # but for the first ops of the step, before which the GPU has nothing to do
    assert prices.saving_seconds(100) < 0.01 * saving_seconds(slow, 100)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_host_that_is_behind_pays_for_the_modes_of_saving_as_the_whole_step_does(accumulation: int) -> None:
    everything, recomputed = captured(accumulation)
    units = find_units(everything)
    last = recomputed.captured_micro_batches - 1
    op_count = sum(
        owner >= 0 and op.phase is Phase.FORWARD and op.micro_batch == last
        for op, owner in zip(recomputed.ops, unit_of_each_op(recomputed, units), strict=True)
    )
    # Results that no op of the units makes: all of them run again.
    saving = tuple(UnitAction(fqn=unit, action=Action.SAVE, saved=("none#0",)) for unit in units)
    with_modes = replace(recomputed, settings=replace(recomputed.settings, units=saving))
    more = step_seconds(with_modes, GPU).total_seconds - step_seconds(recomputed, GPU).total_seconds
    priced = RecomputePrices(everything, recomputed, GPU).saving_seconds(op_count) * accumulation
    assert priced == pytest.approx(more, rel=0.05)
    assert more == pytest.approx(saving_seconds(GPU, op_count) * accumulation, rel=0.05)


def test_on_a_cpu_every_part_counts() -> None:
    cpu = find_device("cpu")
    settings = Settings(micro_batch_size=SAMPLES)
    everything = capture("gpt", settings)
    recomputed = capture("gpt", with_action(settings, find_units(everything), Action.RECOMPUTE))
    prices = RecomputePrices(everything, recomputed, cpu)
    more = step_seconds(recomputed, cpu).total_seconds - step_seconds(everything, cpu).total_seconds
    assert prices.region_seconds() > 0
    assert total(prices, recomputed) == pytest.approx(more, rel=0.02)
