"""Lets the tests here import the modules beside them and the small models of the equivalence tests."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "equivalence")]
