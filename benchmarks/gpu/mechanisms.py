"""Each way to save memory on a real GPU: its mathematics, its peak, errors survived, whole runs.

    PYTHONPATH=src python3 benchmarks/gpu/mechanisms.py --out DIR          # on a machine with an NVIDIA GPU
    PYTHONPATH=src python3 benchmarks/gpu/mechanisms.py --out DIR --dry    # the same code at toy size on a CPU

For each model and mechanism DIR/mechanisms.json has

- the certificate of `brimful.verify`: loss, gradients and buffers beside the baseline's,
- the losses of six steps and by how much they differ from those with everything kept,
- peak and time, predicted and measured.

Then a step that runs out of memory at one of 50 operations is compared with an undisturbed one, bit for bit; a
loop in too little real memory recovers; and a whole run is planned for the memory that is there, and trained.
Further parts measure the calibration of the GPU and the kernels of some steps. Models and parts run in
processes of their own, which predict at the same time and measure one after another.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import brimful as bf  # noqa: E402
from brimful.capture import capture_step  # noqa: E402
from brimful.devices import find_device  # noqa: E402
from brimful.execution.setup import build_model  # noqa: E402
from brimful.optimizers import make_optimizer  # noqa: E402
from brimful.profiling.calibrate import measure_device  # noqa: E402
from brimful.profiling.cuda_context import measure_context  # noqa: E402
from brimful.profiling.local_device import local_gpu  # noqa: E402
from brimful.profiling.timing import typical_seconds  # noqa: E402
from brimful.settings import (  # noqa: E402
    Action,
    ChunkedLoss,
    MemoryFormat,
    OptimizerImplementation,
    Precision,
    Settings,
    UnitAction,
)
from brimful.trace import find_units  # noqa: E402
from brimful.utils.quantities import GIB  # noqa: E402
from gpu import jobs  # noqa: E402
from gpu.configurations import CONFIGURATIONS  # noqa: E402
from gpu.measured import measure  # noqa: E402
from gpu.predicted import predict, settings_of  # noqa: E402
from helpers.faults import OutOfMemoryAt  # noqa: E402
from machine import commit, machine  # noqa: E402

RECORD = "mechanisms.json"
SMALL_GPT2 = jobs.GPT2 | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
"""Of which 150 loops are run."""
POINTS = 50
"""Operations of a step at which memory runs out, spread evenly."""
STEPS = 4
"""Of a loop in which memory runs out in the third."""
MOST_SECONDS = 200
"""After which a model's process is ended; assumed, not measured."""
Change = Callable[[Settings, tuple[str, ...]], Settings]
"""Settings with everything kept, and the units → the mechanism's."""


def _units(action: Action, **more: Any) -> Change:
    def change(kept: Settings, units: tuple[str, ...]) -> Settings:
        actions = [UnitAction(fqn=unit, action=action, **more) for unit in units]
        if action is Action.OFFLOAD:  # what the last one saves is needed again at once
            actions[-1] = UnitAction(fqn=units[-1], action=Action.KEEP)
        return replace(kept, units=tuple(actions))

    return change


def _nested(kept: Settings, units: tuple[str, ...]) -> Settings:
    """Units recomputed in pairs, the second of which is nested in the first."""
    kinds = (Action.RECOMPUTE, Action.NEST)
    return replace(
        kept, units=tuple(UnitAction(fqn=unit, action=kinds[at % 2]) for at, unit in enumerate(units))
    )


def _with(**changes: Any) -> Change:
    return lambda kept, _units: replace(kept, **changes)


