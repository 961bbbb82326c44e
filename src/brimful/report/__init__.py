"""Results → text, HTML and JSON documents for users. Nothing here computes results."""

from brimful.report.calibration import calibration_document, calibration_text
from brimful.report.documents import error_document, estimate_document, gpus_document
from brimful.report.largest import largest_estimate_document, largest_plan_document
from brimful.report.text import html_of, text_of
from brimful.report.training import training_document, training_text

__all__ = [
    "calibration_document",
    "calibration_text",
    "error_document",
    "estimate_document",
    "gpus_document",
    "html_of",
    "largest_estimate_document",
    "largest_plan_document",
    "text_of",
    "training_document",
    "training_text",
]
