"""Lets the tests here import the modules beside them, and gives the small models one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Threads only get in each other's way on tensors this small."""
    torch.set_num_threads(1)
