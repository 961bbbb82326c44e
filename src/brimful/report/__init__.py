"""Results → text, HTML and JSON documents for users. Nothing here computes results."""

from brimful.report.calibration import calibration_document, calibration_text
from brimful.report.comparisons import comparison_markdown, plot_comparison
from brimful.report.documents import error_document, whole_run_document
from brimful.report.plan_differences import differences_document, differences_report
from brimful.report.text import document_of, html_of, text_of
from brimful.report.training import training_document, training_text

__all__ = [
    "calibration_document",
    "calibration_text",
    "comparison_markdown",
    "differences_document",
    "differences_report",
    "document_of",
    "error_document",
    "html_of",
    "plot_comparison",
    "text_of",
    "training_document",
    "training_text",
    "whole_run_document",
]
