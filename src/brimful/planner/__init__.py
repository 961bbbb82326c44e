"""A request and a capture function → a `Plan`: the fastest way to train within a budget.

It does not import torch. The files in the order in which a plan passes them; start reading at `search.search`:

1. `request`: what was asked (`Request`), and the micro-batch sizes it permits.
2. `candidates`, `family`: the candidates, each a micro-batch size, a precision and so on, from two captures.
3. `problem/`: two captures → bytes and seconds of keeping, recomputing, saving or offloading each unit.
4. `solutions`: the problem solved at a grid of budgets by the exact `solvers/`, `chain` for one action per unit
   and `segments` for nested segments.
5. `candidate`: the fastest choice of one candidate within a budget, by what the allocator reserves for it:
   replayed, then captured as it would run.
6. `fastest`: the fastest choice of all candidates; `simplest`: the simplest that is as fast, which is the plan.
7. `explain/`: notes, alternatives, and why nothing fits.
8. `plan`: the record and its file. `check` compares a plan with the model of today; `gpus` plans on every GPU;
   `calibrated` multiplies predictions by what an earlier run of the job measured.
"""

from brimful.planner.calibrated import search_calibrated
from brimful.planner.candidate import estimate_of
from brimful.planner.check import PlanCheck, check_trace
from brimful.planner.coupling import what_splitting_changes
from brimful.planner.explain.notes import MEAN_OVER_SAMPLES_NOTE
from brimful.planner.gpus import SORTS, GpuFit, GpuSurvey, UsualFit, survey_gpus
from brimful.planner.plan import Alternative, JobSource, Plan, PlanStatus, settings_of
from brimful.planner.prices import prices_of
from brimful.planner.request import JobTraits, OptimizerChoice, Permits, Pins, RankOptions, Request
from brimful.planner.search import search

__all__ = [
    "MEAN_OVER_SAMPLES_NOTE",
    "SORTS",
    "Alternative",
    "GpuFit",
    "GpuSurvey",
    "JobSource",
    "JobTraits",
    "OptimizerChoice",
    "Permits",
    "Pins",
    "Plan",
    "PlanCheck",
    "PlanStatus",
    "RankOptions",
    "Request",
    "UsualFit",
    "check_trace",
    "estimate_of",
    "prices_of",
    "search",
    "search_calibrated",
    "settings_of",
    "survey_gpus",
    "what_splitting_changes",
]
