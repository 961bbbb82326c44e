"""How far measured peaks exceeded predictions, as the table from which a plan's probability is computed.

    python benchmarks/peak_excess.py

Reads `results/gpu_truth.json` (public runs on GPUs) and `results/job_zoo.json` (plans applied and measured on
a CPU), and writes `src/brimful/data/peak_excess.csv`. On a GPU an excess is (measured − predicted) / (upper end
of the interval − predicted); on a CPU it is (measured − predicted) / predicted, for jobs of which nothing is
uncertain and for others. The table has the fraction of cases above some excesses, and the mean excess above the
last of them, by which an exponential tail continues (peaks over threshold).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = HERE.parent / "src" / "brimful" / "data" / "peak_excess.csv"
TAIL_FRACTION = 0.15
"""Cases from which the tail begins: few enough to show its shape, enough for a mean. A choice."""
POINTS = 6


def main() -> None:
    rows = [row for kind, excesses in measured().items() for row in table_of(kind, excesses)]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", "excess", "probability", "tail_mean", "cases", "source"])
        writer.writerows(rows)
    print(TABLE.read_text(encoding="utf-8"))


def measured() -> dict[str, list[float]]:
    """Excesses by kind of prediction: "cuda", "cpu", and "cpu uncertain"."""
    found: dict[str, list[float]] = {"cuda": [], "cpu": [], "cpu uncertain": []}
    for row in read("gpu_truth.json")["rows"]:
        ratio = 1 / (1 + row["error_fraction"])
        upper = (1 + row["interval_fractions"][1]) * ratio
        found["cuda"].append((ratio - 1) / (upper - 1))
    for row in read("job_zoo.json")["rows"]:
        for plan in (row["free"], row["pinned"]):
            if plan and plan.get("true_bytes") and plan.get("predicted_bytes"):
                kind = "cpu uncertain" if row["uncertain"] else "cpu"
                found[kind].append(plan["true_bytes"] / plan["predicted_bytes"] - 1)
    return found


def table_of(kind: str, excesses: list[float]) -> Iterator[list[object]]:
    """Probabilities of more than some excesses, rising, and the mean excess of the tail."""
    cases = len(excesses)
    ordered = sorted(excesses, reverse=True)
    tail_cases = max(round(TAIL_FRACTION * cases), 3)
    threshold = max(ordered[tail_cases], 0.0)
    tail = [each - threshold for each in ordered if each > threshold]
    tail_mean = sum(tail) / len(tail)
    points = sorted({threshold * part / (POINTS - 1) for part in range(POINTS)})
    for excess in points:
        above = sum(each > excess for each in excesses)
        yield [
            kind,
            f"{excess:.4g}",
            f"{above / cases:.4g}",
            f"{tail_mean:.4g}",
            cases,
            "benchmarks/peak_excess.py",
        ]


def read(name: str) -> dict[str, list[dict[str, object]]]:
    content: dict[str, list[dict[str, object]]] = json.loads((HERE / "results" / name).read_text("utf-8"))
    return content


if __name__ == "__main__":
    main()
