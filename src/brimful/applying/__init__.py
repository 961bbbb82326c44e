"""Plan → nn.Module: the one stage that changes what the user gave, and can undo it."""

from brimful.applying.apply import Applied, apply_units

__all__ = ["Applied", "apply_units"]
