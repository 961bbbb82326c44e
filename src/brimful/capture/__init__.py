"""A job → a `Trace` of one training step on fake tensors: no GPU, no weights, seconds.

Start reading at `step.capture_step`, then `captured_step` and `recorder`. `corrections/` holds one rule per
file: where CUDA or a CPU differs from the fake step.
"""

from brimful.capture.cautious import CautiousCapture
from brimful.capture.fakes.model import fake_model
from brimful.capture.step import capture_step

__all__ = [
    "CautiousCapture",
    "capture_step",
    "fake_model",
]
