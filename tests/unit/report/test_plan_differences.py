"""The difference of two plans: one line for units in a row, and probabilities in percent."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.planner import JobSource
from brimful.report.layout import Listing
from brimful.report.plan_differences import differences_report
from brimful.report.unit_names import folded
from brimful.settings import Settings, UnitAction


@pytest.mark.parametrize(
    ("units", "text"),
    [
        (["layer.0", "layer.1", "layer.3"], "layer.0–1, layer.3"),
        (["[0..9]", "[10..19]", "[30..39]"], "[0..9]–[10..19], [30..39]"),
        (
            ["body[0..9]", "body[10..11]", "tail[12..13]", "tail.14"],
            "body[0..9]–[10..11], tail[12..13], tail.14",
        ),
        (["", "0", "1", "head"], "the model itself, 0–1, head"),
        (["9" * 5000, "+up.0", "+up.1"], f"{'9' * 5000}, +up.0–1"),
    ],
)
def test_siblings_in_a_row_are_folded(units: list[str], text: str) -> None:
    assert folded(units) == text


def test_units_in_a_row_that_differ_alike_have_one_line() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(4, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 4),
    )
    plan = replace(bf.plan(job, "cpu", global_batch_size=8), predicted_exceedance_probability=1e-60)
    units = tuple(UnitAction(fqn=f"[{10 * i}..{10 * i + 9}]", action="recompute") for i in range(100))
    kept = tuple(replace(unit, action="keep") if 40 <= i < 50 else unit for i, unit in enumerate(units))
    first, second = (replace(plan, settings=Settings(micro_batch_size=8, units=each)) for each in (units, kept))
    second = replace(second, predicted_exceedance_probability=0.0017858330481255325)
    (listing,) = differences_report(first, second, ("a", "b")).parts
    assert isinstance(listing, Listing)
    assert listing.rows == (
        ("over it with probability", "under 0.1%", "0.2%"),
        ("[400..409]–[490..499]", "recompute", "keep"),
    )


def test_options_of_the_model_that_differ_are_shown() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(4, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 4),
    )
    plan = replace(bf.plan(job, "cpu", global_batch_size=8), source=JobSource(name="gpt2"))
    half = replace(plan, source=JobSource(name="gpt2", options={"dtype": "bf16"}))
    (listing,) = differences_report(plan, half, ("a", "b")).parts
    assert isinstance(listing, Listing)
    assert listing.rows == (("model's dtype", "None", "bf16"),)
