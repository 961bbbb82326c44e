"""The training loop: data, steps as transactions, validation, run directory, progress."""

from brimful.train.callbacks import Callback
from brimful.train.padding import LengthBuckets, pad_batch
from brimful.train.schedules import Schedule
from brimful.train.trackers import TensorBoard, WandB
from brimful.train.trainer import Trainer
from brimful.train.weights import load_weights

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
