"""Plans beside what people do by hand, on a real GPU, at the budgets of smaller ones.

    PYTHONPATH=src python3 benchmarks/gpu/plan.py --choose [--device "H200"]   # on any machine, before
    PYTHONPATH=src python3 benchmarks/gpu/plan.py --out DIR                    # on a machine with an NVIDIA GPU
    PYTHONPATH=src python3 benchmarks/gpu/plan.py --dry --out DIR              # both at toy size on a CPU

`--choose` says what every way to train would do within each budget, and keeps it in `gpu_plan_settings.json`.
These settings are what is measured. Each model has a process of its own, in which torch's allocator may hold
no more than the budget leaves beside the CUDA context, as on a card of that size. Settings that are chosen at
several budgets run at the smallest of them; those predicted to need half as much again as a budget do not run.
DIR/gpu_plan.json is written after each model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

import torch  # noqa: E402

from brimful import Job  # noqa: E402
from brimful.codec import from_json_document, to_json_document  # noqa: E402
from brimful.profiling.named_device import resolve_device  # noqa: E402
from brimful.settings import Settings  # noqa: E402
from brimful.utils.quantities import GIB  # noqa: E402
from gpu.measured import measure  # noqa: E402
from machine import RESULTS, commit, machine  # noqa: E402
from plan.bench import Bench, Outcome  # noqa: E402
from plan.jobs import JOBS, SMALL_JOBS, PlannedJob  # noqa: E402
from plan.peers import PEERS  # noqa: E402

SETTINGS = "gpu_plan_settings.json"
RECORD = "gpu_plan.json"
BUDGETS_GIB = (8, 11, 16, 24, 40)
DRY_FRACTIONS = (0.5, 0.8)
MOST_SECONDS_PER_MODEL = 200
"""After which a model's process is ended; assumed, not measured."""
HOPELESS = 1.5
"""Predicted peak over the budget from which settings are not run: a choice, to save time."""


FULL = {
    name: next(each for each in JOBS if each.name == name)
    for name in ("bert-large", "resnet152", "vit-large", "llama-3.2-1b")
}
TOY = {
    each.name: replace(each, global_batch_size=8) for each in SMALL_JOBS if each.name in ("bert", "resnet50")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choose", action="store_true", help="say what each way would do, and measure nothing")
    parser.add_argument("--device", default="H200", help="whose decisions and rates are followed")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--dry", action="store_true", help="toy models on the CPU, to see that it runs")
    parser.add_argument("--seconds", type=float, default=440, help="after which the rest is listed as skipped")
    parser.add_argument("--commit", default="", help="what to note where there is no git")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = TOY if options.dry else FULL
    if options.worker:
        for row in measured_rows(options.worker, models, options):
            print(json.dumps(row), flush=True)
        return
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.choose or options.dry:
        device = "cpu" if options.dry else options.device
        rows = [row for name in models for row in chosen_rows(name, models[name], device, options.dry)]
        settings = {
            "command": _command(),
            "commit": commit(),
            "machine": machine(),
            "device": device,
            "rows": rows,
        }
        _settings_file(options).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    if not options.choose:
        record(models, options)


def chosen_rows(name: str, compared: PlannedJob, device_name: str, dry: bool) -> Iterator[dict[str, Any]]:
    """What every way to train would do at each budget."""
    device = resolve_device(device_name)
    bench = Bench(compared.make(), device, compared.global_batch_size, compared.precision)
    plain = bench.plain_outcome()
    fractions = [int(fraction * plain.peak_device_bytes) for fraction in DRY_FRACTIONS]
    for budget_bytes in fractions if dry else [gib * GIB for gib in BUDGETS_GIB]:
        ways = {"ours": bench.plan(budget_bytes)} | {
            peer: choose(bench, budget_bytes) for peer, choose in PEERS.items()
        }
        if plain.peak_device_bytes <= budget_bytes:
            ways["plain"] = plain
        yield {
            "model": name,
            "budget_bytes": budget_bytes,
            "cap_bytes": budget_bytes - device.context_bytes,
            "ways": {way: _told(outcome) for way, outcome in ways.items()},
        }
        print(f"{name} at {budget_bytes / GIB:.1f} GiB: chosen", flush=True)


def _told(outcome: object) -> dict[str, Any] | None:
    if not isinstance(outcome, Outcome):
        return None
    return {
        "settings": to_json_document(outcome.settings),
        "described": outcome.settings.describe(),
        "predicted_peak_device_bytes": outcome.peak_device_bytes,
        "predicted_step_seconds": outcome.step_seconds,
    }


def record(models: dict[str, PlannedJob], options: argparse.Namespace) -> None:
    """Measure model by model, and write what there is after each."""
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for name in models:
        left = options.seconds - (time.perf_counter() - start)
        if left < 10:
            skipped.append(name)
            continue
        found, why = _run_worker(name, options, min(left, MOST_SECONDS_PER_MODEL))
        rows += found
        skipped += [f"{name}: {why}"] if why else []
        content = {
            "command": _command(),
            "commit": options.commit or commit(),
            "machine": machine(),
            "device": "cpu" if options.dry else torch.cuda.get_device_name(0),
            "chosen": json.loads(_settings_file(options).read_text(encoding="utf-8"))["commit"],
            "summary": summary(rows),
            "skipped": skipped,
            "rows": rows,
        }
        (options.out / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"summary": summary(rows), "skipped": skipped}, indent=1))


