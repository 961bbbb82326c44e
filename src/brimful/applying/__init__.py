"""Plan → nn.Module: the one stage that changes what the user gave, and can undo it."""

from brimful.applying.apply import Applied, apply_units
from brimful.applying.own_loop import PlannedStep

__all__ = ["Applied", "PlannedStep", "apply_units"]
