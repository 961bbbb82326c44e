"""Jobs of the zoo, in which no fault is planted, under `brimful.watch`: what is found, and whether it is true.

    python benchmarks/doctor/clean_jobs.py           # all
    python benchmarks/doctor/clean_jobs.py NAME ...  # some, not kept

Each job trains a few steps in a plain loop, in a process of its own. Each finding was read beside the job's
code; `JUDGED` has those that are not true.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import brimful as bf
from brimful.batches import make_batch
from brimful.execution.setup import build_model
from brimful.optimizers.by_name import make_optimizer
from job_zoo import JOBS
from machine import keep  # beside this folder
from own_process import EndedError, call_apart

COMMAND = "python benchmarks/doctor/clean_jobs.py"
MOST_SECONDS = 180.0
STEPS = 3

JUDGED: dict[tuple[str, str], str] = {}
"""Findings that are not true, by job and check, and why."""


def watched(name: str) -> dict[str, Any]:
    """What is found in a few steps of a job; why it cannot train, if it cannot."""
    (case,) = [case for case in JOBS if case.name == name]
    torch.manual_seed(0)
    try:
        with redirect_stderr(StringIO()):  # the report, which is read as a document
            findings = _findings(case.job(), case.samples)
    except Exception as error:
        return {"job": name, "runs": False, "why": f"{type(error).__name__}: {error}"[:200]}
    rows = [
        {key: each[key] for key in ("check", "line", "what", "size_bytes", "seconds")}
        | {"why_not_true": JUDGED.get((name, each["check"]))}
        for each in findings
    ]
    return {"job": name, "runs": True, "findings": rows}


def _findings(job: bf.Job, samples: int) -> list[dict[str, Any]]:
    """Train in a loop as one writes it."""
    model = build_model(job).train()
    optimizer = make_optimizer(job, model)
    with bf.watch(STEPS) as seen:
        if job.loop is not None:
            job.loop(model, (make_batch(job, samples) for _ in range(STEPS)))
        else:
            for _ in range(2 * STEPS):
                loss = job.loss(model, job.batch(samples) if callable(job.batch) else job.batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    found: list[dict[str, Any]] = seen.document["findings"]
    return found


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of jobs and findings."""
    ran = [row for row in rows if row["runs"]]
    findings = [each for row in ran for each in row["findings"]]
    return {
        "jobs": len(ran),
        "not_run": len(rows) - len(ran),
        "jobs_without_findings": sum(not row["findings"] for row in ran),
        "findings": len(findings),
        "findings_not_true": sum(each["why_not_true"] is not None for each in findings),
        "by_check": dict(Counter(each["check"] for each in findings)),
    }


def main() -> None:
    """Watch all or some, print a line for each, keep all."""
    names = sys.argv[1:]
    rows = []
    for case in JOBS:
        if case.missing or case.gpu or (names and case.name not in names):
            continue
        try:
            row = call_apart(watched, case.name, seconds=MOST_SECONDS, preload=("brimful.api", "transformers"))
        except EndedError as error:
            row = {"job": case.name, "runs": False, "why": f"the process ended {error}"}
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = summary_of(rows)
    print(json.dumps(summary, indent=1))
    if not names:
        keep("clean_jobs.json", COMMAND, {"summary": summary, "rows": rows}, "transformers")


if __name__ == "__main__":
    main()
