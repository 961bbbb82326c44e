"""The studies: published tables beside what is predicted, and their small scales trained on this machine.

python benchmarks/studies.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from brimful.studies import STUDIES, run_study
from machine import keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="one study; writes no results")
    parser.add_argument("--predicted", action="store_true", help="without the small scales; writes no results")
    options = parser.parse_args()
    studies, summary = [], {}
    for study in STUDIES.values():
        if options.only not in (None, study.name):
            continue
        start = time.perf_counter()
        result = run_study(study, runs_small=not options.predicted)
        print(f"{result}\n", flush=True)
        studies.append(result.to_json() | {"seconds": round(time.perf_counter() - start, 1)})
        summary[study.name] = {
            "peak": summarised(result.peak_errors()),
            "speed": summarised(result.speed_errors()),
            "small_seconds": round(sum(row.small.seconds for row in result.rows if row.small), 1),
        }
    print(json.dumps(summary, indent=1))
    if options.only is None and not options.predicted:
        command = "python benchmarks/studies.py"
        keep("studies.json", command, {"summary": summary, "studies": studies}, "transformers")


def summarised(errors: tuple[float | None, ...]) -> dict[str, float | int | None]:
    """Of the errors of the rows that have one."""
    known = [abs(error) for error in errors if error is not None]
    return {"rows": len(known), "median": statistics.median(known) if known else None}


if __name__ == "__main__":
    main()
