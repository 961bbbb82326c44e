"""`benchmarks/gpu/record.py` without a GPU: its dry run, its predictions, its reading of memory histories."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from brimful.devices import find_device  # noqa: E402
from gpu import allocations, record  # noqa: E402
from gpu.allocations import in_numbers, parts_between, replay  # noqa: E402
from gpu.configurations import CONFIGURATIONS, MOST_HISTORIES  # noqa: E402
from gpu.operation_cases import CASES  # noqa: E402
from gpu.operations import predict_operation  # noqa: E402
from gpu.predicted import predict, settings_of  # noqa: E402
from gpu.worker import errors  # noqa: E402

MIB = 1 << 20
RECORD = ROOT / "benchmarks" / "gpu" / "record.py"


def entry(action: str, address: int, size: int) -> dict[str, object]:
    """As in `torch.cuda.memory._snapshot()["device_traces"][0]`."""
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1}


# A segment of 20 MiB for 3 and 4 MiB, which lie at the same address one after the other; one of 18 MiB.
HISTORY = [
    entry("free_completed", 7, 512),  # from before the history began
    entry("segment_alloc", 0, 20 * MIB),
    entry("alloc", 0, 3 * MIB),
    entry("free_requested", 0, 3 * MIB),
    entry("free_completed", 0, 3 * MIB),
    entry("alloc", 0, 4 * MIB),
    entry("segment_alloc", 64 * MIB, 18 * MIB),
    entry("alloc", 64 * MIB, 17 * MIB + 1),
    {"action": "snapshot", "addr": 0, "size": 0},
]


def test_a_history_becomes_numbers_without_addresses():
    numbers = in_numbers(HISTORY)
    assert numbers.actions == "SAFASA"
    assert numbers.values == (20 * MIB, 3 * MIB, 0, 4 * MIB, 18 * MIB, 17 * MIB + 1)


def test_a_replay_through_the_simulated_allocator_holds_the_recorded_segments():
    assert replay(in_numbers(HISTORY)) == {
        "measured_peak_reserved_bytes": 38 * MIB,
        "replayed_peak_reserved_bytes": 38 * MIB,
        "measured_segments": 2,
        "replayed_segments": 2,
        "parted_at": None,
    }


def test_a_replay_says_where_it_parts_from_what_was_recorded():
    other = [*HISTORY[:6], entry("segment_alloc", 64 * MIB, 20 * MIB), *HISTORY[7:]]
    replayed = replay(in_numbers(other))
    assert replayed["measured_peak_reserved_bytes"] - replayed["replayed_peak_reserved_bytes"] == 2 * MIB
    assert replayed["parted_at"] == 5


def test_a_history_is_read_back_as_it_was_written(tmp_path):
    numbers = in_numbers(HISTORY)
    path = tmp_path / "traces" / "one.json.gz"
    allocations.write(path, numbers, {"configuration": "one"})
    read, about = allocations.read(path)
    assert read == numbers
    assert (about["configuration"], about["entries_kept"]) == ("one", len(numbers))


def test_a_long_history_is_cut_at_its_end(tmp_path):
    rng = random.Random(0)
    sizes = tuple(rng.randrange(1, 1 << 40) for _ in range(50_000))
    path = tmp_path / "long.json.gz"
    allocations.write(path, allocations.Allocations(actions="A" * len(sizes), values=sizes), {})
    assert path.stat().st_size <= allocations.LARGEST_FILE_BYTES
    read, about = allocations.read(path)
    assert read.values == sizes[: about["entries_kept"]]
    assert about["entries_recorded"] == len(sizes)


def test_what_lies_between_marks_is_told_apart():
    """An input from before the mark is freed inside; one block stays, one is temporary, one is made outside."""
    mark = 1_000_003
    history = [
        entry("alloc", 1, 2048),
        *(entry("alloc", 2, mark), entry("free_completed", 2, mark)),
        entry("alloc", 3, 1000),
        entry("alloc", 4, 5000),
        entry("free_completed", 1, 2048),
        entry("free_completed", 4, 5000),
        *(entry("alloc", 5, mark), entry("free_completed", 5, mark)),
        entry("alloc", 6, 512),
    ]
    assert parts_between(in_numbers(history), mark) == [
        {
            "peak_bytes": 1024 + 5120,
            "kept_bytes": 1024 - 2048,
            "temporary_bytes": 5120,
            "blocks": [1000, -5000],
            "blocks_made": 2,
        }
    ]


def test_recording_starts_afresh_and_ends(monkeypatch):
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": [], "device_traces": [[], HISTORY]})
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    allocations.start_history()
    assert allocations.stop_history(torch.device("cuda", 1)) == HISTORY
    assert [call["enabled"] for call in calls] == [None, "all", None]
    assert calls[1]["context"] is None


def test_an_error_is_told_for_what_was_predicted_and_measured():
    row = {
        "predicted_peak_allocated_bytes": 11,
        "measured_peak_allocated_bytes": 10,
        "predicted_peak_device_bytes": 5,
        "measured_peak_device_bytes": None,
    }
    assert errors(row) == {"peak_allocated_bytes": pytest.approx(0.1)}


def test_the_configurations_are_a_spread_and_their_files_fit_the_machine():
    assert len(CONFIGURATIONS) >= 20
    assert sum(each.history for each in CONFIGURATIONS.values()) <= MOST_HISTORIES
    families = {name.partition("-")[0] for name in CONFIGURATIONS}
    assert families == {"gpt2", "llama", "vit", "resnet50", "t5", "unet"}


def test_every_group_of_operations_has_its_process():
    assert {group for part in record.OPERATION_PROCESSES for group in part} == {case.group for case in CASES}


def test_a_linear_s_backward_is_predicted_to_stage_its_column_sums():
    """4096 rows of 1024 columns take 32 MiB: the formula of Reduce.cuh, worked out by hand."""
    case = next(case for case in CASES if case.name.startswith("linear with bias, 4096 rows, 1024 to 1024"))
    parts = predict_operation(case, find_device("H200"))["predicted"]
    assert parts["forward"]["kept_bytes"] == 4096 * 1024 * 4
    assert parts["backward"]["temporary_bytes"] == pytest.approx(32 * MIB, rel=0.001)
    gradients = [4096 * 1024 * 4, 1024 * 1024 * 4, 1024 * 4]
    assert sorted(size for size in parts["backward"]["blocks"] if size > 0) == sorted(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50-fp32-small-batch", "unet-fp16-recompute", "llama-bf16-accumulate"])
def test_configurations_of_full_size_are_predicted(name):
    device, configuration = find_device("H200"), CONFIGURATIONS[name]
    job = configuration.job(toy=False)
    settings = settings_of(configuration, job, device, toy=False)
    _, row = predict(job, settings, device)
    assert 0.5e9 < row["predicted_peak_allocated_bytes"] <= row["predicted_peak_reserved_bytes"] < 40e9
    assert bool(row["recomputed_units"]) is configuration.recomputes


@pytest.mark.slow
def test_the_dry_run_writes_what_a_gpu_would_fill(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECORD), "--out", str(tmp_path), "--dry", "--seconds", "800"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))

    assert (document["dry"], document["device"], document["skipped"]) == (True, "H200", [])
    assert {"torch", "transformers", "python"} <= set(document["machine"])
    assert document["context"][0]["stage"] == "libraries"

    rows = {row["name"]: row for row in document["configurations"]}
    assert set(rows) == set(CONFIGURATIONS)
    for row in rows.values():
        assert record.error_of(row) is None, row
        assert 0 < row["predicted_peak_allocated_bytes"] <= row["predicted_peak_reserved_bytes"]
        assert 0 < row["measured_steady_peak_allocated_bytes"] <= row["measured_peak_allocated_bytes"]
        assert row["updated"] == [True]

    assert {row["name"] for row in document["operations"]} == {case.name for case in CASES}
    for row in document["operations"]:
        assert record.error_of(row) is None, row
        assert set(row["predicted"]) in ({"forward", "backward"}, {"step"})

    recorded = {name for name, each in CONFIGURATIONS.items() if each.history}
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {f"{name}.json.gz" for name in recorded}
    for name in recorded:
        assert rows[name]["replay"]["parted_at"] is None
        numbers, about = allocations.read(tmp_path / rows[name]["history"])
        assert (about["configuration"], len(numbers)) == (name, about["entries_recorded"])
