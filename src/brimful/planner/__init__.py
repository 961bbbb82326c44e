"""A request and a capture function → a `Plan`: the fastest way to train within a budget.

It does not import torch. The files in the order in which a plan passes them; start reading at `search.search`:

1. `request`: what was asked (`Request`), and the micro-batch sizes it permits.
2. `candidate`: one micro-batch size and precision, with its units and their options; `ranking` orders
   candidates by a lower bound of their step time.
3. `problem/`: two captures → bytes and seconds of keeping, recomputing, saving or offloading each unit.
4. `solvers/`: the exact solvers, `chain` for one action per unit and `segments` for nested segments.
5. `search`: each solution is captured again as it would run; the fastest that fits is the plan.
6. `notes`, `alternatives`, `infeasible`: what the reader of a plan should know.
7. `plan`: the record and its file. `check` compares a plan with the model of today; `gpus` plans on every GPU.
"""

from brimful.planner.check import PlanCheck, check_trace
from brimful.planner.coupling import what_splitting_changes
from brimful.planner.gpus import GpuFit, GpuSurvey, survey_gpus
from brimful.planner.plan import Alternative, JobSource, Plan, PlanStatus
from brimful.planner.request import OptimizerChoice, Request
from brimful.planner.search import search

__all__ = [
    "Alternative",
    "GpuFit",
    "GpuSurvey",
    "JobSource",
    "OptimizerChoice",
    "Plan",
    "PlanCheck",
    "PlanStatus",
    "Request",
    "check_trace",
    "search",
    "survey_gpus",
    "what_splitting_changes",
]
