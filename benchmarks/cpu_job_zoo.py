"""Whole jobs as people write them: estimate, plan at 60 %, apply, measure, each beside what happens on a CPU.

    python benchmarks/cpu_job_zoo.py [--result FILE.json] [name ...]

`job_zoo/` has the jobs, `job_zoo/examine.py` says how one is judged. Each runs in a process of its own, so that
one that ends the interpreter is a row like another. Names run some jobs alone and write nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from brimful.utils.quantities import format_bytes
from job_zoo import JOBS, JobCase
from job_zoo.examine import CLOSE_FRACTION, REFUSED, SUPPORTED, WARNED, WRONG, Row, examine
from machine import Rows
from own_process import EndedError, call_apart

COMMAND = "python benchmarks/cpu_job_zoo.py"
PACKAGES = ("transformers", "bitsandbytes", "peft", "diffusers", "accelerate", "lightning", "torch_geometric")
MOST_SECONDS = 1800.0
"""For one job."""
AT_ONCE = 2
"""Jobs that are examined at once; no time is measured."""


def examine_apart(case: JobCase) -> dict[str, Any]:
    """A job's row, from a process of its own."""
    began = time.perf_counter()
    try:
        row: dict[str, Any] = call_apart(
            examined, case.name, seconds=MOST_SECONDS, preload=("job_zoo.examine", "transformers")
        )
    except EndedError as error:
        why = f"the interpreter is ended {error}"
        lost = Row(name=case.name, kind=case.kind, samples=case.samples, status=WRONG, why=why, wrongs=[why])
        row = lost.to_json() | {"seconds": round(time.perf_counter() - began, 2)}
    return row


def examined(name: str) -> dict[str, Any]:
    """The row of the job of a name."""
    (case,) = [case for case in JOBS if case.name == name]
    return examine(case).to_json()


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error_fraction"]) for row in rows if row["error_fraction"] is not None]
    plans = [plan for row in rows for plan in (row["free"], row["pinned"]) if plan is not None]
    whole = [
        plan
        for row in rows
        for plan in (row["free"], row["pinned"])
        if plan is not None and plan["micro_batch_size"] == row["samples"] and not plan["is_chunked"]
    ]
    others = [plan for plan in plans if plan not in whole and plan["largest_difference"] is not None]
    drawn = [row for row in rows if row["free"] is not None and row["free"]["largest_difference"] is None]
    counts = Counter(row["status"] for row in rows)
    return {
        "rows": len(rows),
        "kinds": len({row["kind"] for row in rows}),
        **{status: counts[status] for status in (SUPPORTED, REFUSED, WARNED, WRONG)},
        "predicted": len(errors),
        "median_error_fraction": statistics.median(errors),
        "predicted_within_1_percent": sum(error <= CLOSE_FRACTION for error in errors),
        "others_named": sum(
            abs(row["error_fraction"] or 0) > CLOSE_FRACTION and bool(row["named"]) for row in rows
        ),
        "largest_error_fraction": max(errors),
        "plans": len(plans),
        "plans_within_budget": sum(plan["true_bytes"] <= plan["budget_bytes"] for plan in plans),
        "largest_part_of_budget": max(plan["true_bytes"] / plan["budget_bytes"] for plan in plans),
        "pinned_plans": len(whole),
        "pinned_plans_equal_to_the_last_bit": sum(plan["is_bitwise"] for plan in whole),
        "split_or_chunked_plans": len(others),
        "split_or_chunked_plans_within_rounding": sum(
            plan["largest_difference"] <= plan["bound"] for plan in others
        ),
        "split_plans_that_draw_random_numbers": len(drawn),
        "of_these_said_to": sum("random" in row["free"]["certificate"] for row in drawn),
    }


def show(row: dict[str, Any]) -> None:
    error, plan = row["error_fraction"], row["free"]
    error_said = "-" if error is None else f"{error:+.2%}"
    of_budget = "-" if plan is None else f"{plan['true_bytes'] / plan['budget_bytes']:.1%}"
    true = "-" if row["true_bytes"] is None else format_bytes(row["true_bytes"])
    print(
        f"{row['name']:<52} {row['status']:<9} {true:>9} {error_said:>9} {of_budget:>7} {row['seconds']:>6}  "
        f"{row['why'][:200]}",
        flush=True,
    )


def main() -> int:
    """Examine all jobs, or some; how many are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--result", default="job_zoo.json")
    options = parser.parse_args()
    is_plain = options.result == "job_zoo.json"
    rows = Rows(options.result, COMMAND + ("" if is_plain else f" --result {options.result}"), *PACKAGES)
    left_out = {case.name: f"needs {case.missing}" for case in JOBS if case.missing}
    wanted = [case for case in JOBS if not options.names or case.name in options.names]
    cases = [case for case in wanted if not case.missing and not rows.has(name=case.name)]
    print(f"{'job':<52} {'status':<9} {'true':>9} {'error':>9} {'budget':>7} {'s':>6}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(examine_apart, cases):
            show(row)
            if not options.names:
                rows.add(row)
    if options.names:
        return 0
    summary = summary_of(rows.rows)
    print(summary)
    rows.keep({"summary": summary, "left_out": left_out})
    return summary[WRONG]


if __name__ == "__main__":
    sys.exit(main())
