"""GPUs that the table does not have: from a driver's properties, and as a user describes them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from brimful.cost.kernels.factors import reached_by
from brimful.devices import (
    Device,
    GpuProperties,
    described_device,
    device_with_properties,
    find_device,
    known_devices,
    torch_builds_note,
)
from brimful.devices.derived import TYPICAL_CLOCK_HERTZ, TYPICAL_CLOCK_SPREAD
from brimful.devices.device import NCCL_EFFICIENCY
from brimful.devices.peaks import EITHER_FACTOR, fp32_flops_per_second, tensor_ratios
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Precision
from brimful.utils.quantities import GIB, MIB

LAPTOP = GpuProperties(
    name="NVIDIA GeForce RTX 4050 Laptop GPU",
    capacity_bytes=6 * GIB,
    compute_capability=(8, 9),
    sm_count=20,
    clock_hertz=2.37e9,
    memory_clock_hertz=8.001e9,
    memory_bus_bits=96,
    l2_bytes=24 * MIB,
    link_generation=4,
    link_lanes=8,
)


def implied_clocks() -> list[float]:
    return [
        device.fp32_flops_per_second / fp32_flops_per_second(device.compute_capability, device.sm_count, 1.0)
        for device in known_devices()
        if device.compute_capability is not None and device.sm_count is not None
    ]


def test_the_peaks_of_the_table_follow_from_multiprocessors_and_clocks_that_gpus_have() -> None:
    clocks = implied_clocks()
    assert len(clocks) == len(known_devices())
    assert min(clocks) > 0.7e9
    assert max(clocks) < 2.65e9
    assert statistics.median(clocks) == pytest.approx(TYPICAL_CLOCK_HERTZ, rel=2e-3)
    assert statistics.stdev(map(math.log, clocks)) == pytest.approx(TYPICAL_CLOCK_SPREAD, abs=0.01)


CAPPED = {"H20": "its tensor rates are limited for export"}


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_the_ratios_of_tensor_rates_are_those_of_the_table(device: Device) -> None:
    assert device.compute_capability is not None
    is_geforce = device.name.startswith(("RTX 20", "RTX 30", "RTX 40", "RTX 50", "GTX"))
    ratios = tensor_ratios(device.compute_capability, f"{'GeForce ' * is_geforce}{device.name}")
    assert (ratios.half is None) == (device.fp16_flops_per_second is None)
    assert ratios.has_bf16 == (device.bf16_flops_per_second is not None)
    if device.name in CAPPED or ratios.half is None:
        return
    found = (device.fp16_flops_per_second or 0) / device.fp32_flops_per_second
    assert any(
        found == pytest.approx(ratios.half * times, rel=0.07) for times in (1, *[2] * ratios.may_be_double)
    )


def test_a_gpu_from_its_properties_has_what_they_state_and_the_rest_by_rules_that_its_source_states() -> None:
    device = device_with_properties(LAPTOP)
    assert device.name == LAPTOP.name
    assert (device.sm_count, device.capacity_bytes, device.l2_bytes) == (20, 6 * GIB, 24 * MIB)
    assert device.memory_bandwidth_bytes_per_second == pytest.approx(192e9, rel=1e-3)
    assert device.fp32_flops_per_second == pytest.approx(20 * 128 * 2 * 2.37e9)
    assert device.bf16_flops_per_second == device.fp16_flops_per_second == 2 * device.fp32_flops_per_second
    assert device.host_link_bytes_per_second == pytest.approx(12.5e9)
    assert device.confidence == "low"
    for word in ("not in the table", "2.37 GHz", "power limit", "2 × memory clock × bus width", "fp16 2× fp32"):
        assert word in device.source


@pytest.mark.parametrize(
    ("name", "clock_mhz", "memory_mhz", "bus"),
    [("A100 40GB SXM", 1410, 1215, 5120), ("T4", 1590, 5001, 256), ("RTX 5090", 2655, 14001, 512)],
)
def test_the_rules_give_the_rated_figures_of_cards_whose_properties_are_published(
    name: str, clock_mhz: int, memory_mhz: int, bus: int
) -> None:
    """The properties are deviceQuery's; a driver's clock may be 10 % above the rated one."""
    known = find_device(name)
    other = GpuProperties(
        name="GeForce X" if name.startswith("RTX") else "X",
        capacity_bytes=known.capacity_bytes,
        compute_capability=known.compute_capability,
        sm_count=known.sm_count,
        clock_hertz=clock_mhz * 1e6,
        memory_clock_hertz=memory_mhz * 1e6,
        memory_bus_bits=bus,
    )
    device = device_with_properties(other)
    assert device.fp32_flops_per_second == pytest.approx(known.fp32_flops_per_second, rel=0.11)
    bandwidth = pytest.approx(known.memory_bandwidth_bytes_per_second, rel=0.01)
    assert device.memory_bandwidth_bytes_per_second == bandwidth
    assert known.fp16_flops_per_second is not None
    factor = math.exp(2 * device.rates_spread)
    assert known.fp16_flops_per_second / factor < (device.fp16_flops_per_second or 0)
    assert (device.fp16_flops_per_second or 0) < known.fp16_flops_per_second * factor


def test_a_card_with_a_known_name_and_other_multiprocessors_or_bandwidth_is_another_card() -> None:
    own = GpuProperties(name="NVIDIA GeForce RTX 3050", capacity_bytes=7800 * MIB, compute_capability=(8, 6))
    assert device_with_properties(own).name == "RTX 3050 8GB"
    assert device_with_properties(replace(own, sm_count=20)).name == "RTX 3050 8GB"
    narrow = replace(own, sm_count=18, clock_hertz=1.47e9, memory_clock_hertz=7.001e9, memory_bus_bits=96)
    device = device_with_properties(narrow)
    assert device.name == "NVIDIA GeForce RTX 3050"
    assert device.memory_bandwidth_bytes_per_second == pytest.approx(168e9, rel=1e-3)
    faster = GpuProperties(
        name="NVIDIA GeForce RTX 3060 Ti", capacity_bytes=7833 * MIB, compute_capability=(8, 6), sm_count=38,
        clock_hertz=1.665e9, memory_clock_hertz=9.501e9, memory_bus_bits=256,
    )  # fmt: skip
    assert device_with_properties(faster).memory_bandwidth_bytes_per_second == pytest.approx(608e9, rel=1e-3)


def test_a_row_that_may_be_wrong_by_two_multiprocessors_is_still_used() -> None:
    l4 = GpuProperties(name="NVIDIA L4", capacity_bytes=22563 * MIB, compute_capability=(8, 9), sm_count=60)
    assert device_with_properties(l4).name == "L4"


def test_a_mig_slice_has_its_part_of_the_card_and_not_all_of_it() -> None:
    properties = GpuProperties(
        name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", capacity_bytes=19_968 * MIB, compute_capability=(8, 0),
        sm_count=42,
    )  # fmt: skip
    device, whole = device_with_properties(properties), find_device("NVIDIA A100-SXM4-40GB")
    assert device.name == properties.name
    assert device.sm_count == 42
    assert device.bf16_flops_per_second == pytest.approx(312e12 * 42 / 108)
    part = device.memory_bandwidth_bytes_per_second / whole.memory_bandwidth_bytes_per_second
    assert part == pytest.approx(19_968 * MIB / whole.capacity_bytes)
    assert device.nvlink_bytes_per_second is None
    assert device.confidence == "low"
    assert "MIG slice" in device.source


def test_a_gpu_of_which_too_little_is_known_is_refused_with_what_is_missing_and_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"memory clock and bus width.*Describe it: --device"):
        device_with_properties(replace(LAPTOP, memory_clock_hertz=None))
    with pytest.raises(UsageError, match="multiprocessors"):
        device_with_properties(replace(LAPTOP, sm_count=None))


FULL = (
    "name=My GPU,memory=12GiB,bandwidth=360GB/s,tflops=12.7,capability=8.6,sms=28,l2=3MiB,fp16_tflops=25.5,"
    "bf16_tflops=25.5,tf32_tflops=12.7,link=25GB,nvlink=50GB"
)


def test_a_fully_described_gpu_has_the_figures_given_and_no_others() -> None:
    device = described_device(FULL)
    assert (device.name, device.capacity_bytes, device.sm_count) == ("My GPU", 12 * GIB, 28)
    assert device.compute_capability == (8, 6)
    assert device.memory_bandwidth_bytes_per_second == 360e9
    assert device.fp32_flops_per_second == device.tf32_flops_per_second == 12.7e12
    assert device.fp16_flops_per_second == device.bf16_flops_per_second == 25.5e12
    assert (device.host_link_bytes_per_second, device.nvlink_bytes_per_second) == (25e9, 50e9)
    assert device.l2_bytes == 3 * MIB
    assert device.confidence == "medium"
    assert device.rates_spread == 0
    assert "assumed" not in device.source


def test_what_a_description_lacks_is_derived_and_said() -> None:
    device = described_device("name=My GPU,memory=8GiB,bandwidth=300GB,tflops=9")
    assert device.fp16_flops_per_second == pytest.approx(2 * EITHER_FACTOR * 9e12)
    assert device.supports(Precision.BF16)
    assert device.confidence == "low"
    assert device.rates_spread > 0.3
    for word in ("compute capability 8.6 assumed", "20 multiprocessors", "fp16 2× fp32", "PCIe 3.0 x16", "L2"):
        assert word in device.source
    pascal = described_device("name=Old,memory=8GiB,bandwidth=300GB,tflops=9,capability=6.1")
    assert pascal.fp16_flops_per_second is None
    assert not pascal.supports(Precision.BF16)
    by_count = described_device("name=Y,memory=8GiB,bandwidth=300GB,sms=30,clock=1500,capability=8.6")
    assert by_count.fp32_flops_per_second == pytest.approx(30 * 256 * 1.5e9)


def test_a_description_with_the_figures_of_a_row_has_its_host_time_and_fractions_of_peaks() -> None:
    row = find_device("RTX 3060 12GB")
    described = described_device(
        f"name={row.name},memory={row.capacity_bytes}B,bandwidth=360GB,capability=8.6,sms=28,"
        f"tflops={row.fp32_flops_per_second / 1e12}"
    )
    assert (described.launch_seconds, described.dispatch) == (row.launch_seconds, row.dispatch)
    assert reached_by(described) == reached_by(row)


def test_nvlink_of_a_description_joins_all_gpus_and_the_source_says_so() -> None:
    device = described_device(FULL)
    for world_size in (2, 4, 8):
        assert device.peer_bytes_per_second(world_size, 1) == pytest.approx(50e9 * NCCL_EFFICIENCY)
    assert "NVLink taken to join all GPUs" in device.source
    without = described_device("name=x,memory=8GiB,bandwidth=300GB,tflops=9")
    assert not without.nvlink_joins_all
    assert "NVLink" not in without.source


SHORT = "memory=80GiB,bandwidth=2000GB,tflops=20,capability=8.0"


def test_the_type_of_memory_decides_what_is_reached_and_is_given_or_said_to_follow_from_the_name() -> None:
    by_name = {name: described_device(f"name={name},{SHORT}") for name in ("X", "A100 X")}
    assert "memory taken as GDDR, by its name" in by_name["X"].source
    assert "memory taken as HBM, by its name" in by_name["A100 X"].source
    assert reached_by(by_name["X"]) != reached_by(by_name["A100 X"])
    for name, kind, same_as in (("X", "hbm2e", "A100 X"), ("A100 X", "GDDR6", "X")):
        given = described_device(f"name={name},memory_type={kind},{SHORT}")
        assert reached_by(given) == reached_by(by_name[same_as])
        assert "by its name" not in given.source


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("GTX X", "no tensor rates but those given, by its name"),
        ("GeForce X", "tensor rates of a GeForce, by its name"),
        ("RTX 3090", "fractions of the peaks that it reaches are those of the RTX 3090, by its name"),
        ("T4", "CUDA context as measured on the T4, by its name"),
    ],
)
def test_what_follows_from_the_name_of_a_described_gpu_is_said(name: str, rule: str) -> None:
    figures = "memory=8GiB,bandwidth=300GB,tflops=9"
    assert rule in described_device(f"name={name},{figures}").source
    assert rule not in described_device(f"name=X,{figures}").source


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("name=x", ["memory", "bandwidth", "tflops"]),
        ("name=x,memory=8GiB,bandwidth=300GB", ["tflops (or sms)"]),
        ("memory=8GiB,bandwidth=300GB,tflops=9", ["has no name"]),
        ("name=x,memory=8,bandwidth=300GB,tflops=9", ["memory=8", "8GiB"]),
        ("name=x,memory=8GiB,bandwidth=300,tflops=9", ["bandwidth=300", "300GB"]),
        ("name=x,memory=8GiB,bandwidth=3KB,tflops=9", ["not the rate of a GPU"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=nan", ["tflops=nan", "not a number"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=-1", ["not a GPU's rate"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,capability=86", ["such as 8.6"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,sms=0", ["number of multiprocessors"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,capability=99.9", ["between 3.0 and 20.9"]),
        ("name=x,memory=1KB,bandwidth=300GB,tflops=9", ["memory=1KB", "between 256 MiB and 16384 GiB"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,l2=0", ["l2=0", "do not write l2"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,l2=0MiB", ["l2=0MiB", "do not write l2"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,l2=24GiB", ["L2 cache", "between 16 KiB and 8 GiB"]),
        ("name=x,memory=8GiB,bandwidth=300GB,tflops=9,memory_type=DDR", ["memory_type=DDR", "HBM or GDDR"]),
        ("name=x,name=y", ["name twice"]),
        ("name=x,8GiB", ["not key=value"]),
        ("name=x,memory=", ["not key=value"]),
    ],
)
def test_a_wrong_description_is_refused_with_the_key_and_an_example(description: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        described_device(description)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "budget" not in str(caught.value)


def test_an_unknown_key_of_a_description_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'bandwith'. Nearest: bandwidth"):
        described_device("name=x,bandwith=300GB")


def test_which_torch_has_kernels_is_said_of_old_cards_only() -> None:
    assert torch_builds_note(find_device("T4")) is None
    assert "CUDA 12.6" in (torch_builds_note(find_device("V100 16GB PCIe")) or "")
    assert "no build of torch 2.13" in (torch_builds_note(find_device("K80")) or "")
