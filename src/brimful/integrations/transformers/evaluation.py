"""What a trainer's evaluation keeps on the device, which no step and no plan counts.

Source: transformers/trainer.py, Trainer.evaluation_loop and prediction_step (checked: transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from brimful.batches import tensors_in
from brimful.capture.fakes.model import build_fake_model, fakes_behave
from brimful.capture.values.known import KnownValues
from brimful.errors import CaptureError
from brimful.job import Job
from brimful.torch_utils.held_values import HeldValues
from brimful.trace import Guess
from brimful.utils.quantities import format_bytes

_FLOAT32_BYTES = 4
_NOTE = (
    "with compute_metrics, evaluation keeps the outputs of all {samples} on the device{size}, not counted in "
    "the predicted peak. eval_accumulation_steps=1 moves them to the host after each batch, and "
    "preprocess_logits_for_metrics keeps only what the metrics need"
)


def evaluation_notes(trainer: Trainer, job: Job) -> tuple[str, ...]:
    """A note for a plan for a GPU, if evaluation keeps the outputs of all samples on the device."""
    args, data = trainer.args, trainer.eval_dataset
    keeps_all = trainer.compute_metrics is not None and trainer.preprocess_logits_for_metrics is None
    moves = args.eval_accumulation_steps is not None or args.prediction_loss_only or args.batch_eval_metrics
    if data is None or not keeps_all or moves:
        return ()
    parts = data.values() if isinstance(data, dict) else (data,)
    samples = max((len(part) for part in parts if isinstance(part, Sized)), default=0)
    size = _output_bytes(trainer, job)
    if not samples or size is None:
        return (_NOTE.format(samples="samples", size=""),)
    kept = f", up to {format_bytes(samples * size)} beside the model"
    return (_NOTE.format(samples=f"{samples:,} samples", size=kept),)


def _output_bytes(trainer: Trainer, job: Job) -> int | None:
    """Bytes of the longest sample's outputs that evaluation keeps; None if the model cannot run on fakes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        model = build_fake_model(job, mode, KnownValues(Guess.EXPECTED)).eval()
    except CaptureError:
        return None
    held = HeldValues(model).outside_of(model)
    try:
        with fakes_behave(), mode, torch.no_grad():
            outputs: Any = model(**tree_map_only(Tensor, mode.from_tensor, dict(job.batch(1))))
    except Exception:  # whatever code of the model raises that reads values
        return None
    finally:
        held.restore()
    if isinstance(outputs, Mapping):
        ignored = ("loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ()))
        outputs = [value for name, value in outputs.items() if name not in ignored]
    is_mixed = trainer.args.bf16 or trainer.args.fp16  # Accelerate returns float32 copies
    return sum(
        tensor.numel() * (_FLOAT32_BYTES if is_mixed and tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors_in(outputs)
    )
