"""Calibration: what it measures, how it is kept, and what a device has of it."""

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from brimful import api
from brimful.codec import DOCUMENT_BYTES, from_json_document
from brimful.cost.kinds import ARITHMETIC_KINDS, BYTE_KINDS
from brimful.devices import Device, Dispatch, find_device
from brimful.profiling import calibrate, probes, rates, timing, with_kept_calibration
from brimful.profiling.cache import keep, read_kept
from brimful.profiling.calibrate import (
    Calibration,
    cache_path,
    calibrate_cpu,
    calibrate_gpu,
    kept_calibration,
    measure_device,
)
from brimful.profiling.dispatch import measure_dispatch
from brimful.profiling.named_device import resolve_device
from brimful.profiling.probes import Pool, Probe
from brimful.profiling.rates import link_bytes_per_second, measure_probe
from brimful.profiling.timing import Duration, Typical, typical, typical_seconds
from brimful.utils.quantities import MIB
from helpers.calibrated import CALIBRATION

CPU = torch.device("cpu")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """An empty cache directory and a measurement that takes no time; lists the measurements made."""
    made: list[Calibration] = []

    def measure(device: Device, where: torch.device, *, sweeps: int, progress: object) -> Calibration:
        links = (20e9, 10e9) if device.kind == "cuda" else (None, None)
        made.append(
            replace(
                CALIBRATION,
                to_device_bytes_per_second=links[0],
                to_host_bytes_per_second=links[1],
                sweeps=sweeps,
            )
        )
        return made[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure_device", measure)
    return made


def keep_again(device: Device | None = None, **changes: object) -> None:
    """Keep what is kept of a device, the CPU by default, with other figures."""
    device = find_device("cpu") if device is None else device
    kept = kept_calibration(device)
    assert kept is not None
    keep(*calibrate._CACHES[device.kind], calibrate._cache_key(device), replace(kept, **changes), what="it")


def test_what_was_measured_replaces_the_defaults(measured: list[Calibration]) -> None:
    device = calibrate_cpu()
    assert device.fp32_flops_per_second == CALIBRATION.fp32_flops_per_second
    assert device.flops_per_second("bfloat16") == CALIBRATION.bf16_flops_per_second
    assert device.memory_bandwidth_bytes_per_second == CALIBRATION.memory_bandwidth_bytes_per_second
    assert device.launch_seconds == CALIBRATION.launch_seconds
    assert device.dispatch == CALIBRATION.dispatch
    assert device.curves == CALIBRATION.curves
    assert device.source == "measured on this machine"
    assert device.capacity_bytes == find_device("cpu").capacity_bytes


def test_a_gpu_keeps_its_table_peaks_and_has_the_slower_way_of_its_link(measured: list[Calibration]) -> None:
    row = find_device("RTX 3090")
    device = calibrate_gpu(row, torch.device("cuda", 0))
    assert device.fp32_flops_per_second == row.fp32_flops_per_second
    assert device.host_link_bytes_per_second == 10e9
    assert (device.dispatch, device.curves) == (CALIBRATION.dispatch, CALIBRATION.curves)
    assert device.source.startswith(row.source)


def test_a_gpu_measured_here_is_planned_for_with_what_was_measured(measured: list[Calibration]) -> None:
    calibrate_gpu(find_device("RTX 3090"), torch.device("cuda", 0))
    assert resolve_device("GeForce RTX 3090").curves == CALIBRATION.curves
    assert resolve_device("RTX 3080 10GB").curves == ()
    assert with_kept_calibration(find_device("RTX 4090")) == find_device("RTX 4090")
    assert len(measured) == 1


def test_calibrating_measures_this_machine_and_says_what_it_does(
    measured: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device.name for device in api.calibrate()] == ["cpu"]
    api.calibrate()
    calibrate_cpu()
    assert len(measured) == 1
    api.calibrate(remeasure=True)
    assert len(measured) == 2


def test_what_a_prediction_measured_in_haste_is_measured_again_when_asked(
    measured: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    resolve_device("cpu")
    api.calibrate()
    assert [calibration.sweeps for calibration in measured] == [1, 3]


def test_what_a_busy_machine_gave_is_measured_again_when_asked_and_else_made_do_with(
    measured: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    api.calibrate()
    keep_again(disturbed_fraction=0.9, measured_at_seconds=time.time())
    resolve_device("cpu")
    assert len(measured) == 1
    api.calibrate()
    assert len(measured) == 2


def test_what_a_busy_machine_gave_an_hour_ago_is_measured_again(measured: list[Calibration]) -> None:
    resolve_device("cpu")
    keep_again(disturbed_fraction=0.9, measured_at_seconds=time.time() - 3000)
    assert resolve_device("cpu").was_measured_busy
    assert len(measured) == 1
    keep_again(measured_at_seconds=time.time() - 4000)
    resolve_device("cpu")
    assert len(measured) == 2


def test_a_measurement_is_made_once_and_kept_in_the_cache_directory(
    measured: list[Calibration], tmp_path: Path
) -> None:
    assert calibrate_cpu() == calibrate_cpu()
    assert len(measured) == 1
    assert cache_path() == tmp_path / "brimful" / "cpu.json"
    assert [path.name for path in cache_path().parent.iterdir()] == ["cpu.json"]


def test_remeasuring_is_possible(measured: list[Calibration]) -> None:
    calibrate_cpu()
    calibrate_cpu(remeasure=True)
    assert len(measured) == 2


def test_another_cpu_or_thread_count_is_measured_apart_and_both_are_kept(
    measured: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_cpu()
    monkeypatch.setattr(calibrate, "_cache_key", lambda device: "another cpu")
    calibrate_cpu()
    assert len(measured) == 2
    assert len(json.loads(cache_path().read_text())["cpus"]) == 2


def test_the_key_names_cpu_torch_and_threads() -> None:
    key = calibrate._cache_key(find_device("cpu"))
    assert "torch 2." in key
    assert "threads" in key
    assert not key.startswith(";")


def test_the_key_of_a_gpu_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_device("T4")
    before = calibrate._cache_key(gpu)
    assert before.startswith("T4; ")
    monkeypatch.setattr(calibrate, "_cpu_model", lambda: "another CPU")
    assert calibrate._cache_key(gpu) != before


RATES_OF_AN_OLDER_VERSION = (
    '{"version": 5, "cpus": {"x": {"fp32_flops_per_second": 1e11, "fp16_flops_per_second": 1e9, '
    '"bf16_flops_per_second": 2e11, "memory_bandwidth_bytes_per_second": 8e9, "launch_seconds": 2e-6}}}'
)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        '{"version": 5}',
        '{"version": 5, "cpus": {"x": {"fp32": 1}}}',
        '{"version": 5, "cpus": {"x": []}}',
        '{"version": 5, "cpus": {"x": {"curves": [1], "dispatch": 3}}}',
        RATES_OF_AN_OLDER_VERSION,
        "\x00",
        "[" * 100_000,
        '{"version": 5, "cpus": {"x": NaN}}',
    ],
)
def test_a_damaged_cache_is_named_in_a_warning_and_rewritten(
    measured: list[Calibration], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_cache_key", lambda device: "x")
    cache_path().parent.mkdir()
    cache_path().write_text(broken)
    with pytest.warns(UserWarning, match=r"cpu\.json.* It is not used; what is needed is measured again"):
        calibrate_cpu()
    calibrate_cpu()
    assert len(measured) == 1


def test_a_cache_of_another_version_is_rewritten(measured: list[Calibration]) -> None:
    cache_path().parent.mkdir()
    cache_path().write_text('{"version": 0}')
    calibrate_cpu()
    calibrate_cpu()
    assert len(measured) == 1


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "dangling link", "huge"])
def test_a_cache_that_is_not_a_file_of_a_usual_size_is_not_waited_for(
    measured: list[Calibration], kind: str, tmp_path: Path
) -> None:
    path = cache_path()
    path.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2 * DOCUMENT_BYTES)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    with pytest.warns(UserWarning, match=r"cpu\.json") as warned:
        assert calibrate_cpu().curves == CALIBRATION.curves
    assert "It is not used; what is needed is measured again" in str(warned[0].message)
    assert len(measured) == 1


