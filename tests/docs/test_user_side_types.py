"""A user's type checker understands the public functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
import torch
from torch import nn
from typing_extensions import assert_type

import brimful as bf

job = bf.Job(
    model=lambda: nn.Linear(2, 2),
    loss=lambda model, batch: model(batch).mean(),
    batch=lambda n: torch.zeros(n, 2),
    optimizer="sgd",
)
assert_type(bf.estimate(job, "RTX 3090", micro_batch_size=1), bf.api.Estimate)
plan = bf.plan(job, "RTX 3090", global_batch_size=4)
assert_type(plan, bf.Plan)
assert_type(plan.predicted_peak_reserved_bytes, int)
assert_type(plan.settings, bf.Settings)
assert_type(bf.measure(job, plan), bf.results.Measurement)
bf.plan(job, "RTX 3090", global_batch_size="4")  # EXPECT
plan.status = "optimal"  # EXPECT
"""


@pytest.mark.slow
def test_right_use_passes_and_wrong_use_is_found(tmp_path: Path) -> None:
    """With the configuration of `mypy` in `scripts/check.py`, whose cache then has all that is imported."""
    script = tmp_path / "use.py"
    script.write_text(USE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    expected = {i for i, line in enumerate(USE.splitlines(), start=1) if "EXPECT" in line}
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == expected, done.stdout
