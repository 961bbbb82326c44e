"""Each test begins without the state that Accelerate keeps for the process, such as its mixed precision."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def _own_accelerate() -> None:
    if find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
