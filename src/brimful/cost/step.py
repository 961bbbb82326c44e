"""The time of one optimizer step, from its trace."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.cost.regions import region_seconds
from brimful.cost.roofline import Roofline
from brimful.hardware import Device
from brimful.trace import Phase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step, all its micro-batches included."""

    forward_seconds: float
    backward_seconds: float
    """Without recomputation."""
    recompute_seconds: float
    """Ops that run a second time in backward, and the work in Python around each recomputed region."""
    optimizer_seconds: float
    dtypes_at_fp32_rate: tuple[str, ...] = ()
    """Types whose arithmetic the device has no known rate for; priced as float32, which may be far off."""

    @property
    def total_seconds(self) -> float:
        """The whole step."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds + self.optimizer_seconds


def step_seconds(trace: Trace, device: Device) -> StepTime:
    """Predicted time of a steady step: the last one captured.

    Its last captured micro-batch stands for all that were not captured, up to
    `settings.gradient_accumulation_steps`.

    Args:
        trace: What a step does. Its ops follow the decisions of `trace.device_kind`.
        device: Where it is to run.

    Returns:
        Seconds by phase, and the types whose rate was not known.
    """
    roofline = Roofline(device, trace.settings.precision)
    last_step = trace.captured_steps - 1
    last_micro_batch = trace.captured_micro_batches - 1
    last_weight = max(trace.settings.gradient_accumulation_steps - last_micro_batch, 1)

    # Plain accumulators: a real trace has tens of thousands of ops.
    forward = backward = recompute = optimizer = launched = 0.0
    for op in trace.ops:
        if op.step != last_step:
            continue
        phase = op.phase
        seconds = roofline.op_seconds(op)
        weight = last_weight if op.micro_batch == last_micro_batch and phase is not Phase.OPTIMIZER else 1
        if op.recomputed:
            recompute += seconds * weight
        elif phase is Phase.FORWARD:
            forward += seconds * weight
        elif phase is Phase.BACKWARD:
            backward += seconds * weight
        elif phase is Phase.OPTIMIZER:
            optimizer += seconds
        else:
            continue
        launched += device.launch_seconds * weight

    busy = forward + backward + recompute + optimizer
    recompute += _exposed_region_seconds(trace, device, host_lead_seconds=busy - launched)
    return StepTime(
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=recompute,
        optimizer_seconds=optimizer,
        dtypes_at_fp32_rate=roofline.dtypes_at_fp32_rate,
    )


def _exposed_region_seconds(trace: Trace, device: Device, *, host_lead_seconds: float) -> float:
    """Σ regions · region_seconds, on CUDA less what the host is ahead of the GPU.

    The host's lead is Σ (op seconds − launch seconds): the time it waits for kernels and can spend elsewhere.
    """
    regions = len(trace.settings.recomputed) * trace.settings.gradient_accumulation_steps
    host_seconds = regions * region_seconds(device)
    return max(host_seconds - host_lead_seconds, 0.0) if device.kind == "cuda" else host_seconds
