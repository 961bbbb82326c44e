"""A step begins with the copy of its batch from the host's pageable memory."""

from dataclasses import replace

import pytest
from msgspec import structs

from brimful.cost import StepTime, step_seconds
from brimful.cost.input_copies import ASYNCHRONOUS_BYTES, INPUT_COPY, PAGEABLE_BYTES_PER_SECOND
from brimful.devices import Device, Dispatch, find_device
from brimful.settings import Settings
from brimful.trace import Category, Op, Phase, Storage, Trace

LAUNCH = 1e-5
GPU = replace(find_device("A100 80GB SXM"), launch_seconds=LAUNCH, dispatch=Dispatch.of_launch(LAUNCH))
CPU = find_device("cpu")
BATCH_BYTES = 70_000_000
COPY_SECONDS = BATCH_BYTES / PAGEABLE_BYTES_PER_SECOND


def op(name: str, *, written_bytes: int = 0) -> Op:
    return Op(
        name=name,
        module="",
        phase=Phase.FORWARD,
        step=0,
        micro_batch=0,
        flops=0,
        read_bytes=0,
        written_bytes=written_bytes,
        dtype="float32",
    )


def trace(
    size_bytes: int = BATCH_BYTES,
    *,
    maker: Op | None = None,
    category: Category = Category.INPUTS,
    accumulation: int = 1,
) -> Trace:
    """A tensor is made, and read by a hundred small ops."""
    first = maker or op("aten.empty_like.default")
    return Trace(
        job="hand-written",
        settings=Settings(micro_batch_size=1, gradient_accumulation_steps=accumulation),
        device_kind="cuda",
        torch_version="2.13.0",
        captured_steps=1,
        captured_micro_batches=1,
        ops=(first, *(op("aten.add.Tensor", written_bytes=4) for _ in range(100))),
        storages=(Storage(size_bytes=size_bytes, category=category, op=0, label="batch"),),
        events=(),
        module_classes=(),
    )


def copy_seconds(time: StepTime) -> float:
    return dict(time.kernel_seconds).get(INPUT_COPY, 0.0)


def test_the_host_submits_what_follows_after_the_copy() -> None:
    without = step_seconds(trace(category=Category.TEMPORARIES), GPU)
    time = step_seconds(trace(), GPU)
    assert copy_seconds(time) == pytest.approx(COPY_SECONDS)
    assert time.total_seconds == pytest.approx(without.total_seconds + COPY_SECONDS, rel=0.01)


def test_each_micro_batch_is_copied() -> None:
    assert copy_seconds(step_seconds(trace(accumulation=4), GPU)) == pytest.approx(4 * COPY_SECONDS)


@pytest.mark.parametrize(
    "changed",
    [
        trace(ASYNCHRONOUS_BYTES),
        trace(maker=op("aten.clone.default", written_bytes=BATCH_BYTES)),
        replace(trace(), storages=(structs.replace(trace().storages[0], op=None),)),
    ],
    ids=["asynchronous", "converted on the device", "on the device"],
)
def test_what_does_not_wait_for_the_host_is_not_counted(changed: Trace) -> None:
    assert copy_seconds(step_seconds(changed, GPU)) == 0


def test_a_cpu_copies_nothing_over_a_link() -> None:
    assert copy_seconds(step_seconds(trace(), CPU)) == 0


def test_a_slow_link_is_slower_than_the_host() -> None:
    slow: Device = replace(GPU, host_link_bytes_per_second=PAGEABLE_BYTES_PER_SECOND / 2)
    assert copy_seconds(step_seconds(trace(), slow)) == pytest.approx(2 * COPY_SECONDS)
