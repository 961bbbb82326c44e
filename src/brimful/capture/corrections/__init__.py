"""What a device does otherwise than fake tensors on a CPU, as named rules: one a file, of the rule's name."""

from brimful.capture.corrections.functions import CorrectedFunctions
from brimful.capture.corrections.rule import Rule
from brimful.capture.corrections.rules import RULES, rules_for

__all__ = ["RULES", "CorrectedFunctions", "Rule", "rules_for"]
