"""Results as text and JSON."""

from brimful.report.calibration import calibration_document, calibration_text
from brimful.report.documents import error_document, estimate_document, gpus_document
from brimful.report.training import largest_loss_difference, sparkline, training_document, training_text

__all__ = [
    "calibration_document",
    "calibration_text",
    "error_document",
    "estimate_document",
    "gpus_document",
    "largest_loss_difference",
    "sparkline",
    "training_document",
    "training_text",
]
