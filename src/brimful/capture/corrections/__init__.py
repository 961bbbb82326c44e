"""Differences between a device and fake tensors on a CPU, as rules: one per file of the rule's name."""

from brimful.capture.corrections.functions import CorrectedFunctions
from brimful.capture.corrections.rule import Rule
from brimful.capture.corrections.rules import RULES, rules_for

__all__ = ["RULES", "CorrectedFunctions", "Rule", "rules_for"]
