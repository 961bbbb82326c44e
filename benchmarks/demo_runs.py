"""The demo's two jobs, trained for real: peak within the budget, loss beside the baseline, predicted time.

    python benchmarks/demo_runs.py

Runs what `make demo` trains and keeps the figures: is the measured peak within the budget and at least 85 % of
it, how far are predicted and measured apart, and how far is the loss curve from that of the baseline.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import demo  # noqa: E402
from machine import keep  # noqa: E402


def main() -> None:
    """Train, print and keep."""
    rows = [train(training) for training in demo.TRAINED]
    keep("demo_runs.json", "python benchmarks/demo_runs.py", {"rows": rows})
    for row in rows:
        print(json.dumps(row, indent=1))


def train(training: demo.Training) -> dict[str, Any]:
    """One job, with and without its plan."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = training.arguments(Path(folder) / training.name)
        done = subprocess.run(
            [sys.executable, "-m", "brimful", *arguments, "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    run = json.loads(done.stdout)
    plain = run["plain"]
    peak, allowed = run["measured_peak_allocated_bytes"], run["budget_bytes"]
    return {
        "job": run["job"],
        "settings": run["settings"],
        "steps": len(run["steps"]),
        "budget_bytes": allowed,
        "predicted_peak_allocated_bytes": run["predicted_peak_allocated_bytes"],
        "measured_peak_allocated_bytes": peak,
        "is_within_budget": peak <= allowed,
        "budget_used_fraction": round(peak / allowed, 4),
        "plain_measured_peak_allocated_bytes": plain["measured_peak_allocated_bytes"],
        "predicted_step_seconds": run["predicted_step_seconds"],
        "measured_step_seconds": run["measured_step_seconds"],
        "plain_measured_step_seconds": plain["measured_step_seconds"],
        "first_loss": run["steps"][0]["loss"],
        "last_loss": run["steps"][-1]["loss"],
        "largest_loss_difference_to_plain": run["largest_loss_difference"],
        "validation": run["validations"][-1] if run["validations"] else None,
    }


if __name__ == "__main__":
    main()
