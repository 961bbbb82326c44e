"""What holds for all tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _heap_of_others_left_alone() -> None:
    """Capturing and measuring collect garbage first, which goes through all that earlier tests have imported.

    Without this a test with many short runs took five times as long after others as alone.
    """
    gc.collect()
    gc.freeze()
