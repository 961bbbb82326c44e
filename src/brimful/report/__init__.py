"""Results as text and JSON."""

from brimful.report.documents import error_document, estimate_document

__all__ = ["error_document", "estimate_document"]
