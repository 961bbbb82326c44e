"""The time of a step: which ops of a trace count, how often, and what recomputed regions add."""

from dataclasses import replace

import pytest
from msgspec import structs
from torch._ops import OpOverload

from brimful.cost import StepTime, region_seconds, saving_seconds, step_seconds
from brimful.cost.kernels.constants import KERNEL_SECONDS
from brimful.cost.kernels.factors import reached_by
from brimful.cost.regions import COPY_SECONDS, NESTED_FORWARD_SECONDS
from brimful.devices import Device, Dispatch, find_device
from brimful.memory import LINK_USES, TO_HOST
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Op, Phase, Trace
from brimful.transforms import host_link

# Round figures: one byte is a second, and launching is free.
CPU = replace(
    find_device("cpu"),
    memory_bandwidth_bytes_per_second=1.0,
    launch_seconds=1e-12,
    dispatch=Dispatch.of_launch(1e-12),
)
A100 = find_device("A100 80GB SXM")
GPU = replace(A100, l2_bytes=0, dispatch=Dispatch.of_launch(A100.launch_seconds))
BANDWIDTH = GPU.memory_bandwidth_bytes_per_second * reached_by(GPU).bandwidth


def op(
    phase: Phase,
    read_bytes: int,
    *,
    step: int = 1,
    micro_batch: int = 0,
    recomputed: bool = False,
    flops: int = 0,
    dtype: str = "float32",
    name: str = "aten.op",
) -> Op:
    return Op(
        name=name,
        module="m",
        phase=phase,
        step=step,
        micro_batch=micro_batch,
        flops=flops,
        read_bytes=read_bytes,
        written_bytes=0,
        dtype=dtype,
        recomputed=recomputed,
    )


def trace(*ops: Op, accumulation: int = 1, captured: int = 1, recomputed_units: int = 0) -> Trace:
    units = tuple(UnitAction(fqn=f"u{i}", action=Action.RECOMPUTE) for i in range(recomputed_units))
    return Trace(
        job="hand-written",
        settings=Settings(micro_batch_size=1, gradient_accumulation_steps=accumulation, units=units),
        device_kind="cuda",
        torch_version="2.13.0",
        captured_steps=2,
        captured_micro_batches=captured,
        ops=ops,
        storages=(),
        events=(),
        module_classes=(),
    )


def test_only_the_last_captured_step_is_timed_phase_by_phase() -> None:
    predicted = step_seconds(
        trace(
            op(Phase.SETUP, 1000, step=0),
            op(Phase.FORWARD, 1000, step=0),
            op(Phase.OPTIMIZER, 1000, step=0),
            op(Phase.FORWARD, 1),
            op(Phase.BACKWARD, 2),
            op(Phase.BACKWARD, 3, recomputed=True),
            op(Phase.OPTIMIZER, 4),
        ),
        CPU,
    )
    assert (predicted.forward_seconds, predicted.backward_seconds) == pytest.approx((1, 2))
    assert (predicted.recompute_seconds, predicted.optimizer_seconds) == pytest.approx((3, 4))
    assert predicted.total_seconds == pytest.approx(10)


def test_the_last_captured_micro_batch_stands_for_the_further_ones() -> None:
    ops = (
        op(Phase.FORWARD, 1, micro_batch=0),
        op(Phase.BACKWARD, 10, micro_batch=0),
        op(Phase.FORWARD, 2, micro_batch=1),
        op(Phase.BACKWARD, 20, micro_batch=1),
        op(Phase.OPTIMIZER, 100, micro_batch=1),
    )
    predicted = step_seconds(trace(*ops, accumulation=8, captured=2), CPU)
    assert predicted.forward_seconds == pytest.approx(1 + 7 * 2)
    assert predicted.backward_seconds == pytest.approx(10 + 7 * 20)
    assert predicted.optimizer_seconds == pytest.approx(100)


def test_on_a_cpu_every_recomputed_region_of_every_micro_batch_adds_its_dispatch() -> None:
    predicted = step_seconds(trace(op(Phase.FORWARD, 1), accumulation=4, recomputed_units=3), CPU)
    assert predicted.recompute_seconds == pytest.approx(12 * region_seconds(CPU))


@pytest.mark.parametrize(("kernel_seconds", "hidden"), [(0.0, False), (1.0, True)])
def test_on_a_gpu_long_kernels_hide_the_dispatch_of_regions(kernel_seconds: float, hidden: bool) -> None:
    read_bytes = int(kernel_seconds * GPU.memory_bandwidth_bytes_per_second)
    ops = (op(Phase.FORWARD, read_bytes), op(Phase.BACKWARD, 1, recomputed=True), op(Phase.OPTIMIZER, 1))
    predicted = step_seconds(trace(*ops, recomputed_units=3), GPU)
    launches = GPU.launch_seconds
    exposed = 3 * region_seconds(GPU) + launches
    assert predicted.recompute_seconds == pytest.approx(KERNEL_SECONDS if hidden else exposed, rel=1e-3)


