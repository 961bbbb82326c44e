"""Results → text, HTML and JSON documents for users. Nothing here computes results."""

from brimful.report.calibration import calibration_document, calibration_text
from brimful.report.comparisons import comparison_document, comparison_markdown, plot_comparison
from brimful.report.documents import error_document, estimate_document, gpus_document, whole_run_document
from brimful.report.generation import generation_document
from brimful.report.largest import largest_estimate_document, largest_plan_document
from brimful.report.plan_differences import differences_document, differences_report
from brimful.report.studies import study_document
from brimful.report.text import html_of, text_of
from brimful.report.training import training_document, training_text

__all__ = [
    "calibration_document",
    "calibration_text",
    "comparison_document",
    "comparison_markdown",
    "differences_document",
    "differences_report",
    "error_document",
    "estimate_document",
    "generation_document",
    "gpus_document",
    "html_of",
    "largest_estimate_document",
    "largest_plan_document",
    "plot_comparison",
    "study_document",
    "text_of",
    "training_document",
    "training_text",
    "whole_run_document",
]
