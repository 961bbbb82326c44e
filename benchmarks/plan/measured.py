"""Plans beside what people do by hand, on this machine's CPU, for real: peak, time, predicted beside measured.

    python benchmarks/plan/measured.py [--only NAME]

The CPU is calibrated first. Every way to train of one budget is measured in one process, one after another and
again in the other order; of the step times the lower median counts. Other programs must be silent. Each row is
kept as soon as it is measured: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import brimful as bf
from brimful.profiling.named_device import resolve_device
from brimful.settings import Settings
from machine import RESULTS, Rows
from plan.bench import Bench, Outcome
from plan.jobs import SMALL_JOBS, PlannedJob
from plan.peers import PEERS

BUDGETS = (0.45, 0.60, 0.80)
NAME = "plan_measured.json"
CLOSE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", help="a job by name; nothing is kept then")
    only = parser.parse_args().only
    if only is not None:
        chosen = [small for small in SMALL_JOBS if small.name in only]
        rows = [row for small in chosen for row in compare(small, BUDGETS)]
        print(json.dumps(summary(rows), indent=1))
        return
    kept = Rows(NAME, "python benchmarks/plan/measured.py", "transformers")
    if not kept.rows:
        bf.calibrate(remeasure=True)
    for small in SMALL_JOBS:
        missing = [f for f in BUDGETS if not kept.has(job=small.name, budget_fraction=f)]
        for row in compare(small, missing) if missing else ():
            kept.add(row)
    found = summary(kept.rows)
    kept.keep({"summary": found})
    print(f"{RESULTS / NAME}: {json.dumps(found)}")


def compare(small: PlannedJob, fractions: Sequence[float]) -> Iterator[dict[str, Any]]:
    """One job at some budgets."""
    job = small.make()
    bench = Bench(job, resolve_device("cpu"), small.global_batch_size)
    plain = bench.plain_outcome()
    for fraction in fractions:
        budget_bytes = int(plain.peak_device_bytes * fraction)
        ways = {"ours": bench.plan(budget_bytes)}
        ways |= {name: peer(bench, budget_bytes) for name, peer in PEERS.items()}
        measured = measure_all(job, [way.settings for way in ways.values() if way is not None])
        row = {
            "job": small.name,
            "model": job.name,
            "global_batch_size": small.global_batch_size,
            "budget_fraction": fraction,
            "budget_bytes": budget_bytes,
            "ways": {
                name: None if way is None else _told(way, measured[way.settings], budget_bytes)
                for name, way in ways.items()
            },
        }
        print(_line(row), flush=True)
        yield row


def measure_all(job: bf.Job, settings: Iterable[Settings]) -> dict[Settings, tuple[int, float]]:
    """Peak and step time by settings; equal ones are measured once."""
    seconds: dict[Settings, list[float]] = {each: [] for each in settings}
    peaks: dict[Settings, int] = {}
    for order in (list(seconds), list(seconds)[::-1]):
        for each in order:
            measurement = bf.measure(job, each, "cpu")
            seconds[each].append(measurement.measured_step_seconds)
            peaks[each] = measurement.measured_peak_allocated_bytes
    return {each: (peaks[each], min(seconds[each])) for each in seconds}


def _told(way: Outcome, measured: tuple[int, float], budget_bytes: int) -> dict[str, Any]:
    peak_bytes, step_seconds = measured
    return {
        "settings": way.settings.describe(),
        "measured_peak_bytes": peak_bytes,
        "measured_within_budget": peak_bytes <= budget_bytes,
        "measured_step_seconds": step_seconds,
        "predicted_peak_bytes": way.peak_device_bytes,
        "predicted_step_seconds": way.step_seconds,
        "step_error": round(way.step_seconds / step_seconds - 1, 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the project asks: within budget, errors, and whether the plan is the fastest measured."""
    ours = [row["ways"]["ours"] for row in rows if row["ways"]["ours"] is not None]
    ways = (way for row in rows for way in row["ways"].values())
    predicted = [way for way in ways if way is not None]
    fastest = close = 0
    for row in rows:
        mine = row["ways"]["ours"]
        others = [
            way["measured_step_seconds"]
            for name, way in row["ways"].items()
            if name != "ours" and way is not None and way["measured_within_budget"]
        ]
        if mine is None or not others:
            continue
        fastest += mine["measured_step_seconds"] <= min(others)
        close += mine["measured_step_seconds"] <= min(others) * (1 + CLOSE)
    return {
        "cases": len(rows),
        "ours_feasible": len(ours),
        "ours_measured_within_budget": sum(way["measured_within_budget"] for way in ours),
        "largest_peak_error": max(
            abs(way["predicted_peak_bytes"] / way["measured_peak_bytes"] - 1) for way in predicted
        ),
        "step_error_median": statistics.median(abs(way["step_error"]) for way in predicted),
        "ours_fastest_measured": fastest,
        "ours_fastest_or_within_5_percent": close,
    }


def _line(row: dict[str, Any]) -> str:
    def cell(way: dict[str, Any] | None) -> str:
        if way is None:
            return "-"
        over = "" if way["measured_within_budget"] else " over"
        return f"{way['measured_step_seconds']:.3f} s ({way['step_error']:+.0%}){over}"

    ways = "  ".join(f"{name} {cell(way)}" for name, way in row["ways"].items())
    ours = row["ways"]["ours"]
    return f"{row['model']} {row['budget_fraction']:.0%}: {ways}  [{'' if ours is None else ours['settings']}]"


if __name__ == "__main__":
    main()
