"""A request and a capture function → a `Plan`: the fastest way to train within a budget.

It does not import torch. The files in the order in which a plan passes them; start reading at `search.search`:

1. `request`: what was asked (`Request`), and the micro-batch sizes it permits.
2. `baseline`: training without a plan, captured.
3. `search_space`, `family`: the candidates, each a micro-batch size, a precision and so on (`candidate`).
4. `problem/`: two captures → bytes and seconds of keeping, recomputing, saving or offloading each unit.
5. `solvers/`: the exact solvers, `chain` for one action per unit and `segments` for nested segments.
6. `budget_grid`: a candidate, solved at a grid of budgets. `replays`: what the allocator reserves for a choice.
   `candidate_search`: the fastest choice of one candidate within a budget, captured as it would run.
7. `fastest`: the fastest choice of all candidates, which is the plan.
8. `notes`, `alternatives`, `infeasible`: what the reader of a plan should know.
9. `plan`: the record and its file. `check` compares a plan with the model of today; `gpus` plans on every GPU;
   `calibrated` multiplies predictions by what an earlier run of the job measured.
"""

from brimful.planner.calibrated import (
    infeasible_calibrated,
    plan_calibrated,
    request_calibrated,
)
from brimful.planner.check import PlanCheck, check_trace
from brimful.planner.coupling import what_splitting_changes
from brimful.planner.gpus import SORTS, GpuFit, GpuSurvey, UsualFit, survey_gpus
from brimful.planner.notes import MEAN_OVER_SAMPLES_NOTE
from brimful.planner.plan import Alternative, JobSource, Plan, PlanStatus, settings_of
from brimful.planner.prices import prices_of
from brimful.planner.replays import estimate_of
from brimful.planner.request import JobTraits, Request
from brimful.planner.search import search

__all__ = [
    "MEAN_OVER_SAMPLES_NOTE",
    "SORTS",
    "Alternative",
    "GpuFit",
    "GpuSurvey",
    "JobSource",
    "JobTraits",
    "Plan",
    "PlanCheck",
    "PlanStatus",
    "Request",
    "UsualFit",
    "check_trace",
    "estimate_of",
    "infeasible_calibrated",
    "plan_calibrated",
    "prices_of",
    "request_calibrated",
    "search",
    "settings_of",
    "survey_gpus",
    "what_splitting_changes",
]
