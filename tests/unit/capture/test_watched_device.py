"""A capture is the same on devices that answer alike whatever it asks of its own."""

from dataclasses import replace
from itertools import permutations

import pytest

import brimful.capture.updates as updates_module
from brimful.capture import capture_step
from brimful.capture.cache import CapturesOnDevices
from brimful.capture.watched_device import WatchedDevice
from brimful.devices import find_device, known_devices
from brimful.job import Job
from brimful.planner.on_gpus import AllocationsOnGpus
from brimful.settings import Precision, Settings
from brimful.trace import CUBLAS_WORKSPACE, Trace
from helpers.models import GPT, ResNet
from helpers.planned_jobs import image_job, language_job

PLAIN = Settings(micro_batch_size=2)
GPT_JOB = language_job(lambda: GPT(layers=6))
DEVICES = [find_device(name) for name in ("GTX 1080 Ti", "V100 32GB SXM2", "RTX 3090", "RTX 4090", "H100 SXM")]


def on_any_gpu(trace: Trace) -> Trace:
    """A trace without the sizes that are set for each GPU."""
    return replace(
        trace,
        storages=tuple(
            storage
            if storage.kernel is None and storage.label != CUBLAS_WORKSPACE
            else type(storage)(size_bytes=0, category=storage.category, op=storage.op, label=storage.label)
            for storage in trace.storages
        ),
        corrections=(),
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
@pytest.mark.parametrize("job", [GPT_JOB, image_job(ResNet)], ids=["gpt", "resnet"])
def test_what_is_the_same_on_another_gpu_is_what_is_captured_there(job: Job, precision: Precision) -> None:
    settings = replace(PLAIN, precision=precision)
    devices = [*DEVICES, find_device("A100 40GB SXM"), find_device("A100 80GB SXM")]
    with CapturesOnDevices(job, devices) as captures:
        traces = {device.name: on_any_gpu(captures(settings, device)) for device in devices}
        same = [
            (device.name, other.name)
            for device, other in permutations(devices, 2)
            if captures.is_same_on(device, other, precision)
        ]
    assert ("A100 40GB SXM", "A100 80GB SXM") in same
    assert [pair for pair in same if traces[pair[0]] != traces[pair[1]]] == []


def test_attention_that_runs_in_one_kernel_is_the_same_on_many_gpus() -> None:
    """In fp32 that is the memory-efficient one, on all that torch has it for; in fp16 some take another."""
    first = DEVICES[2]
    with CapturesOnDevices(GPT_JOB, known_devices()) as captures:
        captures(PLAIN, first)
        captures(replace(PLAIN, precision=Precision.FP16), first)
        same = {
            precision: {d.name for d in known_devices() if captures.is_same_on(first, d, precision)}
            for precision in (Precision.FP32, Precision.FP16)
        }
    assert {"GTX 1080 Ti", "RTX 4090", "H100 SXM"} <= same[Precision.FP32]
    assert "K80" not in same[Precision.FP32]
    assert "RTX 4090" in same[Precision.FP16]
    assert not {"GTX 1080 Ti", "V100 32GB SXM2", "H100 SXM"} & same[Precision.FP16]


def test_an_update_is_captured_once_for_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Settings] = []
    run = updates_module.capture_update

    def counted(job: Job, settings: Settings, *args: object) -> object:
        ran.append(settings)
        return run(job, settings, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(updates_module, "capture_update", counted)
    settings = [
        PLAIN,
        replace(PLAIN, micro_batch_size=3, gradient_accumulation_steps=2),
        replace(PLAIN, precision=Precision.FP16),
        replace(PLAIN, optimizer="adafactor"),
    ]
    with CapturesOnDevices(GPT_JOB, DEVICES) as captures:
        for device in DEVICES:
            for each in settings:
                trace = captures(each, device)
                whole = capture_step(GPT_JOB, each, device, steps=1)
                assert trace == whole
                assert AllocationsOnGpus(trace).reserved_bytes(device) == AllocationsOnGpus(
                    whole
                ).reserved_bytes(device)
    ran_with = [(each.precision, each.optimizer) for each in ran]
    plain, scaled, adafactor = (Precision.FP32, None), (Precision.FP16, None), (Precision.FP32, "adafactor")
    assert ran_with == [plain, scaled, adafactor, adafactor]  # once more for the workspace of an H100


def test_a_device_is_followed_in_what_is_asked_of_it() -> None:
    pascal, volta, ampere = DEVICES[:3]
    watched = WatchedDevice(ampere, DEVICES)
    assert watched.as_device().sm_count == 82  # of kernels, whose sizes are computed again
    assert all(map(watched.is_like, DEVICES))
    assert watched.as_device().supports(Precision.BF16)
    assert not watched.is_like(pascal)
    assert watched.is_like(DEVICES[4])
    watched.as_device().answer(lambda device: device.capacity_bytes)
    assert watched.is_like(ampere)
    assert not watched.is_like(DEVICES[4])

    follower = WatchedDevice(ampere, DEVICES)
    assert follower.is_like(volta)
    follower.follow(watched)
    assert not follower.is_like(volta)
    assert not watched.is_like(find_device("B200"))  # none of the others