def _run_worker(name: str, options: argparse.Namespace, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Rows of one model, and why there are no more of them; empty if all are there."""
    log = options.out / f"{name}.log"
    command = [sys.executable, __file__, "--worker", name, "--out", str(options.out)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command + (["--dry"] if options.dry else []),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            out, _ = process.communicate(timeout=seconds)
            why = f"its process ended with {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            why = f"ended after {seconds:.0f} seconds"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows, why and f"{why}: {log.read_text(errors='replace')[-400:]}"


def measured_rows(
    name: str, models: dict[str, PlannedJob], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure one model under every way that was chosen; what runs out of memory says so."""
    job = models[name].make()
    chosen = json.loads(_settings_file(options).read_text(encoding="utf-8"))["rows"]
    ran: dict[str, dict[str, Any]] = {}
    for row in chosen:
        if row["model"] != name:
            continue
        if not options.dry:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(row["cap_bytes"] / total, 1.0))
        failed: dict[str, dict[str, Any]] = {}
        ways: dict[str, dict[str, Any]] = {}
        for way, told in row["ways"].items():
            if told is None:
                ways[way] = {"feasible": False}
                continue
            described = {key: value for key, value in told.items() if key != "settings"}
            if told["predicted_peak_device_bytes"] > HOPELESS * row["budget_bytes"]:
                ways[way] = described | {"not_run": "predicted to need far more than the budget"}
                continue
            key = json.dumps(told["settings"])
            found = ran.get(key) or failed.get(key) or _measured(job, told, options.dry)
            (ran if "step_error" in found else failed)[key] = found
            ways[way] = described | found
        measured = {key: row[key] for key in ("model", "budget_bytes", "cap_bytes")}
        yield measured | {"ways": ways}


def _measured(job: Job, told: dict[str, Any], dry: bool) -> dict[str, Any]:
    try:
        settings = from_json_document(told["settings"], Settings, where="the settings")
        measured = measure(job, settings, dry=dry)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)[:200]}
    except Exception as error:  # the other ways are measured nevertheless
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    kept = ("measured_peak_allocated_bytes", "measured_peak_reserved_bytes", "measured_step_seconds", "losses")
    return {name: measured[name] for name in kept} | {
        "step_error": round(told["predicted_step_seconds"] / measured["measured_step_seconds"] - 1, 4)
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often ours is there, ran, and was the fastest of those that ran."""
    ours = [row["ways"]["ours"] for row in rows]
    ran = fastest = 0
    for row in rows:
        seconds = {
            way: each["measured_step_seconds"] for way, each in row["ways"].items() if "step_error" in each
        }
        if "ours" in seconds:
            ran += 1
            fastest += seconds["ours"] <= 1.05 * min(seconds.values())
    return {
        "cases": len(rows),
        "ours_chosen": sum("described" in each for each in ours),
        "ours_ran": ran,
        "ours_fastest_or_within_5_percent": fastest,
    }


def _settings_file(options: argparse.Namespace) -> Path:
    return (options.out if options.dry else RESULTS) / SETTINGS


def _command() -> str:
    return " ".join(["python3", "benchmarks/gpu/plan.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
