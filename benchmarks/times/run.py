"""All comparisons of predicted with published GPU times, one after another, within half an hour on two cores.

    python benchmarks/times/run.py DIRECTORY

The directory has the files of measurements, `gpu_time_vision.csv` and others, which are not part of this
project; a comparison whose file, or timm, is missing is skipped with a line. Vision models are sampled. Each
script writes its JSON into `results/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import keep

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
COMPARISONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ops.py", "gpu_ops.csv", ()),
    ("gpus.py", "gpu_time_gpus.csv", ()),
    ("llm.py", "gpu_time_llm.csv", ()),
    ("vision.py", "gpu_time_vision.csv", ("--sample", "120")),
    ("forward.py", "gpu_time_vision_forward.csv", ("--sample", "30")),
    ("memory.py", "gpu_time_vision.csv", ("--sample", "20")),
    ("torch_estimator.py", "gpu_time_vision.csv", ("--sample", "24")),
)

OF_TIMM = ("gpu_time_vision.csv", "gpu_time_vision_forward.csv")
"""Measurements of timm's models."""


def main() -> int:
    """The number of comparisons that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="folder of the CSV files of measurements")
    directory = parser.parse_args().directory
    failed = 0
    runs: list[dict[str, Any]] = []
    began = time.perf_counter()
    for script, file, options in COMPARISONS:
        if not (directory / file).is_file():
            print(f"{script}: skipped, {directory / file} is missing", flush=True)
            continue
        if file in OF_TIMM and find_spec("timm") is None:
            print(f"{script}: skipped, timm is missing: pip install timm, torchvision without its torch")
            continue
        command = [sys.executable, str(HERE / script), str(directory / file), *options]
        started = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        failed += done.returncode != 0
        state = (
            summary_line(RESULTS / f"times_{script.removesuffix('.py')}.json") if not done.returncode else ""
        )
        seconds = time.perf_counter() - started
        print(f"{script}: exit status {done.returncode} in {seconds:.0f} s. {state}", flush=True)
        runs.append(
            {
                "script": " ".join([script, file, *options]),
                "exit_status": done.returncode,
                "seconds": round(seconds),
            }
        )
    minutes = (time.perf_counter() - began) / 60
    print(f"all in {minutes:.1f} min")
    content = {"minutes": round(minutes, 1), "aim_minutes": 30, "runs": runs}
    keep("times_run.json", "python benchmarks/times/run.py DIRECTORY", content, "timm", "torchvision")
    return failed


def summary_line(path: Path) -> str:
    """Rows, median error and 90th percentile of a result, where it has them."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    summary = next((content[key] for key in ("summary", "speed", "brimful") if key in content), {})
    summary = summary.get("brimful", summary)
    if "median_error" not in summary:
        return "done"
    return (
        f"{summary['rows']} rows, median error {summary['median_error']:.1%}, "
        f"90 % within {summary['p90_error']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
