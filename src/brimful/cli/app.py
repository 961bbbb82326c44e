"""The `brimful` command.

Exit status: 0 done; 1 it does not fit, or failed; 2 bad usage; training that saved and ended early: 130 after
Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brimful import __version__
from brimful.errors import BrimfulError, InterruptedRunError, UsageError
from brimful.files import write_file
from brimful.training import StopReason

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planning import JobSource, Plan, PlanCheck

INTERRUPTED = 130
TERMINATED = 143
"""What shells give for Ctrl-C: 128 + SIGINT."""

app = typer.Typer(
    name="brimful",
    help="Fill your GPU to the brim, never over it: predict, plan and train inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_MODEL_HELP = (
    "What to train: a built-in architecture (bert-large, resnet50, …), package.module:factory, "
    "or path/to/file.py:factory; the factory returns a brimful.Job."
)
Model = Annotated[str, typer.Argument(help=_MODEL_HELP, show_default=False)]
DeviceName = Annotated[
    str,
    typer.Option("--device", help='A GPU by name, such as "RTX 3090"; cuda or cpu of this machine; auto.'),
]
LocalDevice = Annotated[str, typer.Option("--device", help="cuda, cpu, or auto: the GPU if there is one.")]
PrecisionName = Annotated[
    str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16; for plans also auto.")
]
OptimizerName = Annotated[
    str | None, typer.Option("--optimizer", help="Replaces the job's own: adamw, sgd, adafactor, …")
]
OptimizerImplementationName = Annotated[
    str | None,
    typer.Option(
        "--optimizer-implementation",
        help="for-loop, foreach or fused: the same formula; plans choose fused where the optimizer can.",
    ),
]
Recompute = Annotated[
    str, typer.Option("--recompute", help="all, none, or auto: what becomes of saved tensors.")
]
SequenceLength = Annotated[
    int | None, typer.Option("--seq-len", help="Tokens per sample, for models that have such an option.")
]
ImageSize = Annotated[
    int | None, typer.Option("--image-size", help="Pixels per side, for models that have such an option.")
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another option of the model, as name=value; may be repeated."),
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch-size", help="Samples in one forward and backward pass.", min=1)
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch-size", help="Samples per optimizer step. It never changes.", min=1)
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Bytes permitted on the device, such as 11GiB, or a share of what plain training takes, "
        "such as 50%. Left out: what the device has, less a margin of 5 % on a GPU.",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(help="Devices of this kind that divide the global batch and train together.", min=1),
]
Nodes = Annotated[int, typer.Option(help="Machines among which the ranks are divided.", min=1)]
Network = Annotated[
    str | None,
    typer.Option(help="What goes between machines in a second, such as 25GB; 100 Gbit/s if left out."),
]
ParallelismName = Annotated[
    str,
    typer.Option(
        "--parallelism",
        help="Several ranks: ddp keeps the model on each, fsdp2 divides it among them, auto takes the faster.",
    ),
]
SplitBatchNorm = Annotated[
    bool,
    typer.Option(
        "--split-batch-norm",
        help="Permit splitting a batch that BatchNorm couples; its statistics are then over micro-batches.",
    ),
]
AllowedOptimizers = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-optimizer",
        help="Another optimizer that may be chosen, though it changes the mathematics: adafactor, adamw8bit; "
        "may be repeated.",
    ),
]
ChunkedLoss = Annotated[
    bool,
    typer.Option(
        "--chunked-loss/--no-chunked-loss",
        help="Permit computing a cross-entropy over a large vocabulary a part of the tokens at a time.",
    ),
]
ExpandableSegments = Annotated[
    bool,
    typer.Option(
        "--expandable-segments/--no-expandable-segments",
        help="Permit telling PyTorch's CUDA allocator to grow its segments, which leaves less memory unused.",
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload/--no-offload",
        help="Permit holding what units save for backward in the host's memory meanwhile.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="What offloading may take of the host, pinned: 64GiB. Left out: half of what this machine has.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"brimful {__version__}")
        raise typer.Exit


@app.command()
def estimate(
    model: Model,
    device: DeviceName = "auto",
    micro_batch_size: MicroBatch = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Forward and backward passes per optimizer step.", min=1)
    ] = 1,
    precision: Annotated[str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")] = "fp32",
    optimizer: OptimizerName = None,
    optimizer_implementation: OptimizerImplementationName = None,
    recompute: Annotated[
        str, typer.Option("--recompute", help="all or none: what becomes of saved tensors.")
    ] = "none",
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Judge against this size, such as 11GiB, not what the device has."),
    ] = None,
    seq_len: SequenceLength = None,
    image_size: ImageSize = None,
    options: ModelOptions = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest micro-batch that fits, from two captures.")
    ] = False,
    allocator: Annotated[
        str,
        typer.Option(
            help="How PyTorch's allocator is set, as in PYTORCH_ALLOC_CONF: expandable_segments:True."
        ),
    ] = "",
    compare_allocators: Annotated[
        bool, typer.Option("--compare-allocators", help="Also tell what other settings of it would change.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases", help="Also tell what evaluation, saving and loading take.")
    ] = False,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave out this correction; may be repeated.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the captured steps to this file (.json or .json.gz).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory and time of one training step, without running it."""
    with _errors_told(as_json):
        from brimful import api
        from brimful.planning import Verdict
        from brimful.planning.text import phase_lines
        from brimful.report import estimate_document

        job = _job(model, seq_len, image_size, options)
        if largest:
            beside = {
                "--micro-batch-size": micro_batch_size,
                "--compare-allocators": compare_allocators,
                "--phases": phases,
                "--without": without,
                "--save-trace": save_trace,
                "--optimizer-implementation": optimizer_implementation,
            }
            _refuse(beside, "--largest finds the micro-batch")
            result = api.estimator(
                job,
                device,
                gradient_accumulation_steps=gradient_accumulation_steps,
                precision=precision,
                optimizer=optimizer,
                recompute=recompute,
                budget=budget,
                allocator=allocator,
            ).largest()
        else:
            result = api.estimate(
                job,
                device,
                micro_batch_size=micro_batch_size or 1,
                gradient_accumulation_steps=gradient_accumulation_steps,
                precision=precision,
                optimizer=optimizer,
                optimizer_implementation=optimizer_implementation,
                recompute=recompute,
                budget=budget,
                allocator=allocator,
                compare_allocators=compare_allocators,
                evaluate=phases,
                without=without or (),
                save_trace=save_trace,
            )
        _show(result, lambda: estimate_document(result), as_json)
        if phases and not as_json:
            print("\n".join(phase_lines(result)))
    if result.verdict is Verdict.DOES_NOT_FIT:
        raise typer.Exit(1)


