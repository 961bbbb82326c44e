"""Plans beside torch's own planners, at the same budgets and at the same true peak, in predicted peak and time.

    pip install pulp pwlf
    python benchmarks/plan/torch_planners.py [--only NAME]

The same jobs, budgets, device and prices as in `simulated.py`; how each planner is asked stands at the top of
its own file. A planner that goes over the budget did something else than it was asked, so beside every choice
of theirs stands our plan for what that choice takes in truth.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brimful.devices import find_device
from machine import RESULTS, Rows
from plan.bench import Bench, Outcome, told
from plan.jobs import JOBS, PlannedJob
from plan.peers import Peer, torch_planners
from plan.simulated import BUDGETS, DEVICE

NAME = "plan_torch_planners.json"
CONTEXT_BYTES = find_device(DEVICE).context_bytes
QUICK_FIRST = (
    "lstm-lm",
    "unet",
    "resnet50",
    "llama-3.2-1b",
    "gpt2-medium",
    "vit-large",
    "bert-large",
    "resnet152",
    "t5-base",
)
"""Jobs in the order in which they are run: the tools take hours for all."""

MIDDLE_FIRST = (0.60, 0.45, 0.80, 0.30)
"""Budgets in the order in which all jobs are run: a run that is stopped has all jobs at some."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", help="a job by name; nothing is kept then")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, metavar="HOURS", help="begin no case then"
    )
    arguments = parser.parse_args()
    only = arguments.only
    if only is not None:
        chosen = [planned for planned in JOBS if planned.name in only]
        rows = [compare(planned, fraction) for planned in chosen for fraction in BUDGETS]
        print(json.dumps({"summary": summary(rows), "rows": rows}, indent=1))
        return
    kept = Rows(NAME, "python benchmarks/plan/torch_planners.py", "transformers", "pulp", "pwlf")
    began = time.monotonic()
    for fraction in MIDDLE_FIRST:
        for planned in sorted(JOBS, key=lambda planned: QUICK_FIRST.index(planned.name)):
            is_late = time.monotonic() - began > arguments.stop_after * 3600
            if not is_late and not kept.has(model=planned.name, budget_fraction=fraction):
                kept.add(compare(planned, fraction))
    found = summary(kept.rows)
    left_out = [
        f"{planned.name} {fraction:.0%}"
        for planned in JOBS
        for fraction in BUDGETS
        if not kept.has(model=planned.name, budget_fraction=fraction)
    ]
    kept.keep({"device": DEVICE, "not_run_for_lack_of_time": left_out, "summary": found})
    print(f"{RESULTS / NAME}: {json.dumps(found)}")


@cache
def _bench(planned: PlannedJob) -> tuple[Bench, Outcome, dict[str, Peer]]:
    bench = Bench(planned.make(), find_device(DEVICE), planned.global_batch_size, planned.precision)
    return bench, bench.plain_outcome(), torch_planners(bench)


def compare(planned: PlannedJob, fraction: float) -> dict[str, Any]:
    """One job at one budget."""
    bench, plain, planners = _bench(planned)
    budget_bytes = int(plain.peak_device_bytes * fraction)
    row = {
        "model": planned.name,
        "global_batch_size": planned.global_batch_size,
        "precision": str(planned.precision),
        "budget_fraction": fraction,
        "budget_bytes": budget_bytes,
        "plain_peak_device_bytes": plain.peak_device_bytes,
        "plain_step_seconds": plain.step_seconds,
        "ours": told(bench.plan(budget_bytes), plain, budget_bytes),
        "peers": {
            name: _beside_ours(bench, plain, peer(bench, budget_bytes), budget_bytes)
            for name, peer in planners.items()
        },
    }
    print(_line(row), flush=True)
    return row


def _beside_ours(bench: Bench, plain: Outcome, way: Any, budget_bytes: int) -> dict[str, Any] | None:
    """What a planner's choice comes to, and our plan for the bytes that it takes."""
    found = told(way, plain, budget_bytes)
    if isinstance(way, Outcome) and found is not None:
        ours = bench.plan(way.peak_device_bytes)
        found["ours_at_its_peak"] = told(ours, plain, way.peak_device_bytes)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How we do against each planner."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    found: dict[str, Any] = {
        "cases": len(rows),
        "ours_within_budget": sum(row["ours"] is not None and row["ours"]["within_budget"] for row in rows),
    }
    for name in names:
        pairs = list(_pairs(rows, name))
        over = [way["peak_device_bytes"] / row["budget_bytes"] - 1 for row, way in pairs]
        ratios = [
            way["step_seconds"] / way["ours_at_its_peak"]["step_seconds"]
            for _row, way in pairs
            if way["ours_at_its_peak"]
        ]
        found[name] = {
            "found_a_solution": len(pairs),
            "within_budget": sum(way["within_budget"] for _row, way in pairs),
            "within_budget_if_nothing_were_cached": sum(
                way["peak_allocated_bytes"] + CONTEXT_BYTES <= row["budget_bytes"] for row, way in pairs
            ),
            "beyond_budget_median_fraction": round(statistics.median(over), 4) if over else None,
            "beyond_budget_most_fraction": round(max(over), 4) if over else None,
            "at_its_true_peak": _speedups(ratios),
        }
    return found


def _pairs(rows: Sequence[dict[str, Any]], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for row in rows:
        way = row["peers"].get(name)
        if way is not None and "failed" not in way:
            yield row, way


def _speedups(ratios: Sequence[float]) -> dict[str, Any] | None:
    """Their step time over ours."""
    if not ratios:
        return None
    return {
        "cases": len(ratios),
        "we_are_at_least_as_fast": sum(ratio >= 1 for ratio in ratios),
        "geometric_mean_speedup": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
        "least_speedup": round(min(ratios), 3),
    }


def _line(row: dict[str, Any]) -> str:
    def cell(way: dict[str, Any] | None) -> str:
        if way is None:
            return "-"
        if "failed" in way:
            return way["failed"]
        used = f"{way['peak_device_bytes'] / row['budget_bytes']:.0%}"
        at_its_peak = way.get("ours_at_its_peak")
        beside = f", ours there {at_its_peak['overhead']:+.1%}" if at_its_peak else ""
        return f"{way['overhead']:+.1%} ({used} of the budget{beside})"

    peers = "; ".join(f"{name} {cell(way)}" for name, way in row["peers"].items())
    return f"{row['model']} {row['budget_fraction']:.0%}: ours {cell(row['ours'])}; {peers}"


if __name__ == "__main__":
    main()
