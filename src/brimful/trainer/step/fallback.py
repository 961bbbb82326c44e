"""Finds settings that take less memory, after a step ran out of it."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from brimful.batches import why_not_split
from brimful.capture import CautiousCapture, capture_step
from brimful.devices import Device
from brimful.errors import BrimfulError, OutOfMemoryError
from brimful.execution.longest_batch import with_longest_batch
from brimful.execution.retries import smaller_micro_batch
from brimful.job import Job
from brimful.options import PlanOptions
from brimful.planner import Plan, Request, search
from brimful.prediction import estimate_trace
from brimful.profiling import device_record
from brimful.requests import job_traits
from brimful.settings import Compile, Settings
from brimful.trace import Trace, per_rank_trace

FALLBACK_FRACTION = 0.9
"""The memory to plan for, as a fraction of that of the settings that ran out. On public GPU runs nine in ten
predictions are within 6.7 % (benchmarks/results/gpu_truth.json): a prediction of a tenth less means less."""


class MemoryFallback:
    """Finds settings that take less memory for the same global batch.

    Smaller settings keep to the options that the plan was made with; `plan` is None without one.
    """

    def __init__(self, job: Job, plan: Plan | None, device: torch.device) -> None:
        self._job = replace(job, loop=None)
        self._plan = plan
        self._asked = PlanOptions() if plan is None else plan.asked
        self._device = device
        self._least_bytes: int | None = None
        """Smallest predicted peak of the settings that ran out; the next plan must take less. Otherwise a
        smaller micro-batch with a larger prediction could lead back to them."""

    def __call__(self, settings: Settings) -> Settings:
        """Find smaller settings: plan again, else reshard after forward, else reduce the micro-batch.

        The plan is for nine tenths of the predicted memory of `settings`, with which memory ran out, within
        what the user pinned. The next smaller micro-batch is taken whether the micro-batch is pinned or not.
        Raises OutOfMemoryError if no way is left.
        """
        reasons = []
        for way in (self._replanned, self._resharding, self._smaller_micro_batch):
            try:
                return way(settings)
            except BrimfulError as error:
                reasons.append(str(error))
        raise OutOfMemoryError(
            "\n  ".join((f"nothing that takes less than {settings.describe()} was found:", *reasons))
        )

    def _replanned(self, settings: Settings) -> Settings:
        device = device_record(self._device)
        longest = with_longest_batch(replace(self._job, data=None), settings.rank_batch_size)
        cautious = CautiousCapture(longest.job, device)

        @functools.cache
        def capture(how: Settings, steps: int = 1) -> Trace:
            return cautious(how, steps)

        taken = estimate_trace(per_rank_trace(capture(settings, 2)), device).predicted_peak_reserved_bytes
        taken = self._least_bytes = taken if self._least_bytes is None else min(taken, self._least_bytes)
        request = self._request(settings, device, int(taken * FALLBACK_FRACTION) + device.context_bytes)
        return search(capture, request).settings

    def _request(self, settings: Settings, device: Device, budget_bytes: int) -> Request:
        """A request that continues the run: what would change the training is as it is in `settings`."""
        is_pinned = settings.micro_batch_size == self._asked.micro_batch_size  # until nothing else is left
        has_plan = self._plan is not None
        return Request(
            job=job_traits(self._job, settings.rank_batch_size),
            device=device,
            budget_bytes=budget_bytes,
            global_batch_size=settings.global_batch_size,
            world_size=settings.world_size,
            num_nodes=settings.num_nodes,
            implementations={settings.optimizer: settings.optimizer_implementation},
            offload_host_bytes=self._plan.predicted_host_bytes if self._plan is not None else 0,
            asked=replace(
                self._asked,
                max_exceedance=1.0,  # the budget is below what ran out, whatever the device has
                micro_batch_size=self._asked.micro_batch_size if is_pinned else None,
                precision=str(settings.precision),
                optimizer=settings.optimizer,
                allow_optimizers=(),
                chunked_loss=self._asked.chunked_loss if has_plan else settings.chunked_loss is not None,
                expandable_segments=settings.expandable_segments,
                split_batch_norm=self._asked.split_batch_norm or settings.gradient_accumulation_steps > 1,
                optimizer_in_backward=settings.optimizer_in_backward,
                offload_optimizer=settings.offload_optimizer,
                prefetch_inputs=settings.prefetch_inputs,
                own_checkpointing="keep" if settings.own_checkpointing else "off",
                memory_format=str(settings.memory_format or "preserve"),
                compile=str(Compile.UNITS if settings.compile is Compile.MODEL else settings.compile),
                parallelism=str(settings.parallelism),
                param_dtype=settings.param_dtype,
                offload_parameters=settings.offload_parameters,
            ),
        )

    def _resharding(self, settings: Settings) -> Settings:
        if self._asked.reshard_after_forward is not None:
            raise OutOfMemoryError("reshard_after_forward is pinned (--reshard, --no-reshard).")
        if settings.reshard_after_forward:
            raise OutOfMemoryError("no parameters are held gathered between forward and backward.")
        return replace(settings, reshard_after_forward=True)

    def _smaller_micro_batch(self, settings: Settings) -> Settings:
        smaller = smaller_micro_batch(settings)
        if settings.gradient_accumulation_steps == 1:  # otherwise the run splits batches already
            reason = why_not_split(self._job, settings.rank_batch_size)
            if reason is not None:
                raise OutOfMemoryError(f"the batch was not split: {reason}")
        if settings.gradient_accumulation_steps == 1 and not self._asked.split_batch_norm:
            alone = Settings(micro_batch_size=settings.micro_batch_size, precision=settings.precision)
            coupled = capture_step(self._job, alone, device_record(self._device)).batch_coupled_modules
            if coupled:
                raise OutOfMemoryError(
                    f"the batch was not split: {coupled[0]} computes with the whole of it, as BatchNorm does, "
                    "or each forward changes it for the next one."
                )
        return smaller