@app.command()
def gpus(
    model: Model,
    global_batch_size: GlobalBatch,
    precision: Annotated[str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")] = "fp32",
    optimizer: OptimizerName = None,
    split_batch_norm: SplitBatchNorm = False,
    device: Annotated[
        list[str] | None, typer.Option("--device", help="Only this GPU; may be repeated. Left out: all known.")
    ] = None,
    seq_len: SequenceLength = None,
    image_size: ImageSize = None,
    options: ModelOptions = None,
    as_json: AsJson = False,
) -> None:
    """Tell which GPUs train a model, how, and how fast."""
    with _errors_told(as_json):
        from brimful import api
        from brimful.planning.text import gpus_text
        from brimful.report import gpus_document

        job = _job(model, seq_len, image_size, options)
        with _waiting("capturing for each kind of GPU"):
            fits = api.gpus(
                job,
                global_batch_size=global_batch_size,
                precision=precision,
                optimizer=optimizer,
                split_batch_norm=split_batch_norm,
                devices=device,
            )
        text = gpus_text(job.name, global_batch_size, fits)
        _show(text, lambda: gpus_document(job.name, global_batch_size, fits), as_json)


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help=_MODEL_HELP, show_default=False)] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", help="Samples per optimizer step. It never changes.", min=1),
    ] = None,
    device: DeviceName = "auto",
    budget: Budget = None,
    precision: PrecisionName = "fp32",
    micro_batch_size: MicroBatch = None,
    recompute: Recompute = "auto",
    optimizer: OptimizerName = None,
    optimizer_implementation: OptimizerImplementationName = None,
    allow_optimizer: AllowedOptimizers = None,
    chunked_loss: ChunkedLoss = True,
    expandable_segments: ExpandableSegments = True,
    offload: Offload = True,
    host_memory: HostMemory = None,
    split_batch_norm: SplitBatchNorm = False,
    ranks: Ranks = 1,
    nodes: Nodes = 1,
    network: Network = None,
    parallelism: ParallelismName = "auto",
    seq_len: SequenceLength = None,
    image_size: ImageSize = None,
    options: ModelOptions = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="See whether the plan in this file still fits, for use in CI: exit status 1 if not."),
    ] = None,
    certify: Annotated[
        bool,
        typer.Option("--certify", help="Also compute a batch with and without the plan, and compare."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train a global batch inside a memory budget."""
    with _errors_told(as_json):
        from brimful import api

        if check is not None:
            beside = {
                "--global-batch-size": global_batch_size,
                "--precision": precision != "fp32",
                "--micro-batch-size": micro_batch_size,
                "--recompute": recompute != "auto",
                "--optimizer": optimizer,
                "--optimizer-implementation": optimizer_implementation,
                "--allow-optimizer": allow_optimizer,
                "--no-chunked-loss": not chunked_loss,
                "--no-expandable-segments": not expandable_segments,
                "--no-offload": not offload,
                "--host-memory": host_memory,
                "--split-batch-norm": split_batch_norm,
                "--ranks": ranks > 1,
                "--nodes": nodes > 1,
                "--network": network,
                "--parallelism": parallelism != "auto",
                "--output": output,
                "--certify": certify,
            }
            _refuse(beside, "--check takes the settings of the plan in its file")
            checked = _check(check, _source(model, seq_len, image_size, options), device, budget)
            _show(checked, checked.to_json, as_json)
            if not checked.fits:
                raise typer.Exit(1)
            return
        source = _source(model, seq_len, image_size, options)
        if source is None or global_batch_size is None:
            raise UsageError("a plan needs a model and --global-batch-size; --check FILE needs neither.")
        job = _job_of(source)
        with _waiting("planning"):
            result = api.plan(
                job,
                device,
                global_batch_size=global_batch_size,
                budget=budget,
                precision=precision,
                micro_batch_size=micro_batch_size,
                recompute=recompute,
                optimizer=optimizer,
                optimizer_implementation=optimizer_implementation,
                allow_optimizers=allow_optimizer or (),
                chunked_loss=chunked_loss,
                expandable_segments=expandable_segments,
                offload=offload,
                host_memory=host_memory,
                split_batch_norm=split_batch_norm,
                ranks=ranks,
                nodes=nodes,
                network=network,
                parallelism=parallelism,
            )
        result = replace(result, source=source)
        if output is not None:
            result.save(output)
        if not certify:
            _show(result, result.to_json, as_json)
            return
        certificate = api.certify(job, result)
        document = result.to_json() | {"certificate": certificate.to_json()}
        _show(f"{result}\n{certificate}", lambda: document, as_json)
        if not certificate.holds:
            raise typer.Exit(1)


@app.command()
def train(
    context: typer.Context,
    model: Model,
    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", help="Samples per optimizer step; a --plan says its own.", min=1),
    ] = None,
    budget: Budget = None,
    device: LocalDevice = "auto",
    precision: PrecisionName = "fp32",
    micro_batch_size: MicroBatch = None,
    recompute: Recompute = "auto",
    optimizer: OptimizerName = None,
    optimizer_implementation: OptimizerImplementationName = None,
    allow_optimizer: AllowedOptimizers = None,
    chunked_loss: ChunkedLoss = True,
    expandable_segments: ExpandableSegments = True,
    offload: Offload = True,
    host_memory: HostMemory = None,
    split_batch_norm: SplitBatchNorm = False,
    parallelism: ParallelismName = "auto",
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Train by this plan instead of searching for one.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the training data, in all; 1 if --steps is not said either.", min=1),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Most optimizer steps, in all.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Decides weights, order of samples and dropout.", min=0)] = 0,
    max_gradient_norm: Annotated[float | None, typer.Option(help="Scale gradients down to this norm.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the optimizer, which must be one by name.", min=0)
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="The same; biases and the weights of norms are left out of it.", min=0),
    ] = None,
    ema_decay: Annotated[
        float | None,
        typer.Option(help="Keep an exponential moving average of the weights, 0.999 say, and validate it."),
    ] = None,
    correct_batch_norm: Annotated[
        bool,
        typer.Option(
            "--correct-batch-norm",
            help="With several micro-batches, let running statistics go as far in a step as with one.",
        ),
    ] = False,
    patience: Annotated[
        int | None, typer.Option(help="End after so many validations without a lower loss.", min=1)
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="A new directory for weights, records and saves; runs/… if left out.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest save in --run-dir with its plan; begin if there is none."
        ),
    ] = False,
    save_every: Annotated[
        int | None,
        typer.Option(help="Save after so many steps, beside the end of each epoch and of the run.", min=1),
    ] = None,
    keep_saves: Annotated[int, typer.Option(help="How many saves to keep, the newest.", min=1)] = 2,
    compare_plain: Annotated[
        bool,
        typer.Option("--compare-plain", help="First train without the plan, from the same seed, to compare."),
    ] = False,
    seq_len: SequenceLength = None,
    image_size: ImageSize = None,
    options: ModelOptions = None,
    as_json: AsJson = False,
) -> None:
    """Plan, train inside the budget, and show predicted beside measured; under torchrun on all its ranks."""
    with _errors_told(as_json):
        from brimful import api
        from brimful.local import choose_device
        from brimful.planning import Plan
        from brimful.report import training_document, training_text
        from brimful.train.ranks import device_here, joined_ranks, nodes_launched, rank_here, ranks_launched
        from brimful.train.run_directory import check_run_directory

        job = _job(model, seq_len, image_size, options)
        _check_can_train(job, None if plan_file is not None or resume else device)
        if learning_rate is not None or weight_decay is not None:
            job, optimizer = _with_rates(job, optimizer, learning_rate, weight_decay), None

        def search(samples: int) -> Plan:
            with _waiting("planning"):
                return api.plan(
                    job,
                    device,
                    global_batch_size=samples,
                    budget=budget,
                    precision=precision,
                    micro_batch_size=micro_batch_size,
                    recompute=recompute,
                    optimizer=optimizer,
                    optimizer_implementation=optimizer_implementation,
                    allow_optimizers=allow_optimizer or (),
                    chunked_loss=chunked_loss,
                    expandable_segments=expandable_segments,
                    offload=offload,
                    host_memory=host_memory,
                    split_batch_norm=split_batch_norm,
                    ranks=ranks_launched(),
                    nodes=nodes_launched(),
                    parallelism=parallelism,
                )

        def begin() -> tuple[Plan, bool, Path]:
            """The plan, whether a run goes on, and where: what the first rank finds serves all."""
            begun = _begun(run_dir, resume, compare_plain)
            if run_dir is not None and begun is None:
                check_run_directory(run_dir)  # before time is spent on a plan
            where = run_dir or _new_run_dir(job.name)
            if begun is not None:
                return _plan_to_go_on_with(begun, global_batch_size, search), True, where
            if plan_file is not None:
                _check_nothing_is_asked_beside_a_plan(context)
                chosen = Plan.load(plan_file)
                if chosen.job != job.name:
                    raise UsageError(
                        f"{plan_file} is a plan for {chosen.job!r}, not for {job.name!r}. Plan this job."
                    )
                return chosen, False, where
            if global_batch_size is None:
                raise UsageError("say --global-batch-size, the samples per optimizer step, or give a --plan.")
            return search(global_batch_size), False, where

        found = begin() if rank_here() == 0 else None  # FSDP2 is planned for before ranks are joined
        with joined_ranks(device_here(choose_device("cpu" if device == "cpu" else None, None))) as ranks:
            chosen, goes_on, where = ranks.of_first(found)
            if ranks.is_first and not as_json:
                print(chosen, flush=True)
            result, plain = api.fit(
                job,
                chosen,
                compare_plain=compare_plain,
                run_dir=where,
                resume=goes_on,
                save_every=save_every,
                keep_saves=keep_saves,
                epochs=epochs,
                steps=steps,
                seed=seed,
                max_gradient_norm=max_gradient_norm,
                ema_decay=ema_decay,
                correct_batch_norm=correct_batch_norm,
                patience=patience,
                show_progress=not as_json,
            )
        if ranks.is_first:
            text = training_text(result, plain)
            _show(text, lambda: training_document(result, plain), as_json)
            write_file(where / "report.txt", f"{chosen}\n{text}\n")
    status = {StopReason.INTERRUPTED: INTERRUPTED, StopReason.TERMINATED: TERMINATED}
    if result.stopped_because in status:
        raise typer.Exit(status[result.stopped_because])


@app.command()
def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure again what is kept already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, in less than a minute, for better predictions of time."""
    with _errors_told(as_json):
        from brimful import api
        from brimful.measuring import cache_path
        from brimful.report import calibration_document, calibration_text

        with _progress_shown() as progress:
            devices = api.calibrate(remeasure=force, progress=progress)
        paths = [str(cache_path(device.kind)) for device in devices]
        text = "\n".join(calibration_text(device, path) for device, path in zip(devices, paths, strict=True))
        _show(text, lambda: calibration_document(devices, paths), as_json)


_SAID_BY_A_PLAN = (
    "global_batch_size", "budget", "device", "precision", "micro_batch_size", "recompute", "optimizer",
    "optimizer_implementation", "allow_optimizer", "chunked_loss", "expandable_segments", "offload",
    "host_memory", "split_batch_norm", "parallelism",
)  # fmt: skip


def _check_can_train(job: Job, device: str | None) -> None:
    """See, before time is spent on a plan, that there are data and a device to train on."""
    from brimful import api
    from brimful.local import choose_device

    if job.data is None:
        raise UsageError(
            f"{job.name} has no data to train on; built-in architectures have none. Write a job with "
            "data=lambda: bf.Data(train=…) in a file, as examples/digits.py does, and train FILE.py:job."
        )
    if device is not None:
        choose_device(None, api.resolve_device(device).kind)


def _with_rates(
    job: Job, optimizer: str | None, learning_rate: float | None, weight_decay: float | None
) -> Job:
    """The job with an optimizer by name that has these rates."""
    from brimful.optimizers import named_optimizer

    name = job.optimizer if optimizer is None else optimizer
    if not isinstance(name, str):
        raise UsageError(
            f"--learning-rate and --weight-decay are for an optimizer by name, and {job.name!r} makes its own. "
            "Say --optimizer adamw, or set them in the job."
        )
    return replace(job, optimizer=named_optimizer(name, learning_rate=learning_rate, weight_decay=weight_decay))


def _begun(run_dir: Path | None, resume: bool, compare_plain: bool) -> Path | None:
    """The plan of the run that is to go on; None if one is to begin."""
    from brimful.train.run_directory import clear_begun_run

    if not resume:
        return None
    if run_dir is None:
        raise UsageError("--resume needs --run-dir, the directory of the run that is to go on.")
    if compare_plain:
        raise UsageError("--compare-plain trains twice from the start; it cannot be resumed.")
    plan = run_dir / "plan.json"
    if plan.exists():
        return plan
    clear_begun_run(run_dir)  # it was killed before it had written as much as its plan
    return None


def _plan_to_go_on_with(begun: Path, global_batch_size: int | None, search: Callable[[int], Plan]) -> Plan:
    """The plan of the run that goes on; another for the same global batch if other ranks were launched."""
    from brimful.planning import Plan
    from brimful.train.ranks import ranks_launched

    chosen = Plan.load(begun)
    planned = chosen.settings.global_batch_size
    if global_batch_size not in (None, planned):
        raise UsageError(
            f"{begun} is a plan for a global batch of {planned}, and --global-batch-size says "
            f"{global_batch_size}: it would not be the same run."
        )
    return chosen if chosen.settings.ranks == ranks_launched() else search(planned)


def _check_nothing_is_asked_beside_a_plan(context: typer.Context) -> None:
    """A plan says how to train; what is asked beside it would not be done."""
    sources = {name: context.get_parameter_source(name) for name in _SAID_BY_A_PLAN}
    asked = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if asked:
        options = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise UsageError(f"--plan already says what {options} would. Leave out the one or the other.")


def main() -> None:
    """Run the command line."""
    if "WORLD_SIZE" in os.environ:  # DDP logs that looking for unused parameters takes time, once on every rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    app()


def _new_run_dir(job: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in job)
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _refuse(beside: Mapping[str, object], why: str) -> None:
    """Say which options that are given do not go with another."""
    asked = [name for name, value in beside.items() if value]
    if asked:
        raise UsageError(f"{why}; it does not go with {', '.join(asked)}.")


def _check(file: Path, given: JobSource | None, device: str, budget: str | None) -> PlanCheck:
    """A plan in a file against the job that is given, or else the one it was made for."""
    from brimful import api
    from brimful.planning import Plan

    kept = Plan.load(file)
    source = given or kept.source
    if source is None:
        raise UsageError(f"{file} does not say what it was made for; name the model too.")
    if given is None:
        source = _beside(file, source)
    return api.check_plan(_job_of(source), kept, None if device == "auto" else device, budget=budget)


def _beside(file: Path, source: JobSource) -> JobSource:
    """What a plan was made for, if its file is not here but where it was from the plan's own directory."""
    path, colon, factory = source.name.rpartition(":")
    found = file.parent / path
    if not colon or not path.endswith(".py") or Path(path).exists() or not found.exists():
        return source
    return replace(source, name=f"{found}:{factory}")


def _job(model: str, sequence_length: int | None, image_size: int | None, options: list[str] | None) -> Job:
    """The job that is meant, with the model's own options."""
    source = _source(model, sequence_length, image_size, options)
    assert source is not None
    return _job_of(source)


def _job_of(source: JobSource) -> Job:
    from brimful.architectures import resolve_job

    return resolve_job(source.name, **dict(source.options))


def _source(
    model: str | None, sequence_length: int | None, image_size: int | None, options: list[str] | None
) -> JobSource | None:
    """What is named to be trained; None if nothing is."""
    from brimful.planning import JobSource

    given: dict[str, Any] = {}
    if sequence_length is not None:
        given["sequence_length"] = sequence_length
    if image_size is not None:
        given["image_size"] = image_size
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {option!r} is not of the form name=value.")
        given[name] = _value(value)
    if model is None:
        if given:
            raise UsageError(f"{', '.join(given)} is an option of a model, and no model is named.")
        return None
    return JobSource(name=model, options=tuple(given.items()))


def _value(text: str) -> int | float | bool | str:
    """A number or truth value if `text` is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """On a terminal, a line on standard error while something takes seconds or minutes."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):  # prints nothing where there is no terminal
        yield


@contextmanager
def _progress_shown() -> Iterator[Callable[[str], None]]:
    """What is being measured: one line on a terminal, a line each elsewhere; on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: print(f"measuring: {what}", file=sys.stderr, flush=True)
        return
    with console.status("measuring …") as status:
        yield lambda what: status.update(f"measuring: {what}")


def _show(result: object, document: Callable[[], dict[str, Any]], as_json: bool) -> None:
    print(json.dumps(document(), indent=2) if as_json else str(result))


@contextmanager
def _errors_told(as_json: bool) -> Iterator[None]:
    """Turn our own errors into a message and an exit status; anything else is a bug and shows its trace."""
    try:
        yield
    except BrimfulError as error:
        if as_json:
            from brimful.report import error_document

            print(json.dumps(error_document(error), indent=2))
        print(
            "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr
        )
        if isinstance(error, InterruptedRunError):
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
