"""Gives the small models one thread."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Threads only get in each other's way on tensors this small."""
    torch.set_num_threads(1)
