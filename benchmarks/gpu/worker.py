"""One process of `record.py`: predicts, waits for its turn on the GPU, measures, writes a line per row.

    python -m gpu.worker configurations OPTIONS NAME ...

What needs no GPU comes first, so that several workers can be that far while one measures. A worker makes no
CUDA context before it reads a line from its standard input.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from brimful.devices import Device, find_device

KINDS = ("context", "operations", "configurations")


def main() -> None:
    options = parse(sys.argv[1:])
    device = find_device(options.device, torch_version=torch.__version__)
    run = {"context": _contexts, "operations": _operations, "configurations": _configurations}[options.kind]
    run(options, device)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("names", nargs="+", help="configurations, or groups of operations")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--traces", type=Path, required=True, help="folder for allocation histories")
    parser.add_argument("--device", required=True, help="whom the predictions are for")
    parser.add_argument("--mode", choices=("cuda", "dry", "predict"), required=True)
    return parser.parse_args(words)


def _contexts(options: argparse.Namespace, _device: Device) -> None:
    from gpu.contexts import measure_stages, measured_by_brimful, versions_of_libraries

    if options.mode == "cuda":
        _wait_for_turn()
        for row in measure_stages(torch.device("cuda", 0)):
            _write(options.rows, row)
        _write(options.rows, measured_by_brimful())
    _write(options.rows, {"stage": "libraries", **versions_of_libraries()})


def _operations(options: argparse.Namespace, device: Device) -> None:
    from gpu.operation_cases import CASES
    from gpu.operations import measure_operation, predict_operation, rehearse_operation

    cases = [case for case in CASES if case.group in options.names]
    _leave_imports_to_themselves()
    predictions = {case.name: _tried(lambda case=case: predict_operation(case, device)) for case in cases}
    if options.mode == "cuda":
        _wait_for_turn()
    for case in cases:
        row = {"name": case.name, "group": case.group, **_as_row(predictions[case.name], "prediction")}
        if options.mode == "cuda":
            row |= _as_row(
                _tried(lambda case=case: measure_operation(case, torch.device("cuda", 0))), "measurement"
            )
            torch.cuda.empty_cache()
        elif options.mode == "dry":
            row |= _as_row(_tried(lambda case=case: rehearse_operation(case)), "measurement")
        _write(options.rows, row)


def _configurations(options: argparse.Namespace, device: Device) -> None:
    import transformers.modeling_utils  # noqa: F401  # with all that models import later

    _leave_imports_to_themselves()
    for name in options.names:
        _write(options.rows, _configuration(options, name, device))


def _configuration(options: argparse.Namespace, name: str, device: Device) -> dict[str, Any]:
    from gpu.allocations import captured_history
    from gpu.configurations import CONFIGURATIONS
    from gpu.contexts import gpu_by_driver
    from gpu.measured import measure
    from gpu.predicted import predict, settings_of

    configuration, dry = CONFIGURATIONS[name], options.mode == "dry"
    job = configuration.job(toy=dry)
    row: dict[str, Any] = {"name": name}
    settings = _tried(lambda: settings_of(configuration, job, device, toy=dry))
    if isinstance(settings, str):  # the units to recompute are found in a capture
        return row | {"prediction_error": settings}
    row["settings"] = settings.describe()
    prediction = _tried(lambda: predict(job, settings, device))
    trace, predicted = (None, prediction) if isinstance(prediction, str) else prediction
    row |= _as_row(predicted, "prediction")
    if options.mode == "predict":
        return row
    if options.mode == "cuda":
        _wait_for_turn()
        row |= {"device_used_before_bytes": gpu_by_driver().get("used_bytes")}
        row |= {"had_context_before": torch.cuda.is_initialized()}
    measurement = _tried(lambda: measure(job, settings, dry=dry, keeps_history=configuration.history))
    measured, history = (measurement, None) if isinstance(measurement, str) else measurement
    row |= _as_row(measured, "measurement")
    if not dry:
        row |= {"error_fractions": errors(row)}
    elif configuration.history and trace is not None:
        history = captured_history(trace)
    if history:
        row |= _as_row(_tried(lambda: _keep_history(options, name, history)), "history")
    return row


def _keep_history(options: argparse.Namespace, name: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a configuration's allocations, and replay them through the simulated allocator."""
    from gpu.allocations import in_numbers, replay, write

    allocations = in_numbers(history)
    path = options.traces / f"{name}.json.gz"
    source = "the simulated allocator" if options.mode == "dry" else "torch.cuda.memory._snapshot"
    replayed = replay(allocations)
    write(path, allocations, {"configuration": name, "source": source, "torch": torch.__version__, **replayed})
    return {"history": f"{path.parent.name}/{path.name}", "replay": replayed}


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured, less 1, of all that has both."""
    quantities = (
        "peak_allocated_bytes",
        "first_step_peak_allocated_bytes",
        "steady_peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_device_bytes",
        "step_seconds",
    )
    pairs = {name: (row.get(f"predicted_{name}"), row.get(f"measured_{name}")) for name in quantities}
    return {
        name: predicted / measured - 1
        for name, (predicted, measured) in pairs.items()
        if predicted and measured
    }


def _tried(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the text of the error that it raised."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:500]


def _as_row(result: Any, what: str) -> dict[str, Any]:
    return {f"{what}_error": result} if isinstance(result, str) else result


def _leave_imports_to_themselves() -> None:
    """Capturing and profiling collect garbage first: among all modules' objects that takes most of the time."""
    gc.collect()
    gc.freeze()


def _wait_for_turn() -> None:
    sys.stdin.readline()


def _write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
