"""What a real GPU does, beside what brimful predicts for it.

    PYTHONPATH=src python3 benchmarks/gpu/record.py --out DIR              # on a machine with an NVIDIA GPU
    PYTHONPATH=src python3 benchmarks/gpu/record.py --out DIR --dry        # the same code at toy size on a CPU
    PYTHONPATH=src python3 benchmarks/gpu/record.py --out DIR --predict    # predictions at full size alone

Writes DIR/record.json anew after each process that ends, and DIR/traces/*.json.gz. See README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

from gpu.configurations import CONFIGURATIONS  # noqa: E402
from gpu.contexts import gpu_by_driver  # noqa: E402
from gpu.operation_cases import CASES  # noqa: E402
from machine import commit, machine  # noqa: E402

MOST_SECONDS = {"context": 180, "operations": 150, "configurations": 90}
"""After which a process is ended; assumed, not measured. The first loads CUDA's libraries from a cold disk."""
OPERATION_PROCESSES = (
    ("linear", "normalisation", "losses", "optimizer"),
    ("indexing", "recurrent"),
    ("attention",),
    ("convolution",),
)
"""Groups that share a process: a fault on the device ends all cases after it."""
_LOG_CHARACTERS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does."""

    kind: str
    names: tuple[str, ...]


class Worker:
    """A process of `worker.py`."""

    def __init__(self, task: Task, options: argparse.Namespace, device: str, folder: Path) -> None:
        self.task = task
        stem = f"{task.kind}-{task.names[0]}"
        self._rows, self._log = folder / f"{stem}.jsonl", folder / f"{stem}.log"
        command = [sys.executable, "-m", "gpu.worker", task.kind, *task.names, "--device", device]
        command += ["--mode", options.mode, "--rows", str(self._rows), "--traces", str(options.out / "traces")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment(folder)
            )

    def finish(self, seconds: float) -> list[dict[str, Any]]:
        """Give it its turn on the GPU, and wait; what it wrote, with a row for what is missing."""
        try:
            self._process.communicate(b"go\n", timeout=seconds)
            why = f"the process ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self.end()
            why = f"ended after {seconds:.0f} seconds"
        lines = self._rows.read_text(encoding="utf-8").splitlines() if self._rows.exists() else []
        rows = [json.loads(line) for line in lines]
        missing = [name for name in expected_rows(self.task) if name not in {row.get("name") for row in rows}]
        if missing or self._process.returncode:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]
            rows += [{"name": name, "error": why, "log": tail} for name in missing or ("",)]
        return rows

    def end(self) -> None:
        """End the process, whatever it is at."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def expected_rows(task: Task) -> list[str]:
    """The names that its rows are to have."""
    if task.kind == "operations":
        return [case.name for case in CASES if case.group in task.names]
    return list(task.names) if task.kind == "configurations" else []


def main() -> int:
    """The exit status: 0 if anything was recorded, rows with errors included."""
    options = parse(sys.argv[1:])
    waiting = tasks(options)
    if not waiting:
        print(f"nothing to record has {options.only!r} in its name.", file=sys.stderr)
        return 1
    gpu = gpu_by_driver() if options.mode == "cuda" else {}
    if "error" in gpu:
        print(f"no GPU here: {gpu['error']}. Use --dry or --predict.", file=sys.stderr)
        return 1
    document = new_document(options, gpu)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for task, rows in run_all(waiting, options, document["device"], began + options.seconds):
        document["skipped"] += task.names if rows is None else ()
        document[task.kind] += rows or ()
        document["seconds"] = round(time.monotonic() - began, 1)
        (options.out / "record.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for row in rows or ():
            print(_line(task.kind, row), flush=True)
    wrong = sum(error_of(row) is not None for kind in MOST_SECONDS for row in document[kind])
    skipped = ", ".join(document["skipped"]) or "none"
    print(f"{document['seconds']} s; rows with an error: {wrong}; skipped: {skipped}")
    return 0


def new_document(options: argparse.Namespace, gpu: dict[str, Any]) -> dict[str, Any]:
    """All but the rows."""
    return {
        "command": " ".join(["benchmarks/gpu/record.py", *sys.argv[1:]]),
        "commit": options.commit or (commit() if shutil.which("git") else ""),
        "dry": options.mode != "cuda",
        "mode": options.mode,
        "device": options.device or gpu.get("gpu") or "H200",
        "machine": machine() | {"transformers": version("transformers")} | gpu,
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "seconds": 0.0,
        "context": [],
        "operations": [],
        "configurations": [],
        "skipped": [],
    }


def error_of(row: dict[str, Any]) -> str | None:
    """The first thing that went wrong for a row."""
    return next(
        (row[key] for key in ("error", "prediction_error", "measurement_error", "history_error") if key in row),
        None,
    )


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for record.json and traces/")
    parser.add_argument("--seconds", type=float, default=420, help="after which the rest is skipped")
    parser.add_argument("--only", help="configurations, and groups of operations, whose name contains this")
    parser.add_argument("--device", help="whom to predict for; this machine's GPU, or the H200 without one")
    parser.add_argument("--commit", help="what to note as the commit, where there is no git")
    modes = parser.add_mutually_exclusive_group()
    for mode, what in (("dry", "toy sizes on the CPU"), ("predict", "predictions at full size alone")):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=what)
    parser.set_defaults(mode="cuda")
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    return options


