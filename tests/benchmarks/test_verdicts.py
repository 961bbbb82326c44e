"""Verdicts on batch sizes: what a row of measurements says, and when a prediction of it is right."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.quantities import GIB
from times.same_model import differs
from times.verdicts import (
    BATCH_SIZES,
    Trial,
    Verdict,
    medians_of_capacity,
    right_if_scaled,
    tally,
    tally_by,
    trials_of,
    wrong,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def verdict(gib: float, *, fits: bool, layout: str = "nchw", model: str = "net") -> Verdict:
    return Verdict(
        model=model,
        family="net",
        layout=layout,
        trial=Trial(64 if fits else 96, fits=fits),
        predicted_bytes=int(gib * GIB),
        capacity_bytes=24 * GIB,
    )


@given(st.sampled_from(BATCH_SIZES))
def test_a_row_says_that_its_batch_fits_and_that_the_next_larger_one_does_not(batch_size: int) -> None:
    ran, *failed = trials_of(batch_size)
    assert ran == Trial(batch_size, fits=True)
    larger = [size for size in BATCH_SIZES if size > batch_size]
    assert failed == ([Trial(min(larger), fits=False)] if larger else [])


def test_a_row_at_the_largest_batch_says_nothing_of_a_larger_one() -> None:
    assert trials_of(512) == (Trial(512, fits=True),)
    assert trials_of(384) == (Trial(384, fits=True), Trial(512, fits=False))
    assert trials_of(1) == (Trial(1, fits=True), Trial(2, fits=False))
    assert all(larger > smaller for larger, smaller in pairwise(BATCH_SIZES))


@pytest.mark.parametrize("batch_size", [0, 5, 100, 1024])
def test_a_batch_size_that_was_never_tried_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"the batch size is {batch_size}"):
        trials_of(batch_size)


@pytest.mark.parametrize(
    ("gib", "fits", "is_right"),
    [
        (23, True, True),
        (24, True, True),
        (25, True, False),
        (23, False, False),
        (24, False, False),
        (25, False, True),
    ],
)
def test_a_prediction_of_exactly_the_capacity_fits(gib: float, fits: bool, is_right: bool) -> None:
    assert verdict(gib, fits=fits).is_right is is_right


@given(st.lists(st.builds(verdict, st.floats(1, 48), fits=st.booleans())))
def test_right_and_wrong_verdicts_are_all_verdicts(verdicts: list[Verdict]) -> None:
    found = tally(verdicts)
    assert found["right"] + len(wrong(verdicts)) == found["verdicts"] == len(verdicts)
    assert found["fits"] + found["does_not_fit"] == len(verdicts)
    assert found["fits_right"] + found["does_not_fit_right"] == found["right"]
    assert right_if_scaled(verdicts)["1.0"] == found["right"]


def test_verdicts_are_counted_by_what_was_measured_and_by_group() -> None:
    verdicts = [
        verdict(20, fits=True),
        verdict(25, fits=True),
        verdict(30, fits=False),
        verdict(23, fits=False, layout="nhwc"),
    ]
    assert tally(verdicts) == {
        "verdicts": 4,
        "right": 2,
        "right_fraction": 0.5,
        "fits": 2,
        "fits_right": 1,
        "does_not_fit": 2,
        "does_not_fit_right": 1,
    }
    groups = tally_by(verdicts, lambda each: each.layout)
    assert list(groups) == ["nchw", "nhwc"]
    assert [group["right"] for group in groups.values()] == [2, 0]
    assert tally([])["right_fraction"] is None


def test_wrong_verdicts_are_named_with_what_they_exceed_the_capacity_by() -> None:
    above, below = verdict(24.5, fits=True, model="a"), verdict(20, fits=False, model="b")
    found = wrong([above, below, verdict(2, fits=True)])
    assert [(row["model"], row["measured"], row["excess_gib"]) for row in found] == [
        ("b", "does not fit", -4.0),
        ("a", "fits", 0.5),
    ]
    assert [row["batch_size"] for row in found] == [96, 64]


def test_scaled_predictions_show_how_many_verdicts_are_near_the_capacity() -> None:
    verdicts = [verdict(12, fits=True), verdict(23, fits=True), verdict(25, fits=False)]
    assert right_if_scaled(verdicts) == {"0.9": 2, "0.95": 2, "1.0": 3, "1.05": 2, "1.1": 2}
    assert medians_of_capacity(verdicts) == {"fits": round(17.5 / 24, 4), "does_not_fit": round(25 / 24, 4)}


@pytest.mark.parametrize("count", [25_557_032, 25_555_000, 25_565_000])
def test_a_model_with_the_measured_number_of_parameters_is_the_same(count: int) -> None:
    assert differs(count, "25.56") is None


@pytest.mark.parametrize("count", [25_554_000, 25_566_000, 88_791_336])
def test_a_model_with_another_number_of_parameters_is_named_with_both(count: int) -> None:
    found = differs(count, "25.56")
    assert found == f"today's timm builds a model of {count / 1e6:.2f}M parameters; 25.56M were measured"


def test_the_logic_needs_no_timm() -> None:
    code = "import sys, times.same_model, times.verdicts; assert not {'timm', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True, timeout=120)
