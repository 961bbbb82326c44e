"""Answers that once were silently wrong are right, refused, or stated to be uncertain."""

from __future__ import annotations

import warnings
from itertools import groupby
from pathlib import Path

import pytest

from silent_errors.case import Case
from silent_errors.kinds import CASES

SOME = tuple(case for _, cases in groupby(CASES, lambda case: case.kind) for case in list(cases)[:2])
"""The first two of each kind; `benchmarks/silent_errors/run.py` runs all."""


def test_programs_have_names_of_their_own() -> None:
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.kind}-{case.name}")
def test_nothing_is_silently_wrong(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program compares brimful's answer with an oracle of its own."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run()
