"""Plans: made, and checked against the job as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from brimful.capture import CautiousCapture
from brimful.capture.cache import CachedCapture
from brimful.devices import Device
from brimful.errors import UsageError
from brimful.execution.setup import is_of_this_machine
from brimful.job import Job
from brimful.options import PlanOptions
from brimful.planner import (
    Plan,
    PlanCheck,
    check_trace,
    search,
)
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.quantities import parse_bytes
from brimful.requests import (
    PrecisionLike,
    budget_bytes,
    request_of,
)
from brimful.settings import (
    Action,
    OptimizerImplementation,
    Parallelism,
    Precision,
    check_count,
)
from brimful.status import busy


@busy("planning")
def plan(
    job: Job,
    device: DeviceLike = "auto",
    *,
    global_batch_size: int,
    budget: str | float | None = None,
    precision: PrecisionLike | Sequence[PrecisionLike] = Precision.FP32,
    micro_batch_size: int | None = None,
    recompute: str | Action | None = None,
    optimizer: str | None = None,
    optimizer_implementation: str | OptimizerImplementation | None = None,
    allow_optimizers: str | Sequence[str] = (),
    chunked_loss: bool = True,
    expandable_segments: bool = True,
    offload_activations: bool = True,
    host_memory: str | float | None = None,
    split_batch_norm: bool = False,
    optimizer_in_backward: bool = False,
    offload_optimizer: bool | None = None,
    prefetch_inputs: bool = False,
    own_checkpointing: str = "keep",
    world_size: int = 1,
    num_nodes: int = 1,
    network: str | float | None = None,
    parallelism: str | Parallelism = "auto",
    reshard_after_forward: bool | None = None,
    param_dtype: str | None = None,
    offload_parameters: bool = False,
) -> Plan:
    """Find the fastest way to train a global batch inside a memory budget.

    What is pinned stays; what is not is chosen. By default nothing is chosen that changes the mathematics: the
    precision and the optimizer are the job's, and a batch is not split where BatchNorm couples its samples or a
    layer changes its buffers in each forward.

    Args:
        job: What is trained.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, or a `Device`.
        global_batch_size: Samples per optimizer step.
        budget: A size ("11GiB"), a share of what plain training would take ("50%"), or None for what the device
            has, on a GPU less a margin of 5 % for what the prediction may miss. The CUDA context counts. Ranks
            on the processors of one machine have equal parts of its memory.
        precision: One, several to choose from, or "auto" for all that the device has; the first is plain's.
        micro_batch_size: Pins the micro-batch; it divides the global batch.
        recompute: "all" or "none" pins every unit's action.
        optimizer: Replaces the job's own.
        optimizer_implementation: Pins "for-loop", "foreach" or "fused". None takes the fused kernel where the
            optimizer has one and its user chose none: the same formula, rounded in another order.
        allow_optimizers: Others that may take the place of the job's own, which changes the mathematics:
            "adafactor", "adamw8bit", "adamw4bit".
        chunked_loss: Permit computing a cross-entropy over a large vocabulary a part of the tokens at a time:
            the same sums in another order.
        expandable_segments: Permit telling PyTorch's CUDA allocator to grow its segments, which leaves less
            memory unused.
        offload_activations: Permit offloading activations to host memory; the same mathematics. No effect on a
            CPU, whose memory is the host's.
        host_memory: What that and an optimizer on the host may take there: a size ("64GiB"). Default: half of
            this machine's memory if the device is in it, half of the GPU's memory if it is only named.
        split_batch_norm: Permit splitting a batch that BatchNorm couples, or a layer that changes its
            buffers in each forward, such as spectral norm.
        optimizer_in_backward: Update each parameter in backward and free its gradient.
            The batch is then whole, nothing is clipped, and where memory runs out in backward,
            training resumes from the last save.
        offload_optimizer: Pins whether the optimizer's state is in the host's memory and the update is computed
            there, in the host's rounding. None lets the plan choose, for one GPU and where offloading is
            permitted.
        prefetch_inputs: Copy the next micro-batch of a step to the GPU while one is computed, for the memory of
            one more; of use from pinned memory. Not for losses that compare samples.
        own_checkpointing: "off" turns off the model's own activation checkpointing, such as that of
            `gradient_checkpointing_enable()`, while the plan is applied, so that the plan alone decides what is
            recomputed. "keep" leaves it on.
        world_size: Devices of this kind that divide the global batch evenly and train together.
        num_nodes: Machines that the ranks are divided among.
        network: What goes between two machines in a second, one way, "12.5GB"; None takes 100 Gbit/s.
        parallelism: "ddp", where each rank has the whole model, "fsdp2", where each has a part of every
            parameter, gradient and optimizer state, or "auto" for the faster of these that fits. "zero1",
            "zero2" and "zero3" are DeepSpeed's, which divides optimizer state, gradients too, parameters too.
        reshard_after_forward: Under FSDP2, pins whether gathered parameters are let go of between forward and
            backward; None takes the faster that fits. The mathematics are the same.
        param_dtype: Under FSDP2 and bf16, "bfloat16" gathers parameters in half the bytes, which rounds more
            than autocast does: norms' and embeddings' parameters, and what comes into each unit.
        offload_parameters: Under FSDP2, keep each rank's shards of parameters, gradients and optimizer state in
            host memory and update them there (torch's `CPUOffloadPolicy`).

    Returns:
        The plan, replayed within the budget.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: Nothing permitted fits: by how much, because of what, and what would.
        CaptureError: The step cannot be run on fake tensors.
    """
    check_count("global_batch_size", global_batch_size)
    options = PlanOptions.of(
        budget=budget,
        precision=precision,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        optimizer=optimizer,
        optimizer_implementation=optimizer_implementation,
        allow_optimizers=allow_optimizers,
        chunked_loss=chunked_loss,
        expandable_segments=expandable_segments,
        offload_activations=offload_activations,
        host_memory=host_memory,
        split_batch_norm=split_batch_norm,
        optimizer_in_backward=optimizer_in_backward,
        offload_optimizer=offload_optimizer,
        prefetch_inputs=prefetch_inputs,
        own_checkpointing=own_checkpointing,
        parallelism=parallelism,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        offload_parameters=offload_parameters,
    )
    target = resolve_device(device)
    if network is not None:
        target = replace(target, network_bytes_per_second=parse_bytes(network))
    if global_batch_size < 1:
        raise UsageError(f"global_batch_size is {global_batch_size}; it must be at least 1.")
    request = request_of(
        job,
        target,
        options,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        is_here=is_of_this_machine(device),
    )
    with CachedCapture(job, target) as capture:
        request = replace(request, budget_bytes=budget_bytes(options.budget, capture, request))
        return replace(search(capture, request), asked=options)


@busy("checking the plan")
def check_plan(
    job: Job, plan: Plan, device: str | Device | None = None, *, budget: str | float | None = None
) -> PlanCheck:
    """Predict a plan's settings anew, to see whether the job has outgrown it.

    Args:
        job: As it is now.
        plan: As it was made, perhaps for an earlier version of the job.
        device: Where it is to run; None takes the device that the plan was made for.
        budget: A size ("11GiB"); None takes that of the plan.

    Returns:
        What is predicted now beside what was predicted then.

    Raises:
        UsageError: An argument is invalid, or the plan is for another kind of device.
        UnknownNameError: The plan names a unit that the model does not have, or its device is not in the table.
        CaptureError: The step cannot be run on fake tensors.
    """
    planned_for = plan.device if plan.device_kind == "cuda" else "cpu"
    target = resolve_device(planned_for if device is None else device)
    if target.kind != plan.device_kind:
        raise UsageError(
            f"the plan is for {plan.device} ({plan.device_kind}), and {target.name} is a {target.kind} device."
        )
    trace = CautiousCapture(replace(job, loop=None), target)(plan.settings)
    budget_bytes = plan.budget_bytes if budget is None else parse_bytes(budget)
    return check_trace(trace, plan, target, budget_bytes)
