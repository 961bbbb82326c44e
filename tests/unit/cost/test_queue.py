"""A queue that the host fills and the device works off."""

import numpy as np
import pytest

from brimful.cost.queue import DEVICE, LinkOp, finish_seconds


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


def simulated_with_copies(host: list[float], work: list[float], link_ops: list[LinkOp]) -> list[float]:
    """The same, and a clock for each direction of the link."""
    submitted = ended = 0.0
    copied = {"out": 0.0, "back": 0.0}
    at = {op.position: op for op in link_ops}
    ends = []
    for position, (host_seconds, work_seconds) in enumerate(zip(host, work, strict=True)):
        submitted += host_seconds
        ended = max(submitted, ended)
        op = at.get(position)
        if op is not None and op.host_waits:
            submitted = max(submitted, copied[op.way])
            ended = max(ended, submitted)
        elif op is not None and op.copy_seconds is None and op.way != DEVICE:
            ended = max(ended, copied[op.way])
        ended += work_seconds
        if op is not None and op.copy_seconds is not None:
            begins = max(ended, copied[op.way], copied[op.follows or op.way])
            copied[op.way] = begins + op.copy_seconds
        if op is not None and op.way == DEVICE:
            submitted = max(submitted, ended)
        ends.append(ended)
    return ends


@pytest.mark.parametrize(
    ("copy_seconds", "last"),
    [
        (3.0, 1 + 5 + 1),  # there long before it is waited for
        (5.0, 1 + 5 + 1),  # just in time
        (7.0, 1 + 7 + 1),  # the device waits for two seconds
    ],
)
def test_a_copy_goes_on_beside_the_work_until_it_is_waited_for(copy_seconds: float, last: float) -> None:
    link_ops = [LinkOp(0, "out", copy_seconds), LinkOp(2, "out", None)]
    ends = finish_seconds(np.zeros(4), np.array([1.0, 5.0, 0.0, 1.0]), link_ops)
    assert ends[-1] == pytest.approx(last)


def test_copies_of_one_direction_follow_one_another_and_those_of_two_do_not() -> None:
    work = np.array([0.0, 0.0, 1.0, 0.0])
    same = [LinkOp(0, "out", 3.0), LinkOp(1, "out", 4.0), LinkOp(3, "out", None)]
    assert finish_seconds(np.zeros(4), work, same)[-1] == pytest.approx(7)
    other = [LinkOp(0, "out", 3.0), LinkOp(1, "back", 4.0), LinkOp(3, "out", None)]
    assert finish_seconds(np.zeros(4), work, other)[-1] == pytest.approx(3)


def random_link_op(position: int, rng: np.random.Generator) -> LinkOp:
    """A copy, one that follows those of the other direction, or a wait of the device or of the host; the
    host may also wait for the device."""
    if rng.random() < 0.2:
        return LinkOp(position, DEVICE, None)
    way = "out" if rng.random() < 0.5 else "back"
    if rng.random() < 0.4:
        return LinkOp(position, way, None, host_waits=rng.random() < 0.5)
    return LinkOp(position, way, float(rng.exponential(4)), follows="back" if rng.random() < 0.3 else None)


def test_what_the_host_waits_for_itself_delays_all_that_follows() -> None:
    copy, wait = LinkOp(0, "out", 3.0), LinkOp(1, "out", None, host_waits=True)
    ends = finish_seconds(np.array([1.0, 0.0, 2.0]), np.array([1.0, 0.0, 1.0]), [copy, wait])
    assert ends.tolist() == pytest.approx([2, 5, 5 + 2 + 1])


def test_a_host_that_waits_for_a_result_has_no_lead_afterwards() -> None:
    """Launches of 1 s that the device's work hid are exposed again after the op that is waited for."""
    host, work = np.ones(4), np.array([5.0, 1.0, 1.0, 1.0])
    assert finish_seconds(host, work).tolist() == [6, 7, 8, 9]
    waits = [LinkOp(1, DEVICE, None)]
    assert finish_seconds(host, work, waits).tolist() == [6, 7, 9, 10]


def test_a_copy_may_follow_those_of_the_other_direction() -> None:
    back, out = LinkOp(0, "back", 3.0), LinkOp(1, "out", 4.0, follows="back")
    assert finish_seconds(np.zeros(3), np.zeros(3), [back, out, LinkOp(2, "out", None)])[-1] == 7


def test_random_queues_with_copies_end_as_simulated_step_by_step() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        host, work = rng.exponential(size=(2, 40))
        link_ops = [random_link_op(int(position), rng) for position in np.flatnonzero(rng.random(40) < 0.4)]
        ends = finish_seconds(host, work, link_ops)
        assert ends == pytest.approx(simulated_with_copies(host.tolist(), work.tolist(), link_ops))


def test_an_empty_queue_is_done_at_once() -> None:
    assert finish_seconds(np.zeros(0), np.zeros(0)).size == 0
