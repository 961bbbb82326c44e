"""Every benchmark that needs no GPU and no data of others, one after another; results in benchmarks/results/.

python benchmarks/run_all.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "cpu_truth.py",
    "cpu_zoo.py",
    "cpu_job_zoo.py",
    "generation.py",
    "published.py",
    "published_names.py",
    "models_by_name.py",
    "studies.py",
    "step_time.py",
    "estimate_speed.py",
    "demo_runs.py",
    "plan/simulated.py",
    "plan/published.py",
)


def main() -> int:
    """The number that failed."""
    failed = 0
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        failed += subprocess.run([sys.executable, str(HERE / name)], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
