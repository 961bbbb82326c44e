"""`Trainer`s under FSDP2, and the measured peak of one of their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from brimful.execution.in_force import unwrapped
from brimful.profiling import PeakMemory, peak_memory
from helpers.trainers import LONGEST, VOCABULARY, Texts, arguments, pad


class LongTexts(Texts):
    """All as long as the longest, so that each step is the largest; enough for all steps in one epoch."""

    def __init__(self) -> None:
        super().__init__(64)
        generator = torch.Generator().manual_seed(1)
        self.texts = [
            torch.randint(0, VOCABULARY, (LONGEST,), generator=generator).tolist() for _ in self.texts
        ]


def sharded_trainer(folder: Path, model: nn.Module, **changes: Any) -> Trainer:
    """A trainer under FSDP2 on CPUs, in one of several processes.

    Accelerate 1.15 leaves FSDP out where it calls its processes MULTI_CPU (state.py, `AcceleratorState`). With
    another name torch's FSDP2 runs on gloo as on GPUs.
    """
    args = TrainingArguments(**arguments(folder, per_device_train_batch_size=4, fsdp=True, **changes))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(model=model, args=args, train_dataset=LongTexts(), data_collator=pad)


def call_sharded(trainer: Trainer, **options: Any) -> None:
    """Make a trainer of one process look as if FSDP were configured, to be refused."""
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options})
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert trainer.accelerator.distributed_type == DistributedType.FSDP


class PeakOfStep(TrainerCallback):
    """Measures the third and the fourth step; gloo's threads may still hold what one before needed."""

    def __init__(self) -> None:
        self.peaks: list[PeakMemory] = []
        self._context: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            self._context = peak_memory(kwargs["model"], unwrapped(kwargs["optimizer"]), "cpu")
            self.peaks.append(self._context.__enter__())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 3:
            self._context.__exit__(None, None, None)
