"""One job on one device, and what each way to train it comes to: the same captures and optimizer for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from brimful.capture import capture_step
from brimful.devices import Device
from brimful.errors import InfeasibleError
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.options import PlanOptions
from brimful.planner import JobTraits, Request, search
from brimful.prediction import estimate_trace
from brimful.prediction.estimator import RoughlyScaledTraces
from brimful.settings import Action, OptimizerImplementation, Precision, Settings, UnitAction
from brimful.trace import Trace, find_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a way to train comes to, by a capture with it applied."""

    settings: Settings
    peak_device_bytes: int
    peak_allocated_bytes: int
    step_seconds: float


class Bench:
    """One job on one device, with everything that has been captured of it.

    Args:
        job: What is trained.
        device: Where.
        global_batch_size: Samples in a step.
        precision: Of all ways.
        splits_batch: False trains the whole batch at once, in all ways.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        global_batch_size: int,
        precision: Precision = Precision.FP32,
        *,
        splits_batch: bool = True,
    ) -> None:
        self.job = job
        self.device = device
        self.request = Request(
            job=JobTraits(name=job.name),
            device=device,
            budget_bytes=0,
            global_batch_size=global_batch_size,
            implementations={None: OptimizerImplementation.FUSED},
            asked=PlanOptions(
                micro_batch_size=None if splits_batch else global_batch_size,
                precision=str(precision),
                effort="max",
                max_exceedance=1.0,
                offload_optimizer=False,
            ),
        )
        self.capture = cache(lambda settings, steps=1: capture_step(job, settings, device, steps=steps))
        self.plain = replace(
            self.request.baseline_settings(), optimizer_implementation=OptimizerImplementation.FUSED
        )
        whole = self.capture(self.plain)
        self.units = find_units(whole)
        self._scaled = RoughlyScaledTraces(self.capture)
        is_whole = self.request.keeps_batch_whole(whole)
        self.sizes = (global_batch_size,) if is_whole else self.request.micro_batch_sizes()

    def plain_outcome(self) -> Outcome:
        """Training without a plan."""
        return self.outcome(self.plain)

    def plan(self, budget_bytes: int, *, host_bytes: int = 0) -> Outcome | None:
        """Our plan; None if nothing fits.

        Args:
            budget_bytes: Of the device.
            host_bytes: Of the host's memory that it may use, for saved tensors and the optimizer's state.
        """
        on_host = None if host_bytes else False
        try:
            return self.searched(
                budget_bytes,
                asked=replace(self.request.asked, offload_optimizer=on_host),
                offload_host_bytes=host_bytes,
            )
        except InfeasibleError:
            return None

    def searched(self, budget_bytes: int, **asked: Any) -> Outcome:
        """Our plan.

        Args:
            budget_bytes: Of the device.
            asked: Other fields of the request.

        Raises:
            InfeasibleError: Nothing fits.
        """
        plan = search(self.capture, replace(self.request, budget_bytes=budget_bytes, **asked))
        return Outcome(
            settings=plan.settings,
            peak_device_bytes=plan.predicted_peak_device_bytes,
            peak_allocated_bytes=plan.predicted_peak_allocated_bytes,
            step_seconds=plan.predicted_step_seconds,
        )

    def all_units(self, action: Action) -> tuple[UnitAction, ...]:
        return tuple(UnitAction(fqn=unit, action=action) for unit in self.units)

    def recomputed(self) -> Trace:
        """The step with every unit recomputed, at a small size."""
        size = self.sizes[0] if len(self.sizes) == 1 else 5
        steps = 1 if len(self.sizes) == 1 else 2
        settings = replace(self.plain, micro_batch_size=size, gradient_accumulation_steps=steps)
        return self.capture(replace(settings, units=self.all_units(Action.RECOMPUTE)))

    def outcome(self, settings: Settings) -> Outcome:
        """What a capture of some settings says."""
        captured = self.capture(replace(settings, expandable_segments=False))
        trace = replace(captured, settings=settings).with_last_step_again()
        estimate = estimate_trace(trace, self.device, capacity_bytes=1 << 62)
        return Outcome(
            settings=settings,
            peak_device_bytes=estimate.predicted_peak_device_bytes,
            peak_allocated_bytes=estimate.predicted_peak_allocated_bytes,
            step_seconds=estimate.predicted_step_seconds,
        )

    def largest_that_fits(self, actions: tuple[UnitAction, ...], budget_bytes: int) -> Outcome:
        """Actions with the largest micro-batch whose capture is within the budget; the smallest if none is.

        The allocator's segments may grow, as they may for a plan, where that takes less.
        """
        for size in self.sizes:
            settings = replace(self.plain.with_micro_batch_size(size), units=actions)
            if size != self.sizes[-1] and self._surely_too_much(settings, budget_bytes):
                continue
            outcome = self.outcome(settings)
            if outcome.peak_device_bytes > budget_bytes and self.device.kind == "cuda":
                outcome = self.outcome(replace(settings, expandable_segments=True))
            if outcome.peak_device_bytes <= budget_bytes:
                break
        return outcome

    def _surely_too_much(self, settings: Settings, budget_bytes: int) -> bool:
        """By scaling, which saves a capture; what is near the budget is captured."""
        peak = predict_memory(self._scaled.at(settings)).peak_allocated_bytes + self.device.context_bytes
        return peak > 1.05 * budget_bytes


def told(way: Outcome | None, plain: Outcome, budget_bytes: int) -> dict[str, Any] | None:
    """A way as the JSON tells it: None where there is none to tell."""
    if way is None:
        return None
    return {
        "settings": way.settings.describe(),
        "peak_device_bytes": way.peak_device_bytes,
        "peak_allocated_bytes": way.peak_allocated_bytes,
        "within_budget": way.peak_device_bytes <= budget_bytes,
        "step_seconds": way.step_seconds,
        "overhead": round(way.step_seconds / plain.step_seconds - 1, 4),
    }
