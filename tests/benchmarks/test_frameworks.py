"""`benchmarks/frameworks.py`: its summary is that of its rows, and its loops are compared line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

import framework_loops
import frameworks

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "frameworks.json"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def test_the_summary_is_that_of_the_rows(result: dict[str, Any]) -> None:
    assert [row["framework"] for row in result["rows"]] == list(framework_loops.FRAMEWORKS)
    assert result["summary"] == frameworks.summary(result["rows"])


def test_the_lines_are_those_of_the_loops(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        lines = frameworks.lines_added(row["framework"])
        assert {name: row[name] for name in lines} == lines


def test_medians_are_those_of_the_rounds(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        rounds = sorted(each["processor"] for each in row["overhead_by_round"])
        assert len(rounds) == frameworks.ROUNDS
        assert row["overhead_fraction"] == rounds[frameworks.ROUNDS // 2]


@pytest.mark.parametrize("framework", ["PyTorch, bf.prepare", "PyTorch, bf.apply"])
def test_a_loop_trains_the_same_with_and_without_brimful(framework: str) -> None:
    row = frameworks.compared(framework, "recomputes all")
    assert row["is_bitwise"]
    assert row["profiled_is_same"]
    assert abs(row["peak_error_fraction"]) < 0.01
