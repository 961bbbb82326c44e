"""Statistics of predicted against measured times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import numpy as np
from scipy.stats import spearmanr


def summary_of(rows: list[dict[str, Any]], *, least_for_rank: int = 5) -> dict[str, float]:
    """Errors of rows with `measured_seconds` and `predicted_seconds`.

    Args:
        rows: At least one.
        least_for_rank: Rows from which a rank correlation is given.

    Returns:
        Median and 90th percentile of the absolute relative error, the median of predicted / measured (the
        bias), the largest errors both ways, and Spearman's rank correlation, of times per sample where rows
        have a batch size.
    """
    ratios = [row["predicted_seconds"] / row["measured_seconds"] for row in rows]
    errors = [abs(ratio - 1) for ratio in ratios]
    found = {
        "rows": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": float(np.quantile(errors, 0.9)),
        "median_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
    }
    if len(rows) >= least_for_rank:
        measured, predicted = (
            [row[f"{name}_seconds"] / row.get("batch_size", 1) for row in rows]
            for name in ("measured", "predicted")
        )
        found["rank_correlation"] = float(spearmanr(measured, predicted).statistic)
    return {name: round(value, 4) for name, value in found.items()}


def plain_roofline_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors of the peer: rows with `roofline_seconds` in place of predicted ones."""
    return summary_of([row | {"predicted_seconds": row["roofline_seconds"]} for row in rows])


def by(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """The same for each value of a field, those with most rows first."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return {name: summary_of(group) for name, group in sorted(groups.items(), key=lambda each: -len(each[1]))}