def test_on_a_gpu_the_parts_add_up_to_when_the_queue_is_done() -> None:
    """Two micro-batches of one long and two short ops, then three short ones of the optimizer."""
    launch = GPU.launch_seconds
    long_bytes = int((10 * launch - KERNEL_SECONDS) * BANDWIDTH)
    ops = (
        op(Phase.FORWARD, long_bytes),
        op(Phase.BACKWARD, 1),
        op(Phase.BACKWARD, 1),
        *[op(Phase.OPTIMIZER, 1)] * 3,
    )
    once = step_seconds(trace(*ops), GPU)
    assert once.forward_seconds == pytest.approx(11 * launch)
    # the host's lead hides the launches of all that follows
    assert once.total_seconds == pytest.approx(11 * launch + 5 * KERNEL_SECONDS, rel=1e-3)
    twice = step_seconds(trace(*ops, accumulation=2), GPU)
    assert twice.total_seconds == pytest.approx(21 * launch + 7 * KERNEL_SECONDS, rel=1e-3)


def test_on_a_gpu_short_ops_take_as_long_as_the_host_needs_to_submit_them() -> None:
    ops = (*[op(Phase.FORWARD, 8)] * 100, *[op(Phase.BACKWARD, 8)] * 200)
    predicted = step_seconds(trace(*ops), GPU)
    assert predicted.forward_seconds == pytest.approx(100 * GPU.launch_seconds + KERNEL_SECONDS, rel=1e-3)
    assert predicted.backward_seconds == pytest.approx(200 * GPU.launch_seconds, rel=1e-3)


def test_on_a_gpu_autograd_and_python_add_to_launches() -> None:
    short = (*[op(Phase.FORWARD, 8)] * 100, *[op(Phase.OPTIMIZER, 8)] * 100)
    predicted = step_seconds(trace(*short), A100)
    assert predicted.forward_seconds == pytest.approx(
        100 * A100.dispatch.forward_seconds + KERNEL_SECONDS, rel=1e-3
    )
    assert predicted.forward_seconds > 2 * predicted.optimizer_seconds


def test_on_a_gpu_launches_after_a_result_that_the_host_reads_are_exposed() -> None:
    """A long op hides the launches that follow, but not those after `nonzero`, whose size the host reads."""
    long_bytes = int(1e-3 * BANDWIDTH)
    short = [op(Phase.FORWARD, 8)] * 20
    hidden, exposed = (
        step_seconds(
            trace(op(Phase.FORWARD, long_bytes), op(Phase.FORWARD, 8, name=name), *short), GPU
        ).total_seconds
        for name in ("aten.op", "aten.nonzero.default")
    )
    assert hidden == pytest.approx(1e-3 + GPU.launch_seconds + 22 * KERNEL_SECONDS, rel=1e-2)
    assert exposed - hidden == pytest.approx(20 * (GPU.launch_seconds - KERNEL_SECONDS), rel=0.05, abs=1e-5)


def test_arithmetic_in_a_type_without_a_rate_is_named() -> None:
    predicted = step_seconds(trace(op(Phase.FORWARD, 8, flops=10**9, dtype="float64")), GPU)
    assert predicted.dtypes_at_fp32_rate == ("float64",)
    assert step_seconds(trace(op(Phase.FORWARD, 8, flops=10**9)), GPU).dtypes_at_fp32_rate == ()


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
def test_recomputing_and_more_micro_batches_never_make_a_step_faster(device: Device) -> None:
    ops = (op(Phase.FORWARD, 10**9), op(Phase.BACKWARD, 2 * 10**9))
    plain = step_seconds(trace(*ops), device).total_seconds
    again = op(Phase.BACKWARD, 10**9, recomputed=True)
    assert step_seconds(trace(*ops, again, recomputed_units=1), device).total_seconds > plain
    assert step_seconds(trace(*ops, accumulation=2), device).total_seconds > plain


LINKED = replace(GPU, host_link_bytes_per_second=1e9)


