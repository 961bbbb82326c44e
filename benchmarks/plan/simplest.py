"""How often the simplest plan among equals is another than the fastest, what it costs, and what it gains.

    python benchmarks/plan/simplest.py [--only NAME] [--minutes N]

Three plans for each job and budget on one GPU: the fastest; the simplest of those whose times cannot be
distinguished from it (`effort`); and the simplest that also exceeds the budget with a probability of at most 1
% (`max_exceedance`). All may use the host's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.planner import Plan, search
from brimful.planner.simplest import complexity_of
from brimful.prediction.exceedance import DEFAULT_PROBABILITY
from brimful.quantities import GIB
from machine import Rows
from plan.bench import Bench
from plan.jobs import JOBS, PlannedJob

DEVICE = "RTX 3090"
BUDGETS = (0.3, 0.45, 0.6, 0.8)
HOST_BYTES = 32 * GIB
SLOW_SECONDS = 600.0
"""A job that takes longer at all budgets together is named in the result."""
WAYS: dict[str, dict[str, Any]] = {
    "fastest": {},
    "simplest": {"effort": "normal"},
    "simplest_and_safe": {"effort": "normal", "max_exceedance": DEFAULT_PROBABILITY},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="this job; may be repeated")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further job begins")
    args = parser.parse_args()
    jobs = [job for job in JOBS if args.only is None or job.name in args.only]
    command = ["python benchmarks/plan/simplest.py", *(f"--only {name}" for name in args.only or ())]
    results = Rows("plan_simplest.json", " ".join(command), "transformers")
    began = time.perf_counter()
    not_run: list[str] = []
    for job in jobs:
        if results.has(model=job.name):
            continue
        if time.perf_counter() - began > 60 * args.minutes:
            not_run.append(job.name)
            continue
        for row in list(compare(job)):
            results.add(row)
    found = summary(results.rows)
    content = {"device": DEVICE, "host_bytes": HOST_BYTES, "notes": notes(results.rows, not_run)}
    results.keep(content | {"summary": found})
    print(json.dumps(found, indent=1))


def notes(rows: list[dict[str, Any]], not_run: list[str]) -> list[str]:
    """Which jobs took long, and which were not run."""
    seconds = dict.fromkeys((row["model"] for row in rows), 0.0)
    for row in rows:
        seconds[row["model"]] += row["planning_seconds"]
    slow = [f"{model} took {each / 60:.0f} min" for model, each in seconds.items() if each > SLOW_SECONDS]
    return slow + [f"{model} was not run, for lack of time" for model in not_run]


def compare(job: PlannedJob) -> Iterator[dict[str, Any]]:
    """One job at all budgets."""
    bench = Bench(job.make(), find_device(DEVICE), job.global_batch_size, job.precision)
    plain_bytes = bench.plain_outcome().peak_device_bytes
    for fraction in BUDGETS:
        began = time.perf_counter()
        budget_bytes = int(plain_bytes * fraction)
        row: dict[str, Any] = {"model": job.name, "budget_fraction": fraction, "budget_bytes": budget_bytes}
        for way, options in WAYS.items():
            row[way] = planned(bench, budget_bytes, options)
        row["planning_seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps(row), flush=True)
        yield row


def planned(bench: Bench, budget_bytes: int, options: dict[str, Any]) -> dict[str, Any] | None:
    """A plan in short; None if nothing fits."""
    request = replace(
        bench.request,
        budget_bytes=budget_bytes,
        asked=replace(bench.request.asked, offload_optimizer=None, **options),
        offload_host_bytes=HOST_BYTES,
    )
    try:
        plan: Plan = search(bench.capture, request)
    except InfeasibleError:
        return None
    return {
        "settings": plan.settings.describe(),
        "complexity": complexity_of(plan.settings).name.lower(),
        "peak_device_bytes": plan.predicted_peak_device_bytes,
        "step_seconds": plan.predicted_step_seconds,
        "exceedance_probability": plan.predicted_exceedance_probability,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How the other two compare with the fastest."""
    found: dict[str, Any] = {"budgets": len(rows)}
    for way in list(WAYS)[1:]:
        both = [(row["fastest"], row[way], row["budget_bytes"]) for row in rows if row["fastest"] and row[way]]
        costs = [other["step_seconds"] / fastest["step_seconds"] - 1 for fastest, other, _ in both]
        gained = [
            (fastest["peak_device_bytes"] - other["peak_device_bytes"]) / budget
            for fastest, other, budget in both
        ]
        found[way] = {
            "plans": len(both),
            "changed": sum(fastest["settings"] != other["settings"] for fastest, other, _ in both),
            "median_cost": round(statistics.median(costs), 4),
            "largest_cost": round(max(costs), 4),
            "mean_headroom_gained": round(statistics.fmean(gained), 4),
            "largest_headroom_gained": round(max(gained), 4),
            "largest_exceedance_probability": max(other["exceedance_probability"] for _, other, _ in both),
        }
    found["fastest_exceedance_probability_median"] = statistics.median(
        row["fastest"]["exceedance_probability"] for row in rows if row["fastest"]
    )
    return found


if __name__ == "__main__":
    main()
