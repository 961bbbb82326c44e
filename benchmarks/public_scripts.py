"""Training scripts of public repositories: estimate, plan in the least feasible budget and 10 %, three steps.

    python benchmarks/public_scripts.py PATH            # all; stopped, it goes on where it was
    python benchmarks/public_scripts.py PATH NAME ...   # some, not kept
    python benchmarks/public_scripts.py --list          # what PATH needs

PATH is a folder of checkouts, each named OWNER+NAME and at the commit that `--list` names. Only their code for
models, losses and optimizers is imported; einops has to be installed. `public/` has the scripts, and
`public/examine.py` says how one is judged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from brimful.utils.quantities import format_bytes
from machine import Rows, commit_at
from own_process import EndedError, call_apart
from public import SCRIPTS, Script
from public.examine import CLOSE_FRACTION, WRONG, examined

RESULT = "public_scripts.json"
COMMAND = "python benchmarks/public_scripts.py PATH"
MOST_SECONDS = 600.0
"""For one script."""
LINE = "{:<34} {:<8} {:>9} {:>8} {:>9} {:>7} {:>7} {:>6}  {}"
AT_ONCE = 2
"""Scripts that are examined at once; planning is timed beside another."""


def examined_apart(script: Script, checkouts: Path) -> dict[str, Any]:
    """A script's row, from a process of its own."""
    began = time.perf_counter()
    try:
        row: dict[str, Any] = call_apart(
            examined, script.name, checkouts, seconds=MOST_SECONDS, preload=("public.examine",)
        )
    except EndedError as error:
        why = f"the interpreter is ended {error}"
        row = {"name": script.name, "repository": script.repository, "commit": script.commit}
        row |= {"verdict": WRONG, "why": why, "seconds": round(time.perf_counter() - began, 2)}
    return row


def missing(checkouts: Path) -> list[str]:
    """The checkouts that are not there, or at another commit."""
    found = {script.repository: script.commit for script in SCRIPTS}
    return [
        f"{repository}@{commit}"
        for repository, commit in found.items()
        if not (folder := checkouts / repository.replace("/", "+")).is_dir() or commit_at(folder) != commit
    ]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error_fraction"]) for row in rows if row["error_fraction"] is not None]
    plans = [plan for row in rows for plan in (row["plan"], row["whole"]) if plan is not None]
    return {
        "scripts": len(rows),
        "repositories": len({row["repository"] for row in rows}),
        "verdicts": Counter(row["verdict"] for row in rows),
        "estimates": len(errors),
        "estimates_within_half_a_percent": sum(error <= CLOSE_FRACTION for error in errors),
        "others_said_to_be_uncertain": sum(
            abs(row["error_fraction"] or 0) > CLOSE_FRACTION and bool(row["uncertain"]) for row in rows
        ),
        "median_error_fraction": statistics.median(errors),
        "largest_error_fraction": max(errors),
        "plans": len(plans),
        "plans_within_budget": sum(plan["true_bytes"] <= plan["budget_bytes"] for plan in plans),
        "largest_part_of_budget": max(plan["true_bytes"] / plan["budget_bytes"] for plan in plans),
        "plans_by_verdict": Counter(plan["verdict"] for plan in plans),
        "median_planning_seconds": statistics.median(plan["planning_seconds"] for plan in plans),
        "longest_planning_seconds": max(plan["planning_seconds"] for plan in plans),
    }


def show(row: dict[str, Any]) -> None:
    error, plan, true_bytes = row.get("error_fraction"), row.get("plan"), row.get("true_bytes")
    said = ["-", "-", "-", "-", "-"]
    if true_bytes is not None:
        said[:2] = [format_bytes(true_bytes), f"{error:+.2%}"]
    if plan is not None:
        of_budget = plan["true_bytes"] / plan["budget_bytes"]
        said[2:] = [format_bytes(plan["budget_bytes"]), f"{of_budget:.1%}", str(plan["planning_seconds"])]
    print(LINE.format(row["name"], row["verdict"], *said, row["seconds"], row["why"][:300]), flush=True)


def main() -> int:
    """Examine all scripts, or some; how many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="the folder of checkouts")
    parser.add_argument("names", nargs="*", help="only these scripts; nothing is kept")
    parser.add_argument("--list", action="store_true", help="the repositories and their commits")
    options = parser.parse_args()
    if options.list or options.path is None:
        print(*dict.fromkeys(f"{script.repository}@{script.commit}" for script in SCRIPTS), sep="\n")
        return 0
    if lacking := missing(options.path):
        parser.error(f"{options.path} lacks {', '.join(lacking)}")
    rows = Rows(RESULT, COMMAND, "einops")
    scripts = [
        script
        for script in SCRIPTS
        if (script.name in options.names if options.names else not rows.has(name=script.name))
    ]
    print(LINE.format("script", "verdict", "true", "error", "budget", "of it", "plan s", "all s", "why"))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda script: examined_apart(script, options.path.resolve()), scripts):
            show(row)
            if not options.names:
                rows.add(row)
    if options.names:
        return 0
    summary = summary_of(rows.rows)
    print(summary)
    rows.keep({"summary": summary})
    return int(summary["verdicts"][WRONG])


if __name__ == "__main__":
    sys.exit(main())
