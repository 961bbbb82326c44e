"""The planner's request for other settings while a run trains: what would change the training is pinned."""

from __future__ import annotations

from brimful.devices import Device
from brimful.job import Job
from brimful.options import RECOMPUTE_ACTIONS, PlanOptions
from brimful.planner import Permits, Pins, Plan, RankOptions, Request
from brimful.requests import job_traits, prefers_simplest
from brimful.settings import Settings


def request_in_training(
    job: Job,
    plan: Plan | None,
    settings: Settings,
    device: Device,
    *,
    budget_bytes: int,
    micro_batch_size: int | None,
    splits_coupled_batches: bool,
    exceedance: float,
) -> Request:
    """A request for settings that continue a run: same global batch, precision, optimizer and memory format.

    Args:
        job: The job in training.
        plan: The plan; its options are kept. None without a plan.
        settings: Those in force.
        device: The device that trains.
        budget_bytes: Permitted on the device, CUDA context included.
        micro_batch_size: Pins the micro-batch; None lets the plan choose.
        splits_coupled_batches: Whether a batch may be split although layers couple its samples.
        exceedance: Largest probability of exceeding the budget.

    Returns:
        The request.
    """
    asked = PlanOptions() if plan is None else plan.asked
    return Request(
        job=job_traits(job, settings.rank_batch_size),
        device=device,
        budget_bytes=budget_bytes,
        global_batch_size=settings.global_batch_size,
        pins=Pins(
            micro_batch_size=micro_batch_size,
            recompute=RECOMPUTE_ACTIONS.get(asked.recompute),
            optimizer=settings.optimizer,
            optimizer_implementation=settings.optimizer_implementation,
            optimizer_in_backward=settings.optimizer_in_backward,
            offload_optimizer=settings.offload_optimizer,
            prefetch_inputs=settings.prefetch_inputs,
            own_checkpointing=settings.own_checkpointing,
        ),
        permits=Permits(
            precisions=(settings.precision,),
            chunked_loss=asked.chunked_loss if plan is not None else settings.chunked_loss is not None,
            expandable_segments=settings.expandable_segments,
            offload_host_bytes=0 if plan is None else plan.predicted_host_bytes,
            memory_formats=(settings.memory_format,),
            splits_coupled_batches=splits_coupled_batches,
            prefers_simplest=prefers_simplest(asked.effort),
            exceedance=exceedance,
        ),
        ranks=RankOptions(
            world_size=settings.world_size,
            num_nodes=settings.num_nodes,
            parallelisms=(settings.parallelism,),
            reshard_after_forward=asked.reshard_after_forward,
            param_dtype=settings.param_dtype,
            offload_parameters=settings.offload_parameters,
        ),
    )
