"""Captures one training step of a job on fake tensors as a `Trace`: no GPU, no weights, in seconds.

Start reading at `step.capture_step`, then `session`, `captured_step` and `recording/recorder`.

| module | input → output |
|---|---|
| `step`, `session` | job, settings, device → trace |
| `captured_step`, `captured_optimizer`, `loop`, `marks` | brimful's step, or the job's loop, run and marked |
| `recording/` | code that runs on fake tensors → ops and blocks of memory |
| `fakes/`, `values/` | models and batches without weights; the values that are known nevertheless |
| `corrections/` | where CUDA or a CPU differs from the fake step: one rule a file |
| `compiled`, `coupling`, `sharding` | compiled code, coupled samples, FSDP2 |
"""

from brimful.capture.cautious import CautiousCapture
from brimful.capture.fakes.model import fake_model
from brimful.capture.step import capture_step, loss_terms

__all__ = [
    "CautiousCapture",
    "capture_step",
    "fake_model",
    "loss_terms",
]
