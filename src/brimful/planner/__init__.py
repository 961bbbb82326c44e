"""A request and a capture function → a `Plan`: the fastest way to train within a budget.

It does not import torch. Start reading at `search.search`. Beside it, `check` compares a plan with the model of
today, `gpus` tries a job on every GPU, and `calibrated` multiplies predictions by what training measured.
"""

from brimful.planner.calibrated import search_calibrated
from brimful.planner.check import PlanCheck, check_trace
from brimful.planner.comparison import ComparedTechnique, SameResults, TechniqueComparison, compare_techniques
from brimful.planner.coupling import what_splitting_changes
from brimful.planner.explain.changes import Change
from brimful.planner.explain.notes import MEAN_OVER_SAMPLES_NOTE
from brimful.planner.explain.suggestions import what_an_estimate_lacks
from brimful.planner.gpus import SORTS, GpuFit, GpuSurvey, UsualFit, survey_gpus
from brimful.planner.largest import (
    MOST_STEPS,
    Largest,
    LargestEstimate,
    LargestPlan,
    Limit,
    Tried,
    find_largest,
    tried_estimate,
    tried_plan,
    tried_step,
    tried_without_plan,
)
from brimful.planner.plan import Alternative, JobSource, Plan, PlanStatus, settings_of
from brimful.planner.prices import prices_of
from brimful.planner.request import JobTraits, Request
from brimful.planner.search import least_step, search

__all__ = [
    "MEAN_OVER_SAMPLES_NOTE",
    "MOST_STEPS",
    "SORTS",
    "Alternative",
    "Change",
    "ComparedTechnique",
    "GpuFit",
    "GpuSurvey",
    "JobSource",
    "JobTraits",
    "Largest",
    "LargestEstimate",
    "LargestPlan",
    "Limit",
    "Plan",
    "PlanCheck",
    "PlanStatus",
    "Request",
    "SameResults",
    "TechniqueComparison",
    "Tried",
    "UsualFit",
    "check_trace",
    "compare_techniques",
    "find_largest",
    "least_step",
    "prices_of",
    "search",
    "search_calibrated",
    "settings_of",
    "survey_gpus",
    "tried_estimate",
    "tried_plan",
    "tried_step",
    "tried_without_plan",
    "what_an_estimate_lacks",
    "what_splitting_changes",
]
