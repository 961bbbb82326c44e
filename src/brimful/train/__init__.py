"""The training loop: data, steps as transactions, validation, run directory, progress."""

from brimful.train.callbacks import Callback
from brimful.train.run_directory import load_weights
from brimful.train.trainer import Trainer

__all__ = ["Callback", "Trainer", "load_weights"]