def copies(sent_bytes: int, between_bytes: int, *, is_waited_for: bool = True) -> list[Op]:
    """A forward that sends bytes, does other work, and waits for the copy."""
    sends = structs.replace(op(Phase.FORWARD, sent_bytes), name=TO_HOST, written_bytes=sent_bytes)
    waits = structs.replace(op(Phase.FORWARD, 0), name="brimful.to_host_done.default")
    between = [op(Phase.FORWARD, between_bytes)]
    return [sends, *between, *([waits] if is_waited_for else []), op(Phase.BACKWARD, 1)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_on_a_gpu_a_copy_costs_what_the_work_beside_it_does_not_hide(accumulation: int) -> None:
    """And what it takes of the memory's bandwidth, which that work lacks."""
    work_bytes = int((0.2 - KERNEL_SECONDS) * BANDWIDTH)
    for sent_bytes, copy_seconds in ((10**8, 0.1), (3 * 10**8, 0.3)):
        seconds = max(0.2, copy_seconds) + sent_bytes / BANDWIDTH
        predicted = step_seconds(trace(*copies(sent_bytes, work_bytes), accumulation=accumulation), LINKED)
        assert predicted.total_seconds == pytest.approx(accumulation * seconds, rel=1e-3)
        assert predicted.forward_seconds == pytest.approx(accumulation * seconds, rel=1e-3)
        never = step_seconds(trace(*copies(sent_bytes, work_bytes, is_waited_for=False)), LINKED)
        assert never.total_seconds == pytest.approx(0.2 + sent_bytes / BANDWIDTH, rel=1e-3)


def test_on_a_cpu_a_copy_is_a_copy() -> None:
    predicted = step_seconds(trace(*copies(10, 5)), CPU)
    assert predicted.forward_seconds == pytest.approx(10 + 10 + 5 + COPY_SECONDS)


def test_on_a_cpu_the_loop_of_a_recurrent_layer_pays_no_python() -> None:
    dispatch = replace(CPU.dispatch, forward_seconds=7.0, backward_seconds=7.0, native_loop_seconds=2.0)
    cpu, gpu = replace(CPU, dispatch=dispatch), replace(GPU, dispatch=dispatch)
    step = trace(op(Phase.FORWARD, 1), op(Phase.BACKWARD, 1))
    for name, seconds in (("GRU", 2 + 2 + 2), ("Linear", 7 + 7 + 2)):
        in_layer = replace(step, module_classes=(("m", name),))
        assert step_seconds(in_layer, cpu).total_seconds == pytest.approx(seconds)
        assert step_seconds(in_layer, gpu).total_seconds == pytest.approx(14, rel=1e-3)


def test_an_empty_step_takes_no_time() -> None:
    assert step_seconds(trace(), GPU) == StepTime(
        forward_seconds=0, backward_seconds=0, recompute_seconds=0, optimizer_seconds=0
    )


def test_saving_some_results_costs_the_host_for_every_op_of_the_unit() -> None:
    """And for no op of another unit."""
    unit = UnitAction(fqn="m", action=Action.SAVE, saved=("op#0",))
    plain = trace(op(Phase.FORWARD, 1), op(Phase.FORWARD, 1), op(Phase.BACKWARD, 1), recomputed_units=1)
    plain = replace(plain, module_classes=(("", "Net"), ("m", "Linear")))
    whole = replace(plain.settings, units=(replace(unit, action=Action.RECOMPUTE, saved=()),))
    some = replace(plain.settings, units=(unit,))
    elsewhere = replace(plain.settings, units=(replace(unit, fqn="n"),))
    base, more, other = (
        step_seconds(replace(plain, settings=settings), CPU) for settings in (whole, some, elsewhere)
    )
    forward, recompute = CPU.dispatch.selective_seconds
    assert more.forward_seconds - base.forward_seconds == pytest.approx(2 * forward)
    assert more.recompute_seconds - base.recompute_seconds == pytest.approx(2 * recompute)
    assert more.total_seconds - base.total_seconds == pytest.approx(saving_seconds(CPU, 2))
    assert other.total_seconds == pytest.approx(base.total_seconds)


def test_nesting_costs_the_host_for_every_forward_that_runs_again() -> None:
    """Beside the region of each unit and the ops."""
    units = tuple(UnitAction(fqn=f"u{i}", action=Action.NEST if i else Action.RECOMPUTE) for i in range(4))
    flat = trace(op(Phase.FORWARD, 1), op(Phase.BACKWARD, 1), recomputed_units=4)
    nested = replace(flat, settings=replace(flat.settings, units=units))
    more = step_seconds(nested, CPU).total_seconds - step_seconds(flat, CPU).total_seconds
    assert more == pytest.approx(3 * NESTED_FORWARD_SECONDS)


def test_every_op_of_the_link_is_known_to_the_cost() -> None:
    """One that is not would be priced as arithmetic of the device."""
    ops = {str(op) for op in vars(host_link).values() if isinstance(op, OpOverload)}
    assert ops == set(LINK_USES)
