"""Answers that once were silently wrong are right, refused, or stated to be uncertain."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from silent_errors.kinds import CASES


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.name}")
def test_nothing_is_silently_wrong(case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program compares brimful's answer with an oracle of its own."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run()
