"""The CUDA context: measured in a fresh process, kept, and preferred to published figures. No GPU is needed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.devices import cuda_context, find_device, with_context
from brimful.errors import UsageError
from brimful.profiling import calibrate
from brimful.profiling import cuda_context as context
from brimful.profiling.cache import cache_directory
from brimful.profiling.calibrate import cache_path, calibrate_cpu
from brimful.profiling.cuda_context import CACHE_FILE, best_context, kept_context, measure_context
from brimful.utils.quantities import MIB
from helpers.calibrated import CALIBRATION

GPU = "NVIDIA GeForce RTX 3090"
VERSION = torch.__version__
READING = {"driver_version": "580.95.05", "bare_bytes": 250 * MIB, "warm_bytes": 310 * MIB}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one RTX 3090, as far as torch says."""
    properties = SimpleNamespace(name=GPU, uuid="0bad", total_memory=24_123 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


Answers = Callable[..., list[Any]]


@pytest.fixture
def answers(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Sets what the fresh process answers; gives the list of its calls' arguments."""
    calls: list[Any] = []

    def answer(output: object, *, returncode: int = 0, error: str = "") -> list[Any]:
        text = output if isinstance(output, str) else json.dumps(output)

        def run(command: list[str], **settings: Any) -> object:
            calls.append((command, settings))
            return subprocess.CompletedProcess(command, returncode, text, error)

        monkeypatch.setattr(context.subprocess, "run", run)
        return calls

    return answer


def test_a_machine_without_cuda_is_told_so_and_where_published_figures_are() -> None:
    with pytest.raises(UsageError, match=r"machine with a CUDA GPU.*devices\.cuda_context"):
        measure_context()


def test_what_the_fresh_process_found_is_the_context_and_is_kept(answers: Answers) -> None:
    calls = answers(READING)
    measured = measure_context()
    assert measured.context_bytes == 310 * MIB
    assert (measured.low_bytes, measured.high_bytes) == (250 * MIB, 370 * MIB)
    assert measured.is_measured
    assert f"{GPU}, driver 580.95.05, torch {VERSION}" in measured.source
    assert kept_context(GPU, VERSION) == measured
    ((command, settings),) = calls
    assert command[:2] == [sys.executable, "-c"]
    assert settings["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-0bad"


def test_lines_that_libraries_print_before_the_reading_do_not_matter(answers: Answers) -> None:
    answers("a library says hello\n" + json.dumps(READING) + "\n")
    assert measure_context().context_bytes == 310 * MIB


@pytest.mark.parametrize("output", ["", "no json", "[]", '{"bare_bytes": 1}'])
def test_an_answer_that_cannot_be_read_is_an_error_that_shows_it(answers: Answers, output: str) -> None:
    answers(output)
    with pytest.raises(UsageError, match="could not be measured: the measuring process wrote"):
        measure_context()


def test_a_failure_of_the_fresh_process_is_told_by_its_last_line(answers: Answers) -> None:
    answers("", returncode=1, error="Traceback ...\npynvml.NVMLError_DriverNotLoaded: Driver Not Loaded\n")
    with pytest.raises(UsageError, match=r"could not be measured: .*Driver Not Loaded"):
        measure_context()
    assert kept_context(GPU) is None


@pytest.mark.parametrize(("bare", "warm"), [(-5, 300), (0, 300), (300, 200)])
def test_a_reading_that_cannot_be_is_not_kept(answers: Answers, bare: int, warm: int) -> None:
    answers(READING | {"bare_bytes": bare, "warm_bytes": warm})
    with pytest.raises(UsageError, match="measure again when it is idle"):
        measure_context()
    assert kept_context(GPU) is None


@pytest.mark.parametrize(("device", "message"), [("cpu", "no CUDA context"), ("cuda:3", "there is no cuda:3")])
def test_a_device_that_is_no_gpu_of_this_machine_is_refused(
    answers: Answers, device: str, message: str
) -> None:
    answers(READING)
    with pytest.raises(UsageError, match=message):
        measure_context(device)


def test_the_kept_value_is_found_under_the_drivers_name_and_the_tables(answers: Answers) -> None:
    answers(READING)
    measured = measure_context("cuda:0")
    assert kept_context("RTX 3090") == kept_context(GPU.lower()) == measured
    assert kept_context("RTX 3090 Ti") is None
    assert kept_context("RTX 3090", "1.13.1") is None


def test_a_gpu_that_the_table_does_not_know_is_kept_under_the_drivers_name(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="NVIDIA X1", uuid="0bad", total_memory=8 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    answers(READING)
    assert measure_context() == kept_context("nvidia x1")


def test_of_several_drivers_the_latest_measurement_counts_and_all_are_kept(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day, driver in [(2.0, "580"), (1.0, "570")]:
        monkeypatch.setattr(context.time, "time", lambda day=day: day)
        answers(READING | {"driver_version": driver, "warm_bytes": int(day) * 300 * MIB})
        measure_context()
    kept = kept_context(GPU, VERSION)
    assert kept is not None
    assert kept.context_bytes == 600 * MIB
    assert "driver 580" in kept.source
    assert len(json.loads((cache_directory() / CACHE_FILE).read_text())["contexts"]) == 2


def test_measured_comes_before_published_and_published_before_the_default(answers: Answers) -> None:
    device = find_device("RTX 3090")
    assert best_context(device) == cuda_context(device, VERSION)
    answers(READING)
    measured = measure_context()
    assert best_context(device) == best_context(device, VERSION) == measured
    assert with_context(device, measured).context_bytes == 310 * MIB
    assert best_context(device, "1.12.1") == cuda_context(device, "1.12.1")
    assert best_context(find_device("RTX 4090")) == cuda_context(find_device("RTX 4090"), VERSION)
    assert best_context(find_device("cpu")).context_bytes == 0


def test_best_context_refuses_what_is_no_version() -> None:
    with pytest.raises(UsageError, match="not a version of torch"):
        best_context(find_device("RTX 3090"), "newest")


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"version": 5}', '{"version": 5, "contexts": [1]}', "\x00"],
)
def test_a_damaged_cache_is_named_in_a_warning_and_rewritten(answers: Answers, broken: str) -> None:
    cache_directory().mkdir()
    (cache_directory() / CACHE_FILE).write_text(broken)
    with pytest.warns(UserWarning, match=r"cuda_contexts\.json.* It is not used"):
        assert kept_context(GPU) is None
    answers(READING)
    with pytest.warns(UserWarning, match="It is not used"):
        measured = measure_context()
    assert kept_context(GPU) == measured


@pytest.mark.parametrize("damage", [{"context_bytes": 0}, {"high_bytes": "x"}, {"gpu_name": None}, {"more": 1}])
def test_a_broken_entry_is_ignored_and_the_others_are_not(answers: Answers, damage: dict[str, object]) -> None:
    answers(READING)
    measured = measure_context()
    path = cache_directory() / CACHE_FILE
    document = json.loads(path.read_text())
    ((key, entry),) = document["contexts"].items()
    document["contexts"] = {"broken": entry | {"measured_at_seconds": 9e9} | damage, "no entry": 7, key: entry}
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="'broken': .*It is not used"):
        assert kept_context(GPU) == measured


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    answers(READING)
    with pytest.warns(UserWarning, match="measured CUDA context could not be kept"):
        assert measure_context().context_bytes == 310 * MIB


def test_contexts_and_the_cpus_rates_are_kept_side_by_side(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_device", lambda *_args, **_kwargs: CALIBRATION)
    calibrate_cpu()
    answers(READING)
    measure_context()
    assert set(cache_directory().iterdir()) == {cache_path(), cache_directory() / CACHE_FILE}


class FakeNvml:
    """NVML of a GPU that other programs use 1000 MiB of; the context takes 200, loaded kernels 50 more."""

    nvmlMemory_v2, NVMLError = 2, RuntimeError

    def __init__(self, *, lists_process: bool) -> None:
        self.lists_process = lists_process
        self.own_bytes = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        assert (handle, version) == ("GPU-0bad", 2)
        return SimpleNamespace(used=1000 * MIB + self.own_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        pid = context.os.getpid() if self.lists_process else 1
        return [
            SimpleNamespace(pid=99_999_999, usedGpuMemory=5),
            SimpleNamespace(pid=pid, usedGpuMemory=self.own_bytes),
        ]


@pytest.mark.parametrize("lists_process", [True, False], ids=["listed", "in a container"])
def test_the_context_is_what_the_process_takes_less_what_the_allocator_holds(
    gpu: None, monkeypatch: pytest.MonkeyPatch, lists_process: bool
) -> None:
    nvml = FakeNvml(lists_process=lists_process)
    reserved: list[int] = []

    def make_context(device: torch.device) -> None:
        nvml.own_bytes += 202 * MIB
        reserved.append(2 * MIB)

    def train_a_little(device: torch.device) -> None:
        nvml.own_bytes += 70 * MIB
        reserved.append(20 * MIB)

    monkeypatch.setattr(context, "_make_context", make_context)
    monkeypatch.setattr(context, "_train_a_little", train_a_little)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(reserved))
    monkeypatch.delattr(torch.cuda, "get_device_properties")  # on a real GPU it makes a context of its own
    reading = context._take_reading(nvml, "GPU-0bad", torch.device("cuda", 0))
    assert (reading.bare_bytes, reading.warm_bytes) == (200 * MIB, 250 * MIB)
    assert reading.driver_version == "580.95.05"


@pytest.mark.slow
def test_a_real_fresh_process_says_why_it_cannot_measure(gpu: None) -> None:
    """No machine has a GPU of this UUID: neither NVML nor torch can find it."""
    with pytest.raises(UsageError, match=r"could not be measured: .*(NVML|CUDA|NVIDIA|GPU)"):
        measure_context()


def test_the_small_training_step_runs() -> None:
    context._train_a_little(torch.device("cpu"))
