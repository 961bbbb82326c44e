"""A job, a plan and data → a trained model: epochs, validation, checkpoints, recovery, resume.

Start reading at `run/loop.py`. Users call `Trainer` (`trainer.py`); `setup.py` sets up a run, and `resume.py`
finds the save that it resumes from.

| room | contents |
|---|---|
| `run/` | the loop over epochs, validation, when to save, how a run ends |
| `step/` | one optimizer step as a transaction, with OOM recovery, schedules and the moving average |
| `data/` | batches, their order and position, reading ahead, bucketing by length |
| `storage/` | checkpoints, weights, the run directory |
| `monitor/` | records, what is written and shown of them, utilisation, trackers, callbacks |
"""

from brimful.results import TrainingResult
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
    "TrainingResult",
    "WandB",
    "load_weights",
    "pad_batch",
]
