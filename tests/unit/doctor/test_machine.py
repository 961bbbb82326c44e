"""What a machine has, who holds the memory of its GPUs, and that only one's own processes are ended."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brimful.doctor import machine as module
from brimful.doctor.machine import end_process, this_machine
from brimful.doctor.machine_text import machine_document, machine_text
from brimful.errors import UsageError
from brimful.utils.quantities import MIB
from helpers.fake_gpu import FakeNvml, FakeNvmlError

SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) echo "0, GPU-1, NVIDIA Fake, 24000, 10000, 550.54" ;;
  *) echo "GPU-1, $PPID, 300"; echo "GPU-1, {pid}, 9000"; echo "GPU-1, 999999999, [N/A]" ;;
esac
"""


class Nvml(FakeNvml):
    """Of one GPU, by its place."""

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        assert (self.is_open, index) == (True, 0)
        return "GPU-0bad"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA Fake"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        memory = super().nvmlDeviceGetMemoryInfo(handle, version)
        return SimpleNamespace(total=self.total_mib * MIB, **vars(memory))


class NoNvml(FakeNvml):
    def nvmlInit(self) -> None:
        raise FakeNvmlError("no driver")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def put(patch: pytest.MonkeyPatch, nvml: Any) -> None:
    patch.setitem(sys.modules, "pynvml", nvml)


def test_processes_are_named_with_user_age_and_command(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
) -> None:
    put(monkeypatch, Nvml(24_000, {os.getpid(): 300, other.pid: 9000}, unlisted_mib=700))
    found = this_machine()
    (gpu,) = found.gpus
    assert (found.driver, found.driver_cuda, gpu.free_bytes) == ("550.54", (12, 4), 14_000 * MIB)
    assert [(each.pid, each.is_own) for each in gpu.holders] == [(other.pid, True), (os.getpid(), False)]
    assert gpu.unlisted_bytes == 700 * MIB
    assert gpu.holders[0].age_seconds is not None
    text = machine_text(found)
    assert f"8.79 GiB  pid {other.pid}, user {gpu.holders[0].user}, for " in text
    assert "-c import time; time.sleep(300)" in text
    assert f"--kill {other.pid}" in text
    assert f"--kill {os.getpid()}" not in text
    assert machine_document(found)["gpus"][0]["holders"][0]["held_bytes"] == 9000 * MIB


def test_processes_with_numbers_of_the_host_are_not_taken_for_those_here(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(module, "has_own_process_numbers", lambda: True)
    put(monkeypatch, Nvml(24_000, {other.pid: 9000}))
    (holder,) = this_machine().gpus[0].holders
    assert (holder.command, holder.user, holder.is_own) == (None, None, False)


class Unified(Nvml):
    """Of a GPU that shares the memory of the CPU."""

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        raise FakeNvmlError("not supported")


@pytest.mark.parametrize("nvml", [Unified(0, {os.getpid(): None}), NoNvml(0, {})], ids=["nvml", "nvidia-smi"])
def test_a_gpu_whose_memory_the_driver_does_not_report_is_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: Nvml
) -> None:
    """As on a GB10: nvidia-smi writes "[N/A]"."""
    monkeypatch.setattr(module, "has_own_process_numbers", lambda: False)
    put(monkeypatch, nvml)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.replace("24000, 10000", "[N/A], [N/A]").format(pid=os.getpid()).replace("9000", "[N/A]"))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = this_machine()
    (gpu,) = found.gpus
    assert (gpu.total_bytes, gpu.free_bytes, gpu.unlisted_bytes) == (None, None, 0)
    text = machine_text(found)
    assert "GPU 0, NVIDIA Fake: the driver does not report its memory" in text
    assert f"?  pid {os.getpid()}, user" in text


def test_a_machine_without_a_gpu_has_its_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, NoNvml(0, {}))
    monkeypatch.setenv("PATH", "")
    found = this_machine()
    assert (found.gpus, found.driver, found.odd) == ((), "", ())
    assert found.cores >= 1
    assert "no NVIDIA driver is found" in machine_text(found)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, ["PyTorch takes True or False"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split:2"}, ["max_split"]),
        (
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF differ"],
        ),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ["waits for cudaMalloc"]),
        (
            {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_VISIBLE_DEVICES": ""},
            ["waits for each kernel", "hides all GPUs"],
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_LAUNCH_BLOCKING": "0"}, []),
    ],
)
def test_odd_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str]
) -> None:
    put(monkeypatch, NoNvml(0, {}))
    monkeypatch.setenv("PATH", "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    odd = this_machine().odd
    assert len(odd) == len(words)
    assert all(word in text for word, text in zip(words, odd, strict=True))


@pytest.mark.parametrize(
    ("built", "words"), [(None, "is built for CPUs"), ("13.0", "runs CUDA up to 12.4"), ("12.6", "")]
)
def test_a_torch_that_does_not_fit_the_driver_is_odd(
    monkeypatch: pytest.MonkeyPatch, built: str | None, words: str
) -> None:
    put(monkeypatch, Nvml(24_000, {}))
    monkeypatch.setattr(torch.version, "cuda", built)
    odd = this_machine().odd
    assert words in "".join(odd)
    assert len(odd) == bool(words)


def test_only_a_listed_process_of_ones_own_is_ended_after_a_yes(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(module, "has_own_process_numbers", lambda: False)
    put(monkeypatch, Nvml(24_000, {os.getpid(): 300, 1: 10}))
    found = this_machine()
    for pid, why in (
        (other.pid, "does not hold memory"),
        (os.getpid(), "it is this one"),
        (1, r"it is (of|this)"),
    ):
        with pytest.raises(UsageError, match=why):
            end_process(pid, found, lambda holder: True)
    put(monkeypatch, Nvml(24_000, {other.pid: 9000}))
    found = this_machine()
    assert not end_process(other.pid, found, lambda holder: False)
    assert other.poll() is None
    assert end_process(other.pid, found, lambda holder: holder.pid == other.pid)
    assert other.wait(10) == -signal.SIGTERM


def asked(folder: Path, answer: str | None, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command; with an answer, typed at a terminal."""
    (folder / "pynvml.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "brimful", "doctor", "machine", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE if answer is None else theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        text=True,
    ) as process:
        if answer is not None:
            os.write(ours, f"{answer}\n".encode())
        out, _ = process.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    return process.returncode, out


@pytest.mark.slow
def test_a_process_that_nvidia_smi_lists_is_ended_by_a_yes_at_a_terminal_alone(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(pid=other.pid))
    smi.chmod(0o755)
    _, text = asked(tmp_path, None)
    assert "GPU 0, NVIDIA Fake: 9.77 GiB of 23.4 GiB free" in text
    assert f"8.79 GiB  pid {other.pid}" in text
    assert "?  pid 999999999: not seen from here" in text
    status, text = asked(tmp_path, None, "--kill", str(other.pid))
    assert (status, "asks at a terminal, and there is none" in text) == (2, True)
    status, text = asked(tmp_path, "y", "--kill", str(other.pid))
    assert (status, f"process {other.pid} still runs" in text) == (1, True)
    assert other.poll() is None
    status, text = asked(tmp_path, "yes", "--kill", str(other.pid))
    assert (status, f"process {other.pid} has ended" in text) == (0, True)
    assert other.wait(10) == -signal.SIGTERM
