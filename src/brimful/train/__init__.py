"""The training loop: data, steps as transactions, validation, run directory, progress."""

from brimful.train.callbacks import Callback
from brimful.train.trainer import Trainer
from brimful.train.weights import load_weights

__all__ = ["Callback", "Trainer", "load_weights"]