def tasks(options: argparse.Namespace) -> list[Task]:
    """The processes, in order: one for each configuration on a GPU, two for all of them without one."""
    wanted = options.only or ""
    configurations = [name for name in CONFIGURATIONS if wanted in name]
    parts = [(name,) for name in configurations]
    groups = [tuple(group for group in part if wanted in group) for part in OPERATION_PROCESSES]
    if options.mode != "cuda":
        parts = [part for part in (tuple(configurations[0::2]), tuple(configurations[1::2])) if part]
        groups = [tuple(group for part in groups for group in part)]
    return [
        *([] if wanted else [Task(kind="context", names=("all",))]),
        *(Task(kind="operations", names=part) for part in groups if part),
        *(Task(kind="configurations", names=part) for part in parts),
    ]


def run_all(
    waiting: list[Task], options: argparse.Namespace, device: str, deadline: float
) -> Iterator[tuple[Task, list[dict[str, Any]] | None]]:
    """Each task with its rows, or with None where the time was up; the next ones predict meanwhile."""
    ahead = max(2, min(8, (os.cpu_count() or 1) // 2))
    left, started = deque(waiting), deque[Worker]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while left or started:
                while left and len(started) < ahead and time.monotonic() < deadline:
                    started.append(Worker(left.popleft(), options, device, Path(folder)))
                if not started:
                    yield left.popleft(), None
                    continue
                worker = started[0]
                seconds = min(MOST_SECONDS[worker.task.kind], deadline - time.monotonic())
                if options.mode != "cuda":  # a few processes do all, and are not to be cut short
                    seconds = deadline - time.monotonic()
                rows = worker.finish(seconds) if seconds > 0 else None
                started.popleft().end()
                yield worker.task, rows
        finally:
            for worker in started:
                worker.end()


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    changes = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return {"OMP_NUM_THREADS": "4", **os.environ, **changes}


def _line(kind: str, row: dict[str, Any]) -> str:
    """A row for a reader."""
    name = row.get("name") or row.get("stage") or ""
    wrong = error_of(row)
    if wrong is not None:
        return f"{name:<60} {wrong[:120]}"
    if kind == "context":
        return f"{name:<60} {_mib(row.get('outside_allocator_bytes', row.get('context_bytes')))}"
    if kind == "operations":
        predicted, measured = row["predicted"], row.get("measured") or {}
        return f"{name:<60} " + "; ".join(
            f"{part}: {_mib(predicted[part]['temporary_bytes'])} predicted, "
            f"{_mib(measured.get(part, {}).get('temporary_bytes'))} measured"
            for part in predicted
        )
    predicted, measured = row["predicted_peak_allocated_bytes"], row.get("measured_peak_allocated_bytes")
    reserved, held = row["predicted_peak_reserved_bytes"], row.get("measured_peak_reserved_bytes")
    return (
        f"{name:<32} allocated {_mib(predicted)} predicted, {_mib(measured)} measured; "
        f"reserved {_mib(reserved)}, {_mib(held)}; "
        f"step {_ms(row['predicted_step_seconds'])}, {_ms(row.get('measured_step_seconds'))}; "
        f"prediction took {row['prediction_seconds']} s"
    )


def _mib(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else f"{size_bytes / 2**20:.1f} MiB"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