def _divided(kept: Settings, _units: tuple[str, ...], **changes: Any) -> Settings:
    return replace(kept, micro_batch_size=kept.micro_batch_size // 2, gradient_accumulation_steps=2, **changes)


ALL: dict[str, Change] = {
    "everything kept": _with(),
    "recomputed": _units(Action.RECOMPUTE),
    "recomputed in part": _units(
        Action.SAVE, saved=("addmm#0", "addmm#2", "mm#0", "mm#3", "convolution#1", "attention#0")
    ),
    "nested": _nested,
    "offloaded": _units(Action.OFFLOAD),
    "offloaded in part": _units(Action.OFFLOAD, most_offloaded_bytes=8 << 20),
    "accumulated": _divided,
    "accumulated, prefetched inputs": partial(_divided, prefetch_inputs=True),
    "optimizer on the host": _with(offload_optimizer=True),
    "optimizer in backward": _with(optimizer_in_backward=True),
    "fused optimizer": _with(optimizer_implementation=OptimizerImplementation.FUSED),
    "expandable segments": _with(expandable_segments=True),
}
OF_LANGUAGE = {"chunked loss": _with(chunked_loss=ChunkedLoss(layer="lm_head", chunks=8))}
OF_IMAGES = {"channels_last": _with(memory_format=MemoryFormat.CHANNELS_LAST)}
OF_ADAMW = {"8-bit AdamW": _with(optimizer="adamw8bit")}
"""Other optimizers, whose updates are others too."""
MODELS: dict[str, tuple[Callable[..., bf.Job], Precision, int, dict[str, Change]]] = {
    "gpt2": (jobs.gpt2, Precision.BF16, 8, ALL | OF_LANGUAGE | OF_ADAMW),
    "resnet50": (jobs.resnet, Precision.TF32, 64, ALL | OF_IMAGES),
    "unet": (jobs.unet, Precision.FP16, 8, ALL | OF_IMAGES),
    "llama": (
        partial(jobs.llama, jobs.LLAMA_FOUR_LAYERS),
        Precision.BF16,
        2,
        {name: ALL[name] for name in ("everything kept", "recomputed", "offloaded", "optimizer on the host")}
        | OF_LANGUAGE
        | OF_ADAMW,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for mechanisms.json")
    parser.add_argument("--dry", action="store_true", help="toy models on the CPU, to see that it runs")
    parser.add_argument("--only", default="", help="models and parts, separated by commas")
    parser.add_argument("--mechanism", default="", help="mechanisms whose name contains this")
    parser.add_argument("--seconds", type=float, default=300, help="after which the rest is listed as skipped")
    parser.add_argument("--commit", default="", help="what to note where there is no git")
    parser.add_argument("--turn", type=Path, help="a file that is locked while something is measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.turn = options.turn or options.out / "turn"
    if options.worker:
        work(options.worker, options)
        return 0
    return record(options)


def record(options: argparse.Namespace) -> int:
    """Run a process for each part; write what there is after each."""
    start = time.monotonic()
    wanted = options.only.split(",")
    names = [name for name in (*PARTS, *MODELS) if any(each in name for each in wanted)]
    workers = {name: _start(name, options) for name in names}
    content: dict[str, Any] = {
        "command": " ".join(["benchmarks/gpu/mechanisms.py", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "machine": machine(),
        "torch": torch.__version__,
        "device": "cpu" if options.dry else torch.cuda.get_device_name(0),
        "rows": [],
        "errors": {},
    }
    for name, process in workers.items():
        try:
            process.wait(timeout=max(1, min(MOST_SECONDS, options.seconds - (time.monotonic() - start))))
            why = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            why = "ended, as the time was up"
        rows = options.out / f"{name}.jsonl"
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
        content["rows"] += [json.loads(line) for line in lines]
        if why:
            log = (options.out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            content["errors"][name] = f"{why}: {log[-600:]}"
        content["seconds"] = round(time.monotonic() - start, 1)
        (options.out / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for row in content["rows"]:
        print(_line(row))
    for name, error in content["errors"].items():
        print(f"{name}: {error}")
    print(f"{content['seconds']} s")
    return 0


def _start(name: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    words = ["--out", str(options.out), "--worker", name, "--turn", str(options.turn)]
    words += ["--mechanism", options.mechanism, *(["--dry"] if options.dry else [])]
    with (options.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            stdout=log,
            stderr=log,
            env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ if name == "faults" else None,
        )


def work(name: str, options: argparse.Namespace) -> None:
    rows = options.out / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    found = PARTS[name](options) if name in PARTS else mechanism_rows(name, options)
    for row in found:
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": name} | row) + "\n")


@contextmanager
def turn(options: argparse.Namespace) -> Iterator[None]:
    """While no other process measures."""
    with options.turn.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _where(options: argparse.Namespace) -> torch.device:
    return torch.device("cpu") if options.dry else torch.device("cuda", 0)


def mechanism_rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Predict all mechanisms of a model, then measure them in turn."""
    make, precision, samples, mechanisms = MODELS[name]
    job = make(toy=options.dry)
    device = find_device("A100 80GB") if options.dry else local_gpu(torch.device("cuda", 0))
    kept = Settings(
        micro_batch_size=4 if options.dry else samples,
        precision=Precision.FP32 if options.dry else precision,
    )
    units = find_units(capture_step(job, kept, device))
    wanted = {way: change for way, change in mechanisms.items() if options.mechanism in way}
    settings = {way: _tried(lambda change=change: change(kept, units)) for way, change in wanted.items()}
    predicted = {way: _tried(lambda each=each: _predicted(job, each, device)) for way, each in settings.items()}
    with turn(options):
        losses: list[float] | None = None
        for way, each in settings.items():
            row = {"mechanism": way, "units": len(units), **predicted[way]}
            if isinstance(each, Settings):
                row |= {"settings": each.describe()}
                row |= _tried(lambda each=each: _measured(job, each, options))
                row |= _tried(lambda each=each: _certified(job, each, options))
            else:
                row |= each
            if losses is None:
                losses = row.get("losses")
            if losses and "losses" in row:
                differences = [abs(a / b - 1) for a, b in zip(row["losses"], losses, strict=True)]
                row["largest_relative_difference_of_losses"] = max(differences)
            _empty(options)
            yield row


def _predicted(job: bf.Job, settings: Settings, device: bf.devices.Device) -> dict[str, Any]:
    _, predicted = predict(job, settings, device)
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
    return {f"predicted_{name}": predicted[f"predicted_{name}"] for name in kept}


def _measured(job: bf.Job, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    measured = measure(job, settings, dry=options.dry)
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
    return {f"measured_{name}": measured[f"measured_{name}"] for name in kept} | {
        name: measured[name] for name in ("losses", "updated", "measurement_seconds")
    }


def _certified(job: bf.Job, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Of a quarter of the samples: gradients of both ways are there at once."""
    few = replace(settings, micro_batch_size=max(1, settings.micro_batch_size // 4))
    drawn_there = replace(job, model=partial(_built_on, job.model, _where(options)))
    report = bf.verify(drawn_there, few, str(_where(options)))
    return {"holds": report.holds, "certificate": report.to_json()}


def _built_on(build: Callable[[], nn.Module], where: torch.device) -> nn.Module:
    """To draw the weights on the CPU would take longer than all that follows."""
    with where:
        return build()


def _tried(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}


def _empty(options: argparse.Namespace) -> None:
    gc.collect()
    if not options.dry:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def calibration_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """This GPU's row, its context and its rates."""
    with turn(options):
        if options.dry:
            yield {"calibration": asdict(measure_device(find_device("cpu"), torch.device("cpu"), sweeps=1))}
            return
        where = torch.device("cuda", 0)
        row = local_gpu(where)
        yield {"device": asdict(row)}
        yield {"context": asdict(measure_context(where))}
        yield {"calibration": asdict(measure_device(row, where))}


def fault_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Memory runs out at operations spread over a step; then in a loop that has less than it needs."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # else two undisturbed loops differ
    job = jobs.gpt2(SMALL_GPT2, toy=options.dry)
    kept = Settings(micro_batch_size=4, precision=Precision.FP32 if options.dry else Precision.BF16)
    device = find_device("A100 80GB") if options.dry else local_gpu(torch.device("cuda", 0))
    units = find_units(capture_step(job, kept, device))
    with turn(options):
        for way in ("everything kept", "recomputed", "offloaded"):
            yield {"fault": f"injected, {way}"} | _tried(
                lambda way=way: _injected(job, ALL[way](kept, units), options)
            )
            _empty(options)
        if not options.dry:
            plenty = Settings(micro_batch_size=8, precision=Precision.BF16)
            large = jobs.gpt2(jobs.GPT2 | {"num_hidden_layers": 2})
            yield {"fault": "too little memory"} | _tried(lambda: _too_little(large, plenty))


def _injected(job: bf.Job, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    where, count = _where(options), OutOfMemoryAt()
    torch.manual_seed(0)
    model = build_model(job, is_copied=True).to(where).train()
    loop = partial(_loop, job, settings, model)
    undisturbed = loop(count)
    again = loop(OutOfMemoryAt())
    numbers = [round(at * (len(count.ops) - 1) / (POINTS - 1)) for at in range(POINTS)]
    survived = alike = 0
    largest = 0.0
    errors: list[str] = []
    for number in numbers:
        fault = OutOfMemoryAt(number)
        try:
            found = loop(fault)
        except Exception as error:
            errors.append(f"{count.ops[number]}: {type(error).__name__}: {error}"[:300])
            continue
        survived += fault.raised == 1
        alike += found == undisturbed
        pairs = zip(found[0], undisturbed[0], strict=True)
        largest = max(largest, *(abs(loss / other - 1) for loss, other in pairs))
    return {
        "points": len(numbers),
        "operations": len(count.ops),
        "survived": survived,
        "bitwise_equal": alike,
        "undisturbed_loops_are_equal": again == undisturbed,
        "largest_relative_difference_of_losses": largest,
        "errors_of_points": errors,
    }


def _loop(
    job: bf.Job, settings: Settings, untrained: nn.Module, fault: OutOfMemoryAt
) -> tuple[list[float], list[float]]:
    """Losses of the steps, and a sum over each parameter after them."""
    torch.manual_seed(0)
    batches = [job.batch(settings.global_batch_size) for _ in range(STEPS)]
    model = copy.deepcopy(untrained)
    optimizer = make_optimizer(job, model, settings)
    step = bf.apply(settings, job, model, optimizer, verify=False)
    losses = []
    for number, batch in enumerate(batches):
        with fault if number == STEPS // 2 else nullcontext():
            outcome = step(batch)
        losses.append(float(outcome.loss))
    step.remove()
    return losses, [float(parameter.double().abs().sum()) for parameter in model.parameters()]


def _too_little(job: bf.Job, kept: Settings) -> dict[str, Any]:
    """The same loop with all the memory, and with 70 % of what it took."""
    where = torch.device("cuda", 0)
    found = {}
    total = torch.cuda.get_device_properties(where).total_memory
    plain_reserved = 0
    for name in ("enough", "too little"):
        torch.manual_seed(0)
        if name == "too little":
            torch.cuda.set_per_process_memory_fraction(0.7 * plain_reserved / total)
        model = build_model(job, is_copied=True).to(where).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # other numbers are drawn for parts of a batch
                module.p = 0.0
        optimizer = make_optimizer(job, model, kept)
        step = bf.apply(kept, job, model, optimizer)
        torch.manual_seed(1)
        outcomes = [step(job.batch(kept.global_batch_size)) for _ in range(STEPS)]
        step.remove()
        plain_reserved = plain_reserved or torch.cuda.max_memory_reserved()
        found[name] = {
            "losses": [float(outcome.loss) for outcome in outcomes],
            "recoveries": [str(each.after) for outcome in outcomes for each in outcome.recoveries],
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        del model, optimizer, step, outcomes
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def run_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plan for the memory of this device, less than what is there, and train in it."""
    job, samples = jobs.gpt2(toy=options.dry), 4 if options.dry else 16
    job = replace(job, data=lambda: bf.Data(train=job.batch(64)))
    device = "cpu" if options.dry else "cuda"
    precision = Precision.FP32 if options.dry else Precision.BF16
    for budget in ("90%",) if options.dry else ("60%", "35%"):
        yield {"run": budget} | _tried(
            lambda budget=budget: _run(job, device, samples, precision, budget, options)
        )


def _run(
    job: bf.Job, device: str, samples: int, precision: Precision, budget: str, options: argparse.Namespace
) -> dict[str, Any]:
    start = time.perf_counter()
    plan = bf.plan(job, device, budget=budget, global_batch_size=samples, precision=precision)
    planned = time.perf_counter() - start
    with turn(options):
        if not options.dry:
            total = torch.cuda.get_device_properties(0).total_memory
            cap = plan.budget_bytes - local_gpu(torch.device("cuda", 0)).context_bytes
            torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0))
        result, _ = bf.fit(job, plan, steps=24, device=device, show_progress=False)
        if not options.dry:
            torch.cuda.set_per_process_memory_fraction(1.0)
        _empty(options)
    return {
        "planning_seconds": planned,
        "plan": str(plan),
        "result": str(result),
        "budget_gib": plan.budget_bytes / GIB,
        "losses": [each.loss for each in result.steps],
        "predicted_peak_reserved_bytes": result.predicted_peak_reserved_bytes,
        "measured_peak_reserved_bytes": result.measured_peak_reserved_bytes,
        "predicted_peak_device_bytes": result.predicted_peak_device_bytes,
        "measured_peak_device_bytes": result.measured_peak_device_bytes,
        "predicted_step_seconds": result.predicted_step_seconds,
        "measured_step_seconds": result.measured_step_seconds,
        "recoveries": [str(each) for each in result.recoveries],
        "self_correction": None if result.self_correction is None else str(result.self_correction),
    }


def kernel_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How long each kernel of a step takes, and how much of the step the GPU is idle."""
    device = find_device("A100 80GB") if options.dry else local_gpu(torch.device("cuda", 0))
    for name in PROFILED:
        configuration = CONFIGURATIONS[name]
        job = configuration.job(toy=options.dry)
        settings = settings_of(configuration, job, device, toy=options.dry)
        with turn(options):
            yield {"kernels": name} | _tried(partial(_profiled, job, settings, options))
            _empty(options)


def _profiled(job: bf.Job, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    def profile(run: Callable[[], object]) -> dict[str, Any]:
        where = _where(options)
        seconds = typical_seconds([run], where, most_seconds=1.0).seconds
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CPU] if options.dry else [activity.CPU, activity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            run()
            if not options.dry:
                torch.cuda.synchronize()
        kernels: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found = kernels.setdefault(event.name[:160], [0, 0.0])
                found[0] += 1
                found[1] += event.device_time_total
        return {
            "undisturbed_step_seconds": seconds,
            "kernel_seconds": sum(taken for _, taken in kernels.values()) / 1e6,
            "kernel_microseconds_by_name": dict(sorted(kernels.items(), key=lambda each: -each[1][1])),
        }

    measured = measure(job, settings, dry=options.dry, then=profile)
    kept = (
        "undisturbed_step_seconds",
        "kernel_seconds",
        "measured_step_seconds",
        "kernel_microseconds_by_name",
    )
    return {name: measured[name] for name in kept}


PROFILED = (
    "resnet50-tf32",
    "resnet50-bf16-nhwc",
    "gpt2-bf16",
    "llama-bf16",
    "vit-bf16",
    "unet-bf16",
    "t5-bf16",
    "gpt2-fp32",
)
"""Configurations whose kernels are timed."""
PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "calibration": calibration_rows,
    "faults": fault_rows,
    "run": run_rows,
    "kernels": kernel_rows,
}


def _line(row: dict[str, Any]) -> str:
    name = f"{row['part']}: " + str(
        row.get("mechanism") or row.get("fault") or row.get("run") or row.get("kernels") or ""
    )
    if "error" in row:
        return f"{name}: {row['error'][:300]}"
    if "mechanism" in row:
        peaks = [row.get(f"{kind}_peak_allocated_bytes", 0) / GIB for kind in ("predicted", "measured")]
        seconds = [row.get(f"{kind}_step_seconds", 0) * 1e3 for kind in ("predicted", "measured")]
        return (
            f"{name}: {peaks[0]:.3f} GiB predicted, {peaks[1]:.3f} measured; {seconds[0]:.1f} ms, "
            f"{seconds[1]:.1f}; losses {row.get('largest_relative_difference_of_losses', -1):.1e} apart; "
            f"holds: {row.get('holds')}"
        )
    return f"{name}: " + str({key: value for key, value in row.items() if key not in ("part", "plan")})[:700]


if __name__ == "__main__":
    sys.exit(main())
