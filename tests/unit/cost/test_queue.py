"""A queue that the host fills and the device works off."""

import numpy as np
import pytest

from brimful.cost.queue import finish_seconds


def simulated(host: list[float], work: list[float]) -> list[float]:
    """Step by step, as the docstring says it."""
    submitted = ended = 0.0
    ends = []
    for host_seconds, work_seconds in zip(host, work, strict=True):
        submitted += host_seconds
        ended = max(submitted, ended) + work_seconds
        ends.append(ended)
    return ends


@pytest.mark.parametrize(
    ("host", "work", "last"),
    [
        ([1, 1, 1], [0.1, 0.1, 0.1], 3.1),  # the device waits for every op
        ([1, 1, 1], [5, 5, 5], 16),  # the host is ahead after the first
        ([1, 1, 1, 1, 1], [4, 0.5, 0.5, 0.5, 0.5], 7),  # what the long op hid is all used up at the end
        ([1, 1, 9, 1], [3, 3, 1, 1], 13),  # a pause of the host that the queue hides in part
        ([2], [3], 5),
    ],
)
def test_an_op_starts_when_it_was_submitted_and_the_one_before_has_ended(
    host: list[float], work: list[float], last: float
) -> None:
    ends = finish_seconds(np.array(host, dtype=float), np.array(work, dtype=float))
    assert ends[-1] == pytest.approx(last)
    assert ends == pytest.approx(simulated(host, work))


def test_random_queues_end_as_simulated_step_by_step() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        host, work = rng.exponential(size=(2, 40))
        assert finish_seconds(host, work) == pytest.approx(simulated(host.tolist(), work.tolist()))


def test_an_empty_queue_is_done_at_once() -> None:
    assert finish_seconds(np.zeros(0), np.zeros(0)).size == 0
