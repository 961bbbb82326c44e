"""The public functions: the one place where the stages are wired.

    Job ─ capture ─▶ Trace ─ memory, cost ─▶ Estimate
                       └──── planner ──────▶ Plan ─ transforms ─▶ nn.Module ─ trainer ─▶ weights, report

Every function takes a `Job` and a device; the classes are what some of them return. Nothing is computed here;
each function hands the output of one stage to the next. Start reading at `plans.plan`.
"""

from brimful.api.comparisons import check_is_here, compare, measured_comparison
from brimful.api.estimates import capture_trace, estimate, gpus
from brimful.api.exports import export
from brimful.api.generation import estimate_generation
from brimful.api.largest import largest, largest_micro_batch, largest_plan
from brimful.api.plans import check_plan, plan
from brimful.api.runs import apply, fit, measure, prepare, verify
from brimful.execution.in_force import Prepared
from brimful.execution.planned_step import PlannedStep
from brimful.execution.step import StepOutcome
from brimful.exports import Export
from brimful.prediction import Estimate
from brimful.profiling.named_device import calibrate

__all__ = [
    "Estimate",
    "Export",
    "PlannedStep",
    "Prepared",
    "StepOutcome",
    "apply",
    "calibrate",
    "capture_trace",
    "check_is_here",
    "check_plan",
    "compare",
    "estimate",
    "estimate_generation",
    "export",
    "fit",
    "gpus",
    "largest",
    "largest_micro_batch",
    "largest_plan",
    "measure",
    "measured_comparison",
    "plan",
    "prepare",
    "verify",
]
