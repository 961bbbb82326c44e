"""The studies: published tables beside what is predicted, and their small scales trained on this machine.

python benchmarks/studies.py
"""

from __future__ import annotations

import statistics
import time

from brimful.report import study_document
from brimful.studies import STUDIES, run_study
from machine import keep


def main() -> None:
    studies, peaks, speeds = [], [], []
    for study in STUDIES.values():
        start = time.perf_counter()
        result = run_study(study, runs_small=True)
        print(f"{result}\n", flush=True)
        studies.append(study_document(result) | {"seconds": round(time.perf_counter() - start, 1)})
        peaks += [abs(error) for error in result.peak_errors() if error is not None]
        speeds += [abs(error) for error in result.speed_errors() if error is not None]
    summary = {
        "rows_with_published_peak": len(peaks),
        "median_peak_error": statistics.median(peaks),
        "rows_with_published_speed": len(speeds),
        "median_speed_error": statistics.median(speeds),
    }
    print(summary)
    keep(
        "studies.json", "python benchmarks/studies.py", {"summary": summary, "studies": studies}, "transformers"
    )


if __name__ == "__main__":
    main()
