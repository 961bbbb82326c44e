"""Options, solver, joint search → Plan. Never imports torch: what runs a step is handed in."""

from brimful.planning.check import PlanCheck, check_trace
from brimful.planning.coupling import what_splitting_changes
from brimful.planning.estimate import (
    MARGIN_FRACTION,
    Estimate,
    Extremes,
    PhasePeak,
    Verdict,
    estimate_trace,
)
from brimful.planning.gpus import GpuFit, GpuSurvey, survey_gpus
from brimful.planning.ranks import of_one_rank
from brimful.planning.records import Alternative, JobSource, Plan, PlanStatus
from brimful.planning.request import OptimizerChoice, Request
from brimful.planning.search import search
from brimful.planning.sizes import Capture, Estimator
from brimful.planning.units import divide_unit, find_units

__all__ = [
    "MARGIN_FRACTION",
    "Alternative",
    "Capture",
    "Estimate",
    "Estimator",
    "Extremes",
    "GpuFit",
    "GpuSurvey",
    "JobSource",
    "OptimizerChoice",
    "PhasePeak",
    "Plan",
    "PlanCheck",
    "PlanStatus",
    "Request",
    "Verdict",
    "check_trace",
    "divide_unit",
    "estimate_trace",
    "find_units",
    "of_one_rank",
    "search",
    "survey_gpus",
    "what_splitting_changes",
]