def test_the_kept_figures_of_a_gpu_have_those_of_its_link(measured: list[Calibration]) -> None:
    device = find_device("RTX 3090")
    calibrate_gpu(device, CPU)
    keep_again(device, to_host_bytes_per_second=None)
    assert with_kept_calibration(device) == device


def test_a_calibration_is_read_back_as_it_was_written() -> None:
    assert (
        from_json_document(json.loads(json.dumps(asdict(CALIBRATION))), Calibration, where="it") == CALIBRATION
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("launch_seconds", 0),
        ("fp32_flops_per_second", -1.0),
        ("curves", []),
        ("curves", [{"kind": "elementwise", "points": [[8, 0]]}]),
        ("disturbed_fraction", -1e-9),
        ("dispatch", {"forward_seconds": -1, "backward_seconds": 1, "optimizer_seconds": 1}),
        ("sweeps", 1.5),
        ("took_seconds", "5"),
        ("launch_second", 1e-6),
        ("launch_seconds", 60.0),
        ("bf16_flops_per_second", 1e30),
        ("memory_bandwidth_bytes_per_second", 1e-3),
    ],
)
def test_a_kept_figure_that_cannot_be_is_measured_anew(
    measured: list[Calibration], field: str, value: object
) -> None:
    calibrate_cpu()
    document = json.loads(cache_path().read_text())
    for values in document["cpus"].values():
        values[field] = value
    cache_path().write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=rf"field `{field}.*It is not used"):
        assert calibrate_cpu().curves == CALIBRATION.curves
    assert len(measured) == 2


