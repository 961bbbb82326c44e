"""A job, a plan and data → a trained model: epochs, validation, checkpoints, recovery, resume.

Start reading at `loop.py`. `trainer.Trainer` is what a user calls, `setup` builds a run, `resume` restores one.

| room | what it has |
|---|---|
| `step/` | one optimizer step as a transaction, with OOM recovery, schedules and the moving average |
| `data/` | batches, their order and position, reading ahead, bucketing by length |
| `storage/` | checkpoints, weights, the run directory |
| `monitor/` | records, progress, utilisation, trackers, callbacks |
"""

from brimful.trainer.data.length_buckets import LengthBuckets, pad_batch
from brimful.trainer.monitor.callbacks import Callback
from brimful.trainer.monitor.trackers import TensorBoard, WandB
from brimful.trainer.step.schedules import Schedule
from brimful.trainer.storage.weights import load_weights
from brimful.trainer.trainer import Trainer

__all__ = [
    "Callback",
    "LengthBuckets",
    "Schedule",
    "TensorBoard",
    "Trainer",
    "WandB",
    "load_weights",
    "pad_batch",
]
