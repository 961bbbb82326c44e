"""Lets the tests here use the small models of the equivalence tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "equivalence"))