def test_an_altered_entry_is_measured_anew(measured: list[Calibration]) -> None:
    calibrate_cpu()
    text = cache_path().read_text()
    cache_path().write_text(text.replace("100000000000.0", "200000000000.0"))
    assert cache_path().read_text() != text
    with pytest.warns(UserWarning, match=r"altered after it was measured\. It is not used"):
        assert calibrate_cpu().curves == CALIBRATION.curves
    assert len(measured) == 2


def test_a_write_that_fails_leaves_nothing_behind(
    measured: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_cpu()
    before = cache_path().read_text()

    def full(*_args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="could not be kept: no space left"):
        calibrate_cpu(remeasure=True)
    assert [path.name for path in cache_path().parent.iterdir()] == ["cpu.json"]
    assert cache_path().read_text() == before


def test_only_files_of_its_own_are_replaced_or_deleted(measured: list[Calibration]) -> None:
    calibrate_cpu()
    folder = cache_path().parent
    others = [folder / name for name in ("notes.json", "tmp1234", "cpu.json.partial")]
    for other in others:
        other.write_text("of another program")
        os.utime(other, (0, 0))
    (folder / ".cpu.json.partial").write_text("of a process that was killed")
    calibrate_cpu(remeasure=True)
    assert set(folder.iterdir()) == {cache_path(), *others}


def test_what_several_threads_keep_at_a_time_is_all_kept(measured: list[Calibration]) -> None:
    with ThreadPoolExecutor(8) as pool:
        kept = [pool.submit(keep, "cpu.json", "cpus", str(key), CALIBRATION, what="it") for key in range(24)]
        for each in kept:
            each.result()
    assert read_kept("cpu.json", "cpus", Calibration).keys() == {str(key) for key in range(24)}


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    measured: list[Calibration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(UserWarning, match="could not be kept"):
        device = calibrate_cpu()
    assert device.launch_seconds == CALIBRATION.launch_seconds


def test_a_measurement_on_a_busy_machine_says_so_and_how_to_repeat_it() -> None:
    device = replace(CALIBRATION, disturbed_fraction=0.9).applied_to(find_device("cpu"))
    assert device.confidence == "low"
    assert "calibrate --force" in device.source


def test_disturbed_rounds_do_not_count_where_enough_are_not() -> None:
    quiet = [Duration(seconds=seconds, is_disturbed=False) for seconds in (1.0, 2.0, 3.0)]
    disturbed = [Duration(seconds=seconds, is_disturbed=True) for seconds in (0.5, 9.0, 9.0, 9.0)]
    assert typical([*disturbed, *quiet]) == 2.0
    assert typical([*disturbed, *quiet[:2]]) == 0.5


def test_a_thread_that_waits_for_a_processor_makes_a_round_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is woken late has lost no turn."""
    monkeypatch.setattr(timing, "_lost_turns", lambda: 0)
    for later, is_disturbed in ((11.0, True), (1.00001, False)):
        waited = iter([{"7": 1.0, "8": 50.0}, {"7": later, "9": 0.0}])  # the eighth has ended, a ninth begun
        monkeypatch.setattr(timing, "_waited_seconds", lambda waited=waited: next(waited))
        assert timing.host_timed(lambda: time.sleep(8e-3))[1].is_disturbed is is_disturbed


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell waiting")
def test_what_threads_waited_is_told_by_the_system() -> None:
    processors = sorted(os.sched_getaffinity(0))
    most = 0.0

    def spin() -> None:
        os.sched_setaffinity(0, processors[:1])  # of this thread alone
        hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)  # without Python's lock

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, *timing._waited_seconds().values())
    for thread in threads:
        thread.join()
    assert most > 0.01


def test_where_several_threads_are_always_disturbed_one_does_the_work_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: asked.append(count))
    asked = [2]

    def timed(run: Callable[[], object]) -> tuple[object, Duration]:
        return run(), Duration(seconds=1.0 if asked[-1] == 1 else 8.0, is_disturbed=asked[-1] > 1)

    monkeypatch.setattr(timing, "host_timed", timed)
    found = typical_seconds([lambda: None], CPU, most_seconds=0.0)
    assert asked == [2, 1, 2]
    assert not found.is_quiet
    assert found.seconds == 1.0


def test_a_round_of_many_calls_ends_when_they_all_take_time_slices() -> None:
    called = []
    timing._round(itertools.cycle([lambda: called.append(time.sleep(1e-3))]), CPU, 10_000)
    assert len(called) < 100


def test_runs_take_turns_and_at_least_three_rounds_are_made() -> None:
    called: list[int] = []
    found = typical_seconds([lambda which=i: called.append(which) for i in range(3)], CPU, most_seconds=0.0)
    assert called[:6] == [0, 1, 2, 0, 1, 2]
    assert len(called) >= 6
    assert found.seconds > 0


def test_every_kind_has_a_probe_that_counts_work_as_a_capture_does() -> None:
    kinds = {probe.kind.partition(":")[0] for probe in probes.probes(CPU)}
    assert kinds == {*ARITHMETIC_KINDS, *BYTE_KINDS}


@pytest.mark.parametrize("probe", list(probes.probes(CPU)), ids=lambda probe: probe.kind)
def test_a_probe_runs_at_its_smallest_sizes_and_its_work_grows(probe: Probe) -> None:
    pool = Pool(CPU, probe.dtype, 1 << 22)
    measured = measure_probe(replace(probe, sizes=probe.sizes[:2]), pool)
    assert len(measured) == 2
    assert list(measured) == sorted(measured)
    assert min(measured) > 0


@pytest.mark.parametrize(
    ("milliseconds", "sizes"),
    [
        ((8, 8, 8, 8, 8, 8), 6),  # time slices
        ((8, 16, 32, 64, 128, 256), 4),  # full rate
        ((0.001, 0.002, 0.004, 8, 8, 8), 6),  # quiet at first, then time slices
        ((0.001, 0.002, 0.004, 8, 16, 32), 5),  # out of a cache
    ],
)
def test_sizes_go_on_until_their_rate_is_steady(
    milliseconds: tuple[float, ...], sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time slice of other work, always as long, must not tell the rate of larger sizes."""
    found = (Typical(seconds=each / 1e3, is_quiet=True) for each in milliseconds)
    monkeypatch.setattr(rates, "typical_seconds", lambda *_args, **_kwargs: next(found))
    probe = next(probe for probe in probes.probes(CPU) if probe.kind == "elementwise")
    probe = replace(probe, sizes=(64, 128, 256, 512, 1024, 2048))
    assert len(measure_probe(probe, Pool(CPU, torch.float32, 1 << 16))) == sizes


def test_what_nothing_disturbed_comes_before_what_was_shorter() -> None:
    quiet, disturbed = Typical(seconds=1.0, is_quiet=True), Typical(seconds=0.9, is_quiet=False)
    assert min(disturbed, quiet, key=rates._by_quiet_and_time) is quiet
    assert min(replace(quiet, seconds=0.8), quiet, key=rates._by_quiet_and_time).seconds == 0.8


def test_a_pool_hands_out_other_memory_each_time_until_it_is_used_up() -> None:
    pool = Pool(CPU, torch.float32, 4 * 256)
    starts = [pool.operand(2, 50).data_ptr() for _ in range(3)]
    assert len(set(starts)) == 2
    assert starts[2] == starts[0]
    assert pool.operand(1000).shape == (1000,)  # larger than all of it


def test_operands_are_as_large_as_the_last_cache_where_memory_permits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operands in a cache of 480 MiB elementwise ops ran at twice the rate of memory."""
    for index, size in enumerate(("48K", "2048K", "491520K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert rates.last_cache_bytes(tmp_path) == 480 * MIB
    assert rates.last_cache_bytes(tmp_path / "elsewhere") == 0
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 480 * MIB)
    monkeypatch.setattr(rates, "memory_left_bytes", list)
    for free_gib, expected in ((64, 480 * MIB), (4, 256 * MIB), (0.5, 64 * MIB)):
        memory = SimpleNamespace(available=int(free_gib * 1024 * MIB))
        monkeypatch.setattr(rates.psutil, "virtual_memory", lambda memory=memory: memory)
        assert rates._pool_bytes(CPU, torch.float32) == expected
        assert rates._pool_bytes(CPU, torch.bfloat16) == 64 * MIB


def test_operands_take_no_more_than_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 480 * MIB)
    memory = SimpleNamespace(available=64 * 1024 * MIB)
    monkeypatch.setattr(rates.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(rates, "memory_left_bytes", lambda: [8 * 1024 * MIB, 2 * 1024 * MIB])
    assert rates._pool_bytes(CPU, torch.float32) == 128 * MIB


def test_what_is_around_ops_is_measured_with_the_ops_of_a_capture() -> None:
    cpu = CALIBRATION.applied_to(find_device("cpu"))
    dispatch = measure_dispatch(cpu, CPU)
    assert all(seconds >= 0 for seconds in asdict(dispatch).values())
    assert dispatch.forward_seconds >= cpu.launch_seconds
    assert cpu.launch_seconds <= dispatch.native_loop_seconds <= dispatch.forward_seconds
    assert min(dispatch.selective_seconds) > 0  # a dispatch mode calls Python at every op and view


def test_a_calibration_without_selective_checkpointing_has_what_its_regions_suggest() -> None:
    kept = {"forward_seconds": 1e-5, "backward_seconds": 1e-5, "optimizer_seconds": 1e-5}
    slow, fast = (
        from_json_document(kept | {"region_seconds": seconds}, Dispatch, where="it") for seconds in (8e-4, 4e-4)
    )
    assert slow.selective_seconds == pytest.approx([2 * seconds for seconds in fast.selective_seconds])
    assert min(fast.selective_seconds) > 1e-5
    assert replace(slow, selective_forward_seconds=0.0).selective_seconds == (0.0, slow.selective_seconds[1])


@pytest.mark.slow
def test_a_real_measurement_is_whole_and_survives_being_kept() -> None:
    found = measure_device(find_device("cpu"), CPU, sweeps=1)
    assert from_json_document(json.loads(json.dumps(asdict(found))), Calibration, where="it") == found
    assert {curve.kind.partition(":")[0] for curve in found.curves} == {*ARITHMETIC_KINDS, *BYTE_KINDS}


@pytest.mark.slow
def test_the_link_is_measured_both_ways() -> None:
    assert all(rate > 0 for rate in link_bytes_per_second(CPU))
