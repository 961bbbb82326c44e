"""What `print` and notebooks show of each result, and its JSON."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from brimful.codec import to_json_document
from brimful.exports import Export
from brimful.planner import (
    GpuSurvey,
    LargestEstimate,
    LargestPlan,
    Plan,
    PlanCheck,
    TechniqueComparison,
)
from brimful.prediction import Estimate, GenerationEstimate
from brimful.report.comparisons import comparison_document, comparison_report
from brimful.report.documents import gpus_document
from brimful.report.generation import generation_report
from brimful.report.gpus import gpus_text
from brimful.report.html import as_html, preformatted
from brimful.report.largest import (
    largest_estimate_document,
    largest_estimate_text,
    largest_plan_document,
    largest_plan_text,
)
from brimful.report.layout import Report, as_text
from brimful.report.measurements import check_report, comparison_text, equivalence_report, measurement_report
from brimful.report.plans import estimate_report, export_report, plan_report
from brimful.report.studies import study_document, study_report
from brimful.report.training import summary_report
from brimful.report.whole_run import whole_run_report
from brimful.results import Comparison, EquivalenceReport, Measurement, StudyResult, TrainingResult, WholeRun


def text_of(result: object) -> str:
    """The text of a result, as `str(result)` returns it."""
    shown = _shown(result)
    return as_text(shown) if isinstance(shown, Report) else shown


def html_of(result: object) -> str:
    """The HTML of a result, as notebooks show it: the words and numbers of its text."""
    shown = _shown(result)
    return as_html(shown) if isinstance(shown, Report) else preformatted(shown)


@singledispatch
def _shown(result: object) -> Report | str:
    """A report, or the text of what has its own layout."""
    raise TypeError(f"brimful.report has no text for a {type(result).__name__}")


_shown.register(Estimate, estimate_report)
_shown.register(GenerationEstimate, generation_report)
_shown.register(Plan, plan_report)
_shown.register(PlanCheck, check_report)
_shown.register(Export, export_report)
_shown.register(GpuSurvey, gpus_text)
_shown.register(TechniqueComparison, comparison_report)
_shown.register(LargestEstimate, largest_estimate_text)
_shown.register(LargestPlan, largest_plan_text)
_shown.register(Measurement, measurement_report)
_shown.register(Comparison, comparison_text)
_shown.register(EquivalenceReport, equivalence_report)
_shown.register(StudyResult, study_report)
_shown.register(TrainingResult, summary_report)
_shown.register(WholeRun, whole_run_report)


@singledispatch
def document_of(result: Any) -> dict[str, Any]:
    """The JSON of a result, as `result.to_json()` returns it."""
    return to_json_document(result)


document_of.register(GpuSurvey, gpus_document)
document_of.register(TechniqueComparison, comparison_document)
document_of.register(LargestEstimate, largest_estimate_document)
document_of.register(LargestPlan, largest_plan_document)
document_of.register(StudyResult, study_document)
