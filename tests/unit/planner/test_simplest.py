"""Of plans whose times cannot be distinguished the simplest is chosen; probabilities of exceeding a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import brimful as bf
from brimful.models import find_architecture
from brimful.planner import simplest
from brimful.planner.plan import Plan
from brimful.planner.simplest import Complexity, complexity_of
from brimful.prediction.exceedance import excess_distribution
from brimful.settings import Action, ChunkedLoss, Settings, UnitAction

KINDS = ("cuda", "cpu", "cpu uncertain")


def unit(action: Action) -> tuple[UnitAction, ...]:
    return (UnitAction(fqn="block", action=action),)


def test_settings_are_as_complex_as_the_most_complex_thing_that_they_do() -> None:
    whole = Settings(micro_batch_size=8)
    rising = [
        whole,
        whole.with_micro_batch_size(4),
        replace(whole, chunked_loss=ChunkedLoss(layer="head", chunks=8)),
        replace(whole, units=unit(Action.RECOMPUTE)),
        replace(whole, units=unit(Action.OFFLOAD)),
        replace(whole, offload_optimizer=True),
    ]
    assert [complexity_of(each) for each in rising] == list(Complexity)
    assert complexity_of(replace(rising[1], units=unit(Action.KEEP))) is Complexity.ACCUMULATION
    assert complexity_of(replace(rising[1], units=unit(Action.RECOMPUTE))) is Complexity.RECOMPUTE


def planned(**asked: Any) -> Plan:
    return bf.plan(find_architecture("gpt2"), "RTX 3090", global_batch_size=16, budget="45%", **asked)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    job = find_architecture("bert-base", num_hidden_layers=4, sequence_length=256)
    budget = "55%"
    return {
        effort: bf.plan(job, "RTX 3090", global_batch_size=32, budget=budget, effort=effort)
        for effort in ("normal", "max")
    }


def test_the_simplest_costs_at_most_what_it_may_and_is_no_more_complex(plans: dict[str, Plan]) -> None:
    simple, fastest = plans["normal"], plans["max"]
    assert complexity_of(simple.settings) <= complexity_of(fastest.settings)
    most_seconds = fastest.predicted_step_seconds * (1 + simplest.SIMPLICITY_FRACTION)
    assert fastest.predicted_step_seconds <= simple.predicted_step_seconds <= most_seconds
    assert simple.predicted_exceedance_probability <= 0.01
    assert fastest.predicted_exceedance_probability <= 0.01


@pytest.mark.parametrize("kind", KINDS)
@given(probability=st.floats(1e-6, 1.0))
def test_an_excess_and_its_probability_are_inverse(kind: str, probability: float) -> None:
    distribution = excess_distribution(kind)
    excess = distribution.exceeded_with(probability)
    assert excess >= 0
    found = distribution.above(excess)
    assert found <= probability * (1 + 1e-9)
    if excess > 0:
        assert found == pytest.approx(probability, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(one=st.floats(-3, 3), other=st.floats(-3, 3))
def test_a_larger_excess_is_never_more_probable(kind: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    above = excess_distribution(kind).above
    assert 0 <= above(high) <= above(low) + 1e-12 <= 1 + 1e-12


def test_the_table_of_excesses_is_that_of_the_measurements() -> None:
    import peak_excess

    for kind, excesses in peak_excess.measured().items():
        distribution = excess_distribution(kind)
        assert distribution.cases == len(excesses)
        for excess, probability in distribution.points:
            share = sum(each > excess * (1 + 1e-3) for each in excesses) / len(excesses)
            assert math.isclose(share, probability, abs_tol=1.5 / len(excesses))


def test_the_tail_covers_what_was_measured() -> None:
    """The largest excesses of 54 public runs are as rare as the tail says, within a factor of three."""
    import peak_excess

    excesses = sorted(peak_excess.measured()["cuda"], reverse=True)
    for rank in (1, 2, 4, 6):
        expected = rank / len(excesses)
        assert expected / 3 <= excess_distribution("cuda").above(excesses[rank - 1]) <= expected * 3


def test_a_probability_of_zero_and_an_unknown_effort_are_refused() -> None:
    for wrong in (0, 1.5):
        with pytest.raises(bf.errors.UsageError, match=r"max_exceedance is .*; a probability is above 0"):
            planned(max_exceedance=wrong)
    for wrong in ("0.01", None, True):
        with pytest.raises(bf.errors.UsageError, match=r"max_exceedance is .*; it must be a number"):
            planned(max_exceedance=wrong)
    with pytest.raises(bf.errors.UnknownNameError, match="effort"):
        planned(effort="most")
    for wrong in (None, ["max"]):
        with pytest.raises(bf.errors.UsageError, match=r"effort is .*; it must be text"):
            planned(effort=wrong)
