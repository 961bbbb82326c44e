"""The text that `print` shows of each result."""

from __future__ import annotations

from functools import singledispatch

from brimful.exports import Export
from brimful.planner import GpuSurvey, Plan, PlanCheck
from brimful.prediction import Estimate
from brimful.report.exports import export_text
from brimful.report.gpus import gpus_text
from brimful.report.measurements import check_text, comparison_text, equivalence_text, measurement_text
from brimful.report.plans import estimate_text, plan_text
from brimful.report.training import summary_text
from brimful.results import Comparison, EquivalenceReport, Measurement, TrainingResult


@singledispatch
def text_of(result: object) -> str:
    """The text of a result, as `str(result)` returns it."""
    raise TypeError(f"brimful.report has no text for a {type(result).__name__}")


text_of.register(Estimate, estimate_text)
text_of.register(Plan, plan_text)
text_of.register(PlanCheck, check_text)
text_of.register(Export, export_text)
text_of.register(GpuSurvey, gpus_text)
text_of.register(Measurement, measurement_text)
text_of.register(Comparison, comparison_text)
text_of.register(EquivalenceReport, equivalence_text)
text_of.register(TrainingResult, summary_text)
