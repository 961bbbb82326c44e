"""Every model that is known by name: its parameters beside the published count, and the time of an estimate.

Usage: python benchmarks/models_by_name.py

The published counts are those that the Hugging Face Hub shows of each model's weights. An estimate is of one
sample on a GPU without a limit of memory, in one process, imports done.
"""

from __future__ import annotations

import time
from typing import Any

import brimful as bf
from brimful.errors import BrimfulError
from brimful.models.hub import known_models
from machine import keep


def row(name: str, published: int | None) -> dict[str, Any]:
    """One model."""
    began = time.perf_counter()
    try:
        found = bf.estimate(bf.find_architecture(name), "H100 SXM", micro_batch_size=1, budget="100TiB")
    except BrimfulError as error:
        return {"name": name, "published_parameters": published, "error": str(error)}
    return {
        "name": name,
        "published_parameters": published,
        "parameters": found.parameter_count,
        "predicted_peak_device_bytes": found.predicted_peak_device_bytes,
        "seconds": round(time.perf_counter() - began, 2),
    }


def main() -> None:
    rows = []
    for each in known_models().values():
        rows.append(row(each.name, each.parameter_count))
        print(rows[-1], flush=True)
    equal = sum(each.get("parameters") == each["published_parameters"] for each in rows)
    seconds = sorted(each["seconds"] for each in rows if "seconds" in each)
    summary = {
        "models": len(rows),
        "with_a_published_count": sum(each["published_parameters"] is not None for each in rows),
        "equal": equal,
        "failed": sum("error" in each for each in rows),
        "median_seconds": seconds[len(seconds) // 2],
        "most_seconds": seconds[-1],
    }
    print(summary)
    command = "python benchmarks/models_by_name.py"
    keep("models_by_name.json", command, {"summary": summary, "rows": rows}, "transformers", "diffusers")


if __name__ == "__main__":
    main()
