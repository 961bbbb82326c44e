"""The short benchmark of times: measured steps whose kernels are archived, predicted from the tables.

The tables are fitted to these steps; `benchmarks/results/times_fit.json` has the errors of families and GPUs
that were held out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brimful.cost.kernels import FactorTable, constants
from brimful.cost.kernels.factors import reached_by
from brimful.devices import find_device
from times.archive import read_steps
from times.archived import STEPS, covered, predicted_rows, step_time
from times.fit import NOT_FITTED, ratios
from times.kernel_fit import Numbers, Table
from times.summary import summary_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [row for row in predicted_rows(every=3) if row["model"] not in NOT_FITTED]


@pytest.mark.parametrize(
    ("source", "median", "p90", "rank"),
    [
        ("vision", 0.10, 0.25, 0.985),
        ("forward", 0.12, 0.30, 0.985),
        ("ops", 0.12, 0.30, 0.985),
        ("llm", 0.16, 0.40, 0.985),  # measured with an older attention, which takes twice as long
    ],
)
def test_measured_times_are_predicted(
    rows: list[dict[str, Any]], source: str, median: float, p90: float, rank: float
) -> None:
    found = summary_of([row for row in rows if row["source"] == source])
    assert found["rows"] >= 25
    assert found["median_error"] <= median
    assert found["p90_error"] <= p90
    assert found["rank_correlation"] >= rank


@pytest.mark.parametrize("source", ["vision", "forward", "ops"])
def test_intervals_cover_what_they_claim(rows: list[dict[str, Any]], source: str) -> None:
    """90 % is claimed; some 100 rows of a source vary by 3 %."""
    assert covered([row for row in rows if row["source"] == source]) >= 0.85


def test_ratios_of_two_gpus_are_predicted() -> None:
    of_gpus = [row for row in predicted_rows() if row["source"] == "gpus"]
    found = ratios(of_gpus)
    assert found["pairs"] >= 100
    assert found["median_error"] <= 0.13


def test_the_constants_are_those_that_were_fitted() -> None:
    fitted = json.loads((RESULTS / "times_fit.json").read_text(encoding="utf-8"))
    for name in ("kernel_seconds", "cached_fraction", "place_operations"):
        assert getattr(constants, name.upper()) == pytest.approx(fitted[name], rel=0.01)


def test_the_product_predicts_what_the_fit_does_with_the_same_parameters() -> None:
    steps = [step for path in sorted(STEPS.glob("*.csv.gz")) for step in list(read_steps(path))[::20]]
    table = Table([step for step in steps if step.source != "llm"])  # the fit has two rates of attention there
    fitted = table.predict(parameters_of(table))
    assert [step_time(step).total_seconds for step in table.steps] == pytest.approx(fitted, rel=1e-3)


def parameters_of(table: Table) -> Numbers:
    """The logarithms of the product's parameters in the order of the fit's."""
    own = FactorTable.of(find_device("RTX 3090"))
    fractions = {gpu: reached_by(find_device(gpu)) for gpu in table.gpus}
    values = [
        *(own.factors(name).passes for name in table.moved),
        *(own.factors(name).slowdown for name in table.computed),
        *(constants.KERNEL_SECONDS, constants.CACHED_FRACTION, constants.PLACE_OPERATIONS),
        *(each.bandwidth for each in fractions.values()),
        *(getattr(fractions[gpu], arithmetic) for gpu, arithmetic in table.arithmetics),
        *(1.0 for _ in table.offsets),
    ]
    return np.log(values)
