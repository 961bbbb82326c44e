"""Recorded steps of GPUs, as `brimful run` divides their time, beside Holistic Trace Analysis.

    python benchmarks/doctor/gpu_traces.py CHECKOUT --packages DIR

CHECKOUT is a clone of facebookresearch/HolisticTraceAnalysis, whose tests have traces of Kineto from NVIDIA's
and AMD's GPUs; DIR has that package, installed with `pip install --target DIR HolisticTraceAnalysis`. Its
temporal breakdown is the truth: the share of the time in which the GPU is idle. Both have the same events,
those that it keeps, and the time from the first kernel to the last one's end. It rounds times to microseconds,
which is what differs in traces that have nanoseconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.autograd import profiler_util

from brimful.cost.time_shares import time_shares
from brimful.doctor.gpu_times import gpu_times

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import commit_at, keep  # beside this folder

COMMAND = "python benchmarks/doctor/gpu_traces.py CHECKOUT --packages DIR"
TRACES = (
    "critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz",
    "amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "negative_queue_length_values_check/rank0.json.gz",
    "trace_diff/control/control.json.gz",
    "trace_diff/test/test.json.gz",
    "nccl_parser_config/nccl_data.json.gz",
    "df_index_resolver/df_index_resolver.json.gz",
)
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}

_BREAKDOWN = """
import json, sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="", include_last_profiler_step=True)
found = trace.get_temporal_breakdown(visualize=False)
print(json.dumps({**found.iloc[0].to_dict(), "events": trace.t.traces[0].index.tolist()}))
"""


profiled: Any = profiler_util


def main() -> None:
    """Divide all traces, and keep what comes out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--packages", type=Path, required=True)
    given = parser.parse_args()
    rows = [_row(given.checkout, name, given.packages) for name in TRACES]
    summary = {
        "traces": len(rows),
        "largest_difference_of_idle": max(abs(each["idle"] - each["idle_of_hta"]) for each in rows),
    }
    keep("gpu_traces.json", COMMAND, {"traces_of": commit_at(given.checkout), "summary": summary, "rows": rows})


def _row(checkout: Path, name: str, packages: Path) -> dict[str, Any]:
    packed = _content(checkout, name)
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    theirs = _breakdown(packed, packages)
    found = gpu_times(_function_events([events[place] for place in theirs["events"]]))
    busy = sum(found.class_seconds.values())
    span = busy + found.loading_seconds + found.idle_seconds
    row = {
        "trace": name,
        "kernels": found.launches,
        "seconds": span,
        "idle": 1 - busy / span,
        "idle_of_hta": theirs["idle_time_pctg"] / 100,
        "loading": found.loading_seconds / span,
        "busy_shares": {kind: round(share, 4) for kind, share in time_shares(found.class_seconds.items())},
    }
    print(json.dumps(row, indent=1), flush=True)
    return row


def _content(checkout: Path, name: str) -> bytes:
    found = subprocess.run(
        ["git", "-C", checkout, "cat-file", "blob", f"HEAD:tests/data/{name}"], capture_output=True, check=True
    )
    return found.stdout


def _function_events(events: list[dict[str, Any]]) -> Any:
    """The events as torch's profiler would have returned them, from the first kernel to the end of the last."""
    timed = [each for each in events if each.get("ph") == "X" and each.get("cat") in _ON_GPU | _ON_HOST]
    begin = min(each["ts"] for each in timed if each["cat"] in _ON_GPU)
    end = max(each["ts"] + each["dur"] for each in timed if each["cat"] in _ON_GPU)
    kept, by_op = [], {}
    for number, each in enumerate(timed):
        is_on_gpu = each["cat"] in _ON_GPU
        args = each.get("args", {})
        event = profiled.FunctionEvent(
            id=number,
            name=each["name"],
            thread=each["tid"],
            start_us=each["ts"] - begin,
            end_us=min(each["ts"] + each.get("dur", 0), end) - begin,
            device_type=DeviceType.CUDA if is_on_gpu else DeviceType.CPU,
            use_device="cuda",
            sequence_nr=args.get("Sequence number", -1),
        )
        kept.append(event)
        if each["cat"] == "cpu_op":
            by_op[args.get("External id", args.get("external id"))] = event
    for event, each in zip(kept, timed, strict=True):
        op = by_op.get(each.get("args", {}).get("External id", each.get("args", {}).get("external id")))
        if each["cat"] in _ON_GPU and op is not None:
            op.append_kernel(event.name, event.device_index, event.time_range.end - event.time_range.start)
    found = profiled.EventList(kept, use_device="cuda")
    found._build_tree()
    return found


def _breakdown(packed: bytes, packages: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json.gz") as file:
        file.write(packed)
        file.flush()
        command = [sys.executable, "-c", _BREAKDOWN, file.name]
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(packages)}
        )
    breakdown: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return breakdown


if __name__ == "__main__":
    main()
