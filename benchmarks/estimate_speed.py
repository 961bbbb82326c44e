"""How long an estimate takes after imports, and how much memory it needs.

    python benchmarks/estimate_speed.py

Each model is estimated in processes of its own: nothing is warm, and the peak resident memory is of that one.
Asked for are BERT-large at micro-batch 4 × 512 tokens in under 5 s, and 7 billion parameters or more in under
4 GiB.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import commit, machine

RESULTS = Path(__file__).parent / "results" / "estimate_speed.json"
DEVICE = "RTX 3090"
REPEATS = 3
CASES = (
    ("bert-large", 4, 512),
    ("gpt2-xl", 1, 1024),
    ("llama-3-8b", 1, 4096),
    ("vit-large", 16, None),
    ("resnet50", 32, None),
    ("unet", 8, None),
)


def main() -> None:
    if len(sys.argv) > 1:
        name, micro_batch_size, seq_len = json.loads(sys.argv[1])
        print(json.dumps(estimate(name, micro_batch_size, seq_len)))
        return
    rows = []
    for case in CASES:
        runs = [run(case) for _ in range(REPEATS)]
        row = {
            "model": case[0],
            "micro_batch_size": case[1],
            "seq_len": case[2],
            "parameters": runs[0]["parameters"],
            "import_seconds": round(statistics.median(run["import_seconds"] for run in runs), 2),
            "estimate_seconds": round(statistics.median(run["estimate_seconds"] for run in runs), 2),
            "peak_resident_bytes": max(run["peak_resident_bytes"] for run in runs),
            "predicted_peak_reserved_bytes": runs[0]["predicted_peak_reserved_bytes"],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    document = {
        "command": "python benchmarks/estimate_speed.py",
        "commit": commit(),
        "machine": machine(),
        "device": DEVICE,
        "repeats": REPEATS,
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run(case: tuple[str, int, int | None]) -> dict[str, Any]:
    """One estimate in a fresh process."""
    command = [sys.executable, __file__, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def estimate(name: str, micro_batch_size: int, seq_len: int | None) -> dict[str, Any]:
    """Import, then estimate; both timed."""
    start = time.perf_counter()
    import torch
    import transformers  # noqa: F401

    import brimful as bf
    import brimful.api
    from brimful.architectures import resolve_job

    imported = time.perf_counter()
    job = resolve_job(name) if seq_len is None else resolve_job(name, sequence_length=seq_len)
    found = bf.estimate(job, DEVICE, micro_batch_size=micro_batch_size)
    done = time.perf_counter()
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in job.model().parameters())
    return {
        "parameters": parameters,
        "import_seconds": imported - start,
        "estimate_seconds": done - imported,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_peak_reserved_bytes": found.predicted_peak_reserved_bytes,
    }


if __name__ == "__main__":
    main()
