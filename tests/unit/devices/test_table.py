"""The device table: complete, sourced, found under the names people use, and silent about nothing."""

import csv
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from brimful.devices import (
    CudaContext,
    Device,
    contexts,
    cuda_context,
    find_device,
    known_devices,
    memory_limits_bytes,
    table,
    this_machine,
    with_context,
)
from brimful.devices.this_machine import memory_left_bytes
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Precision
from brimful.utils.quantities import GIB, MIB

NEWEST = (float("inf"), 0.0)


def read_table(name: str) -> list[dict[str, str]]:
    text = resources.files("brimful").joinpath("data", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def cells() -> list[dict[str, str]]:
    return read_table("gpus.csv")


def test_there_are_eighty_gpus_from_kepler_to_blackwell() -> None:
    devices = known_devices()
    assert len(devices) >= 80
    assert {"Kepler", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"} <= {
        device.architecture for device in devices
    }
    assert len({device.name for device in devices}) == len(devices)


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_row_has_a_source_and_plausible_figures(device: Device) -> None:
    assert len(device.source) > 10
    assert device.confidence in {"high", "medium", "low"}
    assert 3 * GIB < device.capacity_bytes < 300 * GIB
    assert 1e11 < device.memory_bandwidth_bytes_per_second < 1e13
    assert 2.5e12 < device.fp32_flops_per_second < 2e14
    assert 0 <= device.rates_spread < 0.4
    assert (
        device.fp16_flops_per_second is None or device.fp16_flops_per_second >= 2 * device.fp32_flops_per_second
    )
    assert 0 < device.context_bytes < 2 * GIB
    assert 0 < device.launch_seconds < 1e-4


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_tf32_and_bf16_rates_are_there_exactly_from_compute_capability_8(device: Device) -> None:
    assert device.compute_capability is not None
    modern = device.compute_capability >= (8, 0)
    assert (device.tf32_flops_per_second is not None) == modern
    assert (device.bf16_flops_per_second is not None) == modern
    assert device.supports(Precision.TF32) == modern
    assert device.supports(Precision.BF16) == modern
    assert device.supports(Precision.FP16)
    assert device.supports(Precision.FP32)


GEFORCE = [device for device in known_devices() if device.name.startswith(("RTX 30", "RTX 40", "RTX 50"))]


@pytest.mark.parametrize("device", GEFORCE, ids=lambda device: device.name)
def test_geforce_rates_are_dense_and_of_accumulation_in_float32(device: Device) -> None:
    """Half of the rate of accumulating in float16: per SM 512 operations of a half type, 256 of float32."""
    assert device.fp16_flops_per_second == pytest.approx(2 * device.fp32_flops_per_second, rel=1e-3)
    assert device.bf16_flops_per_second == device.fp16_flops_per_second
    assert device.tf32_flops_per_second == device.fp32_flops_per_second


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_row_is_found_by_its_own_name(device: Device) -> None:
    assert find_device(device.name) == device
    assert find_device(device.name.lower().replace(" ", "-")) == device


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("RTX 3090 24GB", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("3090ti", "RTX 3090 Ti"),
        ("Tesla T4", "T4"),
        ("RTX 6000 (24 GB)", "Quadro RTX 6000"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("A6000", "RTX A6000"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("V100 SXM2 32G", "V100 32GB SXM2"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("4080 super", "RTX 4080 Super"),
        ("RTX 3080 12 GiB", "RTX 3080 12GB"),
        ("a10", "A10"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("4070 mobile", "RTX 4070 Laptop"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", "RTX 2070 Max-Q"),
        ("Tesla K80", "K80"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("1660 Ti", "GTX 1660 Ti"),
        ("L4", "L4"),
    ],
)
def test_names_people_and_drivers_use_resolve(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("A100 40GB", "A100 40GB PCIe"),
        ("H100 80GB", "H100 PCIe"),
        ("V100 16GB", "V100 16GB PCIe"),
        ("V100 32GB", "V100 32GB PCIe"),
    ],
)
def test_of_two_forms_with_one_memory_size_the_slower_is_taken(name: str, slower: str) -> None:
    assert find_device(name).name == slower


@pytest.mark.parametrize("name", ["A100", "RTX 3080", "NVIDIA GeForce RTX 3080", "4060 Ti", "5060 Ti"])
def test_a_name_that_leaves_the_memory_open_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UsageError, match=r"several cards with different memory.*GiB.*Say which"):
        find_device(name)


@pytest.mark.parametrize(
    "name",
    [
        *("RTX 2080", "GTX 1080", "RTX 4070 Ti", "RTX 3080 Ti", "80GB", "titan", ""),
        *("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "NVIDIA GeForce RTX 2080 Ti Laptop GPU", "RTX 3090 Laptop"),
        *("NVIDIA GeForce RTX 2080 Super with Max-Q Design", "NVIDIA GeForce GTX 1650 with Max-Q Design"),
        *("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A40-16Q"),
    ],
)
def test_a_card_that_is_not_in_the_table_is_never_taken_for_a_sibling(name: str) -> None:
    with pytest.raises(UnknownNameError):
        find_device(name)


def test_a_typo_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_device("RTX 3091")
    assert "RTX 3090" in caught.value.nearest
    assert "RTX 3090" in str(caught.value)


def test_the_drivers_own_capacity_tells_cards_of_one_name_apart_and_is_kept() -> None:
    reported_bytes = 12_622_168_064
    device = find_device("NVIDIA GeForce RTX 3080", capacity_bytes=reported_bytes)
    assert device.name == "RTX 3080 12GB"
    assert device.capacity_bytes == reported_bytes


def test_tf32_arithmetic_needs_the_setting_and_the_hardware() -> None:
    ampere, turing = find_device("A100 80GB SXM"), find_device("T4")
    assert ampere.flops_per_second("float32", Precision.TF32) == 156e12
    assert ampere.flops_per_second("float32", Precision.FP32) == 19.5e12
    assert turing.flops_per_second("float32", Precision.TF32) == turing.fp32_flops_per_second


def test_half_types_without_tensor_cores_run_at_the_float32_rate() -> None:
    pascal, turing = find_device("GTX 1080 Ti"), find_device("RTX 2080 Ti")
    assert pascal.flops_per_second("float16") == pascal.fp32_flops_per_second
    assert turing.flops_per_second("bfloat16") == turing.fp32_flops_per_second
    assert turing.flops_per_second("float16") == 53.8e12


@pytest.mark.parametrize("dtype", ["float64", "int8", "complex64"])
def test_a_type_without_a_known_rate_has_none_rather_than_a_default(dtype: str) -> None:
    assert find_device("RTX 3090").flops_per_second(dtype) is None


def test_an_uncalibrated_cpu_says_that_its_rates_are_not_measured() -> None:
    cpu = find_device("cpu")
    assert (cpu.kind, cpu.context_bytes, cpu.confidence) == ("cpu", 0, "low")
    assert "not measured" in cpu.source
    assert cpu.capacity_bytes > GIB
    assert cpu.flops_per_second("bfloat16") is None
    assert not cpu.supports(Precision.TF32)


def test_the_capacity_fractions_are_the_lowest_the_table_shows(cells: list[dict[str, str]]) -> None:
    lowest = {
        ecc: min(
            int(row["memory_bytes_usable"]) / int(row["memory_bytes_marketed"])
            for row in cells
            if row["memory_bytes_usable"] and row["ecc_in_memory"] == ecc
        )
        for ecc in ("no", "yes")
    }
    assert lowest["no"] == pytest.approx(table.UNMEASURED_USABLE_FRACTION, abs=1e-4)
    assert lowest["yes"] == pytest.approx(table.UNMEASURED_USABLE_FRACTION_WITH_ECC, abs=1e-4)


def test_a_derived_capacity_is_below_the_marketed_one_and_says_so(cells: list[dict[str, str]]) -> None:
    derived = [row for row in cells if not row["memory_bytes_usable"]]
    assert derived
    for row in derived:
        device = find_device(row["name"])
        assert device.capacity_bytes < int(row["memory_bytes_marketed"])
        assert "capacity taken as" in device.source
        assert device.confidence != "high"


@pytest.mark.parametrize("row", read_table("contexts.csv"), ids=lambda row: row["gpu"] or row["architecture"])
def test_every_context_row_is_sourced_and_names_known_gpus(row: dict[str, str]) -> None:
    names = {device.name for device in known_devices()}
    architectures = {device.architecture for device in known_devices()}
    gpus = [name for name in row["gpu"].split(";") if name]
    assert set(gpus) <= names
    assert row["architecture"] in architectures | {""}
    assert not (gpus and row["architecture"])
    assert 100 * MIB < int(row["low_bytes"]) < int(row["context_bytes"]) < int(row["high_bytes"]) < 2 * GIB
    assert int(row["high_bytes"]) <= contexts.CUDA_CONTEXT_HIGH_BYTES or row["loading"] == "eager"
    assert row["loading"] in {"lazy", "eager"}
    assert len(row["source"]) > 10
    assert row["confidence"] in {"high", "medium", "low"}


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_gpu_has_a_published_context_with_its_interval_and_source(device: Device) -> None:
    context = cuda_context(device)
    assert with_context(device, context) == device
    assert device.context_low_bytes < device.context_bytes < device.context_high_bytes
    assert "confidence" in device.context_source
    assert not context.is_measured


def test_contexts_shrank_when_kernels_began_to_be_loaded_at_first_use() -> None:
    eager, lazy = (find_device("RTX 3090", torch_version=version) for version in ("1.12.1+cu116", "1.13.0"))
    assert eager.context_low_bytes > lazy.context_high_bytes
    assert lazy == find_device("RTX 3090", torch_version="2.13.0+cu130") == find_device("RTX 3090")


def context_row(size_bytes: int, *, gpus: tuple[str, ...] = (), architecture: str = "") -> contexts._ContextRow:
    context = CudaContext(
        context_bytes=size_bytes, low_bytes=0, high_bytes=size_bytes, source="by hand", is_measured=False
    )
    return contexts._ContextRow(
        gpus=gpus, architecture=architecture, torch_from=(1, 13), torch_to=(9, 0), context=context
    )


@pytest.mark.parametrize(
    ("name", "architecture", "version", "size_bytes"),
    [
        ("T4", "Turing", (2, 13), 3),
        ("RTX 2080 Ti", "Turing", (2, 13), 2),
        ("RTX 3090", "Ampere", (1, 13), 1),
        ("T4", "Turing", (1, 12), contexts.CUDA_CONTEXT_BYTES),
        ("T4", "Turing", (9, 0), contexts.CUDA_CONTEXT_BYTES),
    ],
    ids=["the GPU's", "the architecture's", "the generation's", "too old: the default", "too new: the default"],
)
def test_the_nearest_applicable_row_is_taken(
    name: str, architecture: str, version: tuple[int, int], size_bytes: int
) -> None:
    rows = (context_row(1), context_row(2, architecture="Turing"), context_row(3, gpus=("L4", "T4")))
    for order in (rows, rows[::-1]):
        assert contexts.nearest_context(order, name, architecture, version).context_bytes == size_bytes


def test_the_default_context_says_that_it_is_one() -> None:
    context = contexts.nearest_context((), "GPU", "architecture", NEWEST)
    assert context.low_bytes < context.context_bytes < context.high_bytes
    assert context.source.startswith("default")


def test_a_cpu_has_no_context() -> None:
    assert cuda_context(find_device("cpu")).high_bytes == find_device("cpu").context_high_bytes == 0


@pytest.mark.parametrize("version", ["", "newest", "2", "v2.13"])
def test_what_is_no_version_of_torch_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match="not a version of torch"):
        find_device("T4", torch_version=version)


def test_devices_and_costs_are_looked_up_without_torch() -> None:
    code = "import sys, brimful.devices, brimful.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/", {"memory.max": "6000000"}, [6000000]),  # version 2, in a container
        ("0::/", {"memory.max": "max"}, []),
        ("0::/jobs/a", {"jobs/a/memory.max": "max", "jobs/memory.max": "5000"}, [5000]),
        (
            "4:memory:/docker/1",
            {"memory/memory.limit_in_bytes": "7000"},
            [7000],
        ),  # version 1
        ("9:cpu:/x", {"memory.max": "1"}, []),
        ("", {}, []),
    ],
)
def test_what_control_groups_permit_is_found(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: list[int]
) -> None:
    (tmp_path / "cgroup").write_text(membership + "\n" * bool(membership))
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert memory_limits_bytes(tmp_path / "cgroup", tmp_path / "fs") == expected
    assert memory_limits_bytes(tmp_path / "none", tmp_path / "fs") == []


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": "9000", "memory.current": "2000"}, [7000]),
        (
            "0::/",
            {"memory.max": "9000", "memory.current": "2000", "memory.stat": "anon 500\ninactive_file 1500"},
            [8500],
        ),
        ("0::/", {"memory.max": "9000"}, [9000]),  # its use is not reported
        ("0::/", {"memory.max": "9000", "memory.current": "9500"}, [0]),
        ("0::/", {"memory.max": "max", "memory.current": "2000"}, []),
        (
            "0::/jobs/a",
            {
                "jobs/a/memory.max": "5000",
                "jobs/a/memory.current": "100",
                "jobs/memory.max": "6000",
                "jobs/memory.current": "5900",
            },
            [4900, 100],
        ),
        (
            "4:memory:/docker/1",
            {
                "memory/memory.limit_in_bytes": "7000",
                "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500",
            },
            [4500],
        ),
    ],
)
def test_what_control_groups_leave_is_the_limit_without_what_is_in_use(
    tmp_path: Path, membership: str, files: dict[str, str], expected: list[int]
) -> None:
    (tmp_path / "cgroup").write_text(f"{membership}\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    assert memory_left_bytes(tmp_path / "cgroup", tmp_path / "fs") == expected


def test_this_machines_memory_is_no_more_than_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "memory_limits_bytes", lambda: [3 * GIB, 2 * GIB])
    assert this_machine.cpu_device().capacity_bytes == 2 * GIB


def test_gpu_is_not_a_device_and_cuda_is() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown device 'gpu'.*write cuda\."):
        find_device("gpu")
