"""Unit actions of a plan → an `nn.Module` that recomputes, saves selectively or offloads, undoably.

Start reading at `apply.apply_units`. State dicts and results do not change. `memory_format` converts the layout
of a model and of batches.
"""

from brimful.transforms.apply import apply_units
from brimful.transforms.memory_format import AppliedFormat, apply_memory_format, batch_in_format

__all__ = [
    "AppliedFormat",
    "apply_memory_format",
    "apply_units",
    "batch_in_format",
]
