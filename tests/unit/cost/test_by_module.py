"""Seconds by module: all of forward and backward in the root, and each module in its parents."""

import pytest

from brimful.cost import Roofline, work_seconds_by_module
from brimful.trace import Phase
from helpers.captured_jobs import A100, capture, job


def test_the_root_has_the_work_of_every_micro_batch_and_parents_that_of_their_children():
    trace = capture(job(), A100, samples=2, gradient_accumulation_steps=5)
    found = work_seconds_by_module(trace, A100)
    roofline, last = Roofline.of(trace, A100), trace.captured_micro_batches - 1
    expected = sum(
        roofline.work_seconds(op) * (5 - last if op.micro_batch == last else 1)
        for op in trace.ops
        if op.step == trace.captured_steps - 1 and op.phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert found[""] == pytest.approx(expected)
    assert found["0"] > 0
    assert sum(seconds for path, seconds in found.items() if path and "." not in path) <= found[""]
