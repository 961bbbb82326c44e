"""One training step on fake tensors → Trace: no GPU, no weights, seconds."""

from brimful.capture.cautious import CautiousCapture
from brimful.capture.fakes import fake_model
from brimful.capture.step import capture_step

__all__ = ["CautiousCapture", "capture_step", "fake_model"]
