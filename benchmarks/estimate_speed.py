"""How long an estimate takes after imports, and how much memory; torch's MemTracker beside it.

    python benchmarks/estimate_speed.py

Each model is estimated in processes of its own. A first estimate also imports what torch and transformers
load at first use; so a tiny model is estimated first, and both times are told: that of the first estimate of a
process, and that of the model once all is imported. Then a further micro-batch size from the two captures of an
`Estimator`, and, once, two steps of the same model under torch's own MemTracker, which tells only what is
allocated.

The targets are the project's own, for 2 cores; whether each is reached is in the results.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from machine import keep

DEVICE = "RTX 3090"
REPEATS = 3
FURTHER_SIZES = (3, 4, 5, 6, 7)
"""Samples more than those of the first estimate."""
CASES = (
    ("bert-large", 4, 512),
    ("llama-3-8b", 1, 4096),
    ("resnet152", 32, None),
)
TARGETS = {
    "bert-large": {"estimate_seconds": 3.0, "further_micro_batch_seconds": 0.3},
    "llama-3-8b": {"estimate_seconds": 6.0, "further_micro_batch_seconds": 0.3, "peak_resident_bytes": 4 << 30},
    "resnet152": {"estimate_seconds": 6.0, "further_micro_batch_seconds": 0.3},
}


def main() -> None:
    if len(sys.argv) > 1:
        name, micro_batch_size, seq_len, tracks = json.loads(sys.argv[1])
        print(json.dumps(estimate(name, micro_batch_size, seq_len, tracks=tracks)))
        return
    rows = []
    for case in CASES:
        runs = [run(case, tracks=repeat == 0) for repeat in range(REPEATS)]
        row = {
            "model": case[0],
            "micro_batch_size": case[1],
            "seq_len": case[2],
            "parameters": runs[0]["parameters"],
            "peak_resident_bytes": max(run["peak_resident_bytes"] for run in runs),
            "predicted_peak_reserved_bytes": runs[0]["predicted_peak_reserved_bytes"],
        } | {
            name: round(statistics.median(run[name] for run in runs if name in run), 3)
            for name in runs[0]
            if name.endswith("_seconds")
        }
        row["targets_missed"] = [name for name, target in TARGETS[row["model"]].items() if row[name] > target]
        rows.append(row)
        print(json.dumps(row), flush=True)
    content = {"device": DEVICE, "repeats": REPEATS, "targets": TARGETS, "rows": rows}
    keep("estimate_speed.json", "python benchmarks/estimate_speed.py", content, "transformers")


def run(case: tuple[str, int, int | None], *, tracks: bool) -> dict[str, Any]:
    """One estimate in a fresh process, with MemTracker if `tracks`."""
    command = [sys.executable, __file__, json.dumps([*case, tracks])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def estimate(name: str, micro_batch_size: int, seq_len: int | None, *, tracks: bool) -> dict[str, Any]:
    """Import, estimate something tiny, then the model itself, then another size of it; all timed."""
    start = time.perf_counter()
    import torch
    import transformers  # noqa: F401

    import brimful as bf
    import brimful.api
    from brimful.models import resolve_job

    imported = time.perf_counter()
    job = resolve_job(name) if seq_len is None else resolve_job(name, sequence_length=seq_len)
    small = job if seq_len is None else resolve_job(name, sequence_length=8, num_hidden_layers=1)
    bf.estimate(small if seq_len is not None else resolve_job("unet"), DEVICE, micro_batch_size=1)
    if seq_len is None:
        job.model()  # what the model's own classes import
    warm = time.perf_counter()
    found = bf.estimate(job, DEVICE, micro_batch_size=micro_batch_size)
    done = time.perf_counter()
    peak_resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.at(2)  # captures at 2 and 3 samples; 1 would be captured for itself
    further = []
    for larger in FURTHER_SIZES:
        captured = time.perf_counter()
        found.at(micro_batch_size + larger)
        further.append(time.perf_counter() - captured)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in job.model().parameters())
    tracked = {"mem_tracker_seconds": mem_tracker_seconds(job, micro_batch_size)} if tracks else {}
    return tracked | {
        "parameters": parameters,
        "import_seconds": imported - start,
        "first_estimate_seconds": warm - imported,
        "estimate_seconds": done - warm,
        "further_micro_batch_seconds": statistics.median(further),
        "peak_resident_bytes": peak_resident_bytes,
        "predicted_peak_reserved_bytes": found.predicted_peak_reserved_bytes,
    }


def mem_tracker_seconds(job: Any, micro_batch_size: int) -> float:
    """Two steps under torch's MemTracker on fake tensors, as many as an estimate captures."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from brimful.batches import make_batch, map_tensors
    from brimful.capture.fakes.model import build_fake_model, fakes_behave, to_fake
    from brimful.capture.values.known import KnownValues
    from brimful.optimizers import make_optimizer

    start = time.perf_counter()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_fake_model(job, mode, KnownValues())
    batch = map_tensors(make_batch(job, micro_batch_size), lambda tensor: to_fake(tensor, mode))
    with mode, fakes_behave():
        optimizer = make_optimizer(job, model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                job.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
