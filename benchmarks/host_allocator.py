"""What keeping freed memory saves of a step on a CPU: with malloc as it comes, and as brimful configures it.

    python benchmarks/host_allocator.py

Every third row of `step_time.py` and `unprepared.py`, each way in a process of its own, in turns. Beside the
median of some steps: memory that the kernel cleared in a step (page faults of 4 KiB), and the process's peak.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import warnings
from typing import Any

import brimful.execution.setup
from brimful.profiling import measure_step
from brimful.quantities import MIB, format_seconds
from brimful.settings import Settings
from machine import keep
from step_time import ROWS, UNPREPARED, wait_until_idle

STEPS = 7
ROUNDS = 1
PAGE_BYTES = resource.getpagesize()
TIMED = (*ROWS, *(row for row in UNPREPARED if row.kind == "users"))[::3]
"""Every third of those models."""


def measure_apart(index: int, *, keeps: bool) -> dict[str, float]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["step_time"])
    with context.Pool(1) as process:
        return process.apply(_measure, (index, keeps))


def _measure(index: int, keeps: bool) -> dict[str, float]:
    warnings.simplefilter("ignore")
    row = TIMED[index]
    if not keeps:
        brimful.execution.setup.keep_freed_memory = lambda: False
    settings = Settings(micro_batch_size=row.micro_batch_size)
    wait_until_idle()
    measure_step(row.job(), settings, steps=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    measured = measure_step(row.job(), settings, steps=STEPS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_seconds": measured.measured_step_seconds,
        "fault_bytes_per_step": (after.ru_minflt - before) * PAGE_BYTES / STEPS,
        "peak_resident_bytes": after.ru_maxrss * 1024,
    }


def compare(index: int) -> dict[str, Any]:
    rounds = [{keeps: measure_apart(index, keeps=keeps) for keeps in (False, True)} for _ in range(ROUNDS)]
    found: dict[str, Any] = {"model": TIMED[index].name, "micro_batch_size": TIMED[index].micro_batch_size}
    for keeps, name in ((False, "returned"), (True, "kept")):
        found[name] = {key: min(each[keeps][key] for each in rounds) for key in rounds[0][keeps]}
    found["step_time_ratio"] = found["kept"]["step_seconds"] / found["returned"]["step_seconds"]
    found["peak_resident_ratio"] = (
        found["kept"]["peak_resident_bytes"] / found["returned"]["peak_resident_bytes"]
    )
    return found


def main() -> None:
    warnings.simplefilter("ignore")  # of the libraries
    rows = []
    for index in range(len(TIMED)):
        row = compare(index)
        rows.append(row)
        returned, kept = row["returned"], row["kept"]
        print(
            f"{row['model']:<56} {format_seconds(returned['step_seconds']):>8} "
            f"{format_seconds(kept['step_seconds']):>8} × {row['step_time_ratio']:.2f}  faults "
            f"{returned['fault_bytes_per_step'] / MIB:6.0f} {kept['fault_bytes_per_step'] / MIB:6.0f} MiB, "
            f"resident × {row['peak_resident_ratio']:.2f}",
            flush=True,
        )
    summary = {
        "rows": len(rows),
        **{
            f"{pick.__name__}_{name}": pick(row[name] for row in rows)
            for name in ("step_time_ratio", "peak_resident_ratio")
            for pick in (min, statistics.median, max)
        },
    }
    print(summary)
    content = {"steps": STEPS, "rounds": ROUNDS, "summary": summary, "rows": rows}
    keep("host_allocator.json", "python benchmarks/host_allocator.py", content, "transformers")


if __name__ == "__main__":
    main()
