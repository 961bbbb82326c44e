"""Plans beside what people do by hand, at the same budgets, in predicted peak and time.

    python benchmarks/plan/simulated.py [--only NAME]...

Every way to train is captured with it applied: its peak is that of the allocator's simulation (against real
steps within 0.1 % on a CPU, `cpu_truth`; on GPUs see `gpu_truth`), its time that of the cost model, the same
for all. The peers take the largest micro-batch that fits, the same precision and the same fused optimizer. A
batch that BatchNorm couples is not split, by anyone. A second plan may use the host's memory too, as plans may
unless they are told not to; the peers have no such option.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brimful.devices import find_device
from brimful.utils.quantities import GIB
from machine import RESULTS, Rows
from plan.bench import Bench, told
from plan.jobs import JOBS, PlannedJob
from plan.peers import PEERS

DEVICE = "A100 80GB SXM"
BUDGETS = (0.30, 0.45, 0.60, 0.80)
HOST_BYTES = 32 * GIB
"""That a plan may use of the host's memory, where it may use any. A choice: `brimful plan` takes half of what
the machine has."""
NAME = "plan_simulated.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", help="this job; rows are kept until all are there")
    only = parser.parse_args().only
    results = Rows(NAME, "python benchmarks/plan/simulated.py", "transformers")
    for planned in JOBS:
        if not results.has(model=planned.name) and (only is None or planned.name in only):
            for row in compare(planned):
                results.add(row)
    if all(results.has(model=planned.name) for planned in JOBS):
        found = summary(results.rows)
        results.keep({"device": DEVICE, "host_bytes": HOST_BYTES, "summary": found})
        print(f"{RESULTS / NAME}: {json.dumps(found)}")


def compare(planned: PlannedJob) -> list[dict[str, Any]]:
    """One job at all budgets."""
    bench = Bench(planned.make(), find_device(DEVICE), planned.global_batch_size, planned.precision)
    plain = bench.plain_outcome()
    rows = []
    for fraction in BUDGETS:
        budget_bytes = int(plain.peak_device_bytes * fraction)
        began = time.perf_counter()
        ours = bench.plan(budget_bytes)
        seconds = time.perf_counter() - began
        row = {
            "model": planned.name,
            "global_batch_size": planned.global_batch_size,
            "precision": str(planned.precision),
            "budget_fraction": fraction,
            "budget_bytes": budget_bytes,
            "plain_peak_device_bytes": plain.peak_device_bytes,
            "plain_step_seconds": plain.step_seconds,
            "ours": told(ours, plain, budget_bytes),
            "ours_with_host": told(bench.plan(budget_bytes, host_bytes=HOST_BYTES), plain, budget_bytes),
            "planning_seconds_with_captures_at_hand": round(seconds, 2),
            "peers": {
                name: told(peer(bench, budget_bytes), plain, budget_bytes) for name, peer in PEERS.items()
            },
        }
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How we do against each peer, and with the host's memory."""
    return _summary(rows, "ours") | {"with host memory": _summary(rows, "ours_with_host")}


def _summary(rows: list[dict[str, Any]], way: str) -> dict[str, Any]:
    rows = [row | {"ours": row[way]} for row in rows]
    feasible = [row for row in rows if row["ours"] is not None]
    found: dict[str, Any] = {
        "cases": len(rows),
        "ours_within_budget": sum(row["ours"]["within_budget"] for row in feasible),
        "budget_used_median": round(
            statistics.median(row["ours"]["peak_device_bytes"] / row["budget_bytes"] for row in feasible), 3
        ),
    }
    for name in PEERS:
        pairs = [
            (row["peers"][name]["step_seconds"], row["ours"]["step_seconds"])
            for row in feasible
            if row["peers"][name] and row["peers"][name]["within_budget"]
        ]
        ratios = [theirs / ours for theirs, ours in pairs]
        found[name] = {
            "cases": sum(row["peers"][name] is not None for row in rows),
            "within_budget": len(pairs),
            "we_are_at_least_as_fast": sum(ratio >= 1 for ratio in ratios),
            "geometric_mean_speedup": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
            "least_speedup": round(min(ratios), 3),
        }
    return found


def _line(row: dict[str, Any]) -> str:
    def cell(way: dict[str, Any] | None) -> str:
        if way is None:
            return "-"
        return f"{way['overhead']:+.1%}" + ("" if way["within_budget"] else " over")

    peers = "  ".join(f"{name} {cell(way)}" for name, way in row["peers"].items())
    ours = row["ours"]
    used = (
        "" if ours is None else f" ({ours['peak_device_bytes'] / row['budget_bytes']:.0%}, {ours['settings']})"
    )
    with_host = row["ours_with_host"]
    settings = "" if with_host is None else f" ({with_host['settings']})"
    return (
        f"{row['model']} {row['budget_fraction']:.0%}: ours {cell(ours)}{used}; with the host "
        f"{cell(with_host)}{settings}; {peers}"
    )


if __name__ == "__main__":
    main()
