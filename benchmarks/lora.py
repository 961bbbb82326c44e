"""LoRA, DoRA and IA3 over frozen weights, quantised or not: predicted beside measured peak on this CPU.

    python benchmarks/lora.py
    python benchmarks/lora.py torchao

Small models of transformers with random weights, quantised by bitsandbytes or torchao and adapted by peft. Each
is given as a function that builds it, which is captured without weights, and as a module that is there already.
"""

from __future__ import annotations

import logging
import statistics
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import brimful as bf
from lora_models import FAMILIES, TORCHAO, WEIGHTS, Weights, adapted_job
from machine import Rows

SAMPLES = 4
GPU = "RTX 4090"
ROWS = (
    *((family, "lora", kept) for family in FAMILIES for kept in WEIGHTS),
    *(
        (family, "dora", kept)
        for family in ("llama", "opt", "qwen2")
        for kept in ("fp32", "nf4, double", "int8")
    ),
    *((family, "ia3", kept) for family in ("llama", "opt", "t5") for kept in ("fp32", "nf4, double", "int8")),
)
TORCHAO_ROWS = (
    *((family, "lora", kept) for family in FAMILIES for kept in TORCHAO),
    *(
        (family, adapter, kept)
        for family in ("llama", "opt")
        for adapter in ("dora", "ia3")
        for kept in ("int8", "nf4")
    ),
)


def compare(
    weights: Mapping[str, Weights], family: str, adapter: str, kept: str, *, is_built: bool
) -> dict[str, Any]:
    """One model: its peak on this CPU, predicted and measured, and predicted for a GPU."""
    row: dict[str, Any] = {"family": family, "adapter": adapter, "weights": kept, "is_built": is_built}
    try:
        job = adapted_job(family, weights[kept], adapter, is_built=is_built)
    except Exception as error:  # a library refuses the combination
        return row | {"status": f"not built: {type(error).__name__}: {error}"}
    settings = bf.Settings(micro_batch_size=SAMPLES)
    try:
        predicted = bf.estimate(job, "cpu", micro_batch_size=SAMPLES).predicted_peak_allocated_bytes
        on_gpu = bf.estimate(job, GPU, micro_batch_size=SAMPLES).predicted_peak_allocated_bytes
    except bf.BrimfulError as error:
        return row | {"status": f"not captured: {error}"}
    row |= {"predicted_peak_allocated_bytes": predicted, f"predicted_on_{GPU}_bytes": on_gpu}
    try:
        measured = bf.measure(job, settings, device="cpu").measured_peak_allocated_bytes
    except Exception as error:
        return row | {"status": f"cannot be trained on a CPU: {type(error).__name__}: {error}"}
    return row | {
        "measured_peak_allocated_bytes": measured,
        "error_fraction": predicted / measured - 1,
        "status": "measured",
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rows there are of each status, and the errors of those that are measured."""
    errors = [abs(row["error_fraction"]) for row in rows if row["status"] == "measured"]
    statuses = [row["status"].partition(":")[0] for row in rows]
    return {
        "rows": len(rows),
        "statuses": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "median_error_fraction": statistics.median(errors),
        "largest_error_fraction": max(errors),
        "within_1_percent": sum(error <= 0.01 for error in errors),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    library = sys.argv[1] if len(sys.argv) > 1 else "bitsandbytes"
    chosen, weights = (TORCHAO_ROWS, TORCHAO) if library == "torchao" else (ROWS, WEIGHTS)
    name, command = ("lora_torchao.json", " torchao") if library == "torchao" else ("lora.json", "")
    rows = Rows(name, f"python benchmarks/lora.py{command}", "transformers", "peft", library)
    for family, adapter, kept in chosen:
        for is_built in (False, True):
            key = {"family": family, "adapter": adapter, "weights": kept, "is_built": is_built}
            if not rows.has(**key):
                row = compare(weights, family, adapter, kept, is_built=is_built)
                rows.add(row)
                error = row.get("error_fraction")
                print(*key.values(), row["status"][:200], "" if error is None else f"{error:+.3%}", flush=True)
    totals = summary(rows.rows)
    print(totals)
    rows.keep({"summary": totals})


if __name__ == "__main__":
    main()
