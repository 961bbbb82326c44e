"""The examples on other libraries' trainers learn, in the memory that the plan predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from brimful.cli.other_names import EXAMPLES as TASKS_WITHOUT_COMMAND
from helpers.calibrated import output_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LEARNED = {
    "named_entities": "alan B-PER turing I-PER once O lived O in O new B-LOC york I-LOC",
    "sentence_pairs": "nearest to their own answer: 16 of 16 questions",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_an_example_prints_predicted_beside_measured_and_learns(tmp_path: Path, name: str) -> None:
    pytest.importorskip("sentence_transformers" if name == "sentence_pairs" else "transformers")
    printed = output_of(EXAMPLES / f"{name}.py", tmp_path)
    (plan,) = re.findall(r"^brimful: (.*)", printed, re.MULTILINE)
    assert "recomputed" in plan or "×" in plan  # by the speed of this machine
    predicted, measured = re.findall(r"peak allocated +([\d.]+) MiB +([\d.]+) MiB", printed)[0]
    assert float(measured) == pytest.approx(float(predicted), rel=0.01)
    assert " ".join(printed.split()).endswith(LEARNED[name])


def test_examples_that_the_command_line_names_exist() -> None:
    for said in TASKS_WITHOUT_COMMAND.values():
        (name,) = re.findall(r"^examples/(\w+)\.py ", said)
        assert name in LEARNED
        assert (EXAMPLES / f"{name}.py").is_file()
