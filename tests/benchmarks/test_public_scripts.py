"""Public scripts: the summary follows from the rows, and the rows are what the documentation says of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import public_scripts
from job_zoo.steps import Trained
from public import SCRIPTS, examine

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "public_scripts.json"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def test_scripts_are_distinct_and_name_a_commit() -> None:
    assert max(Counter(script.name for script in SCRIPTS).values()) == 1
    assert len({script.repository for script in SCRIPTS}) >= 20
    assert all(len(script.commit) == 40 and int(script.commit, 16) for script in SCRIPTS)


def test_each_script_has_a_row(result: dict[str, Any]) -> None:
    found = [(row["name"], row["repository"], row["commit"]) for row in result["rows"]]
    assert found == [(script.name, script.repository, script.commit) for script in SCRIPTS]


def test_the_summary_follows_from_the_rows(result: dict[str, Any]) -> None:
    assert result["summary"] == json.loads(json.dumps(public_scripts.summary_of(result["rows"])))


def test_estimates_are_within_half_a_percent_or_uncertain_in_words(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["error_fraction"] is not None:
            assert row["error_fraction"] == row["predicted_bytes"] / row["true_bytes"] - 1
            assert abs(row["error_fraction"]) <= examine.CLOSE_FRACTION or row["uncertain"], row["name"]


def test_plans_keep_their_budget_and_none_is_silently_different(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["verdict"] != examine.WRONG, (row["name"], row["why"])
        for plan in (row["plan"], row["whole"]):
            if plan is not None:
                is_within = plan["true_bytes"] <= plan["budget_bytes"]
                assert is_within or plan["verdict"] == examine.UNCERTAIN, row["name"]


def state(weight: float, running: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"w": torch.tensor([weight])}, "buffers": {"b": torch.tensor([running])}}


def steps(weight: float, running: float) -> Trained:
    return Trained(losses=(1.0,), start=state(0.0, 1.0), end=state(weight, running), draws=False)


def test_differences_are_parts_of_how_far_the_steps_moved() -> None:
    by_hand = steps(0.5, 1.0)
    assert examine.difference(by_hand, steps(0.5, 1.0), "weights") == 0
    assert examine.difference(by_hand, steps(0.25, 1.0), "weights") == 0.5
    assert examine.difference(by_hand, steps(float("nan"), 1.0), "weights") == float("inf")
    assert examine.difference(by_hand, steps(0.5, 1.25), "buffers") == float("inf")  # by hand none moved
