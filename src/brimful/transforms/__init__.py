"""Unit actions of a plan → an `nn.Module` that recomputes, saves selectively or offloads, undoably.

Start reading at `apply.apply_units`. State dicts and results do not change.
"""

from brimful.transforms.apply import apply_units

__all__ = [
    "apply_units",
]
