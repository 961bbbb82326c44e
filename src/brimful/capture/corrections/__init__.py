"""What a device does otherwise than fake tensors on a CPU, as named rules."""

from brimful.capture.corrections.base import CorrectedFunctions, Rule
from brimful.capture.corrections.rules import RULES, rules_for

__all__ = ["RULES", "CorrectedFunctions", "Rule", "rules_for"]
