"""Options, solver, joint search → Plan. Never imports torch: what runs a step is handed in."""

from brimful.planning.estimate import MARGIN_FRACTION, Estimate, Verdict, estimate_trace
from brimful.planning.records import Alternative, Plan, PlanStatus
from brimful.planning.search import Capture, Request, search
from brimful.planning.units import find_units

__all__ = [
    "MARGIN_FRACTION",
    "Alternative",
    "Capture",
    "Estimate",
    "Plan",
    "PlanStatus",
    "Request",
    "Verdict",
    "estimate_trace",
    "find_units",
    "search",
]
