"""The `brimful` command; `output.py` says what its exit statuses mean."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from brimful import __version__
from brimful.cli.doctor import doctor
from brimful.cli.largest import largest_estimate, largest_plan, with_size_after_largest
from brimful.cli.options import (
    MODEL_ARGUMENT,
    AsJson,
    DeviceName,
    GlobalBatch,
    LargestSize,
    MemoryFormatName,
    MicroBatch,
    Model,
    ModelOptions,
    OnePrecision,
    OptimizerImplementationName,
    OptimizerName,
    RunPrices,
    SplitBatchNorm,
    arguments,
    flattened,
)
from brimful.cli.other_names import explain
from brimful.cli.output import (
    asked_on_command_line,
    refuse,
    report_bad_usage,
    report_errors,
    show,
    show_warning,
)
from brimful.cli.report import report_page
from brimful.cli.run import run
from brimful.cli.sources import (
    built_in_source,
    find_job,
    find_source,
    job_of,
    may_be_plan_of,
    missing_batch,
)
from brimful.cli.streams import replace_standard_streams
from brimful.cli.train import train_app
from brimful.cli.whole_runs import run_asked_for
from brimful.errors import UsageError
from brimful.options import VARIANT_OPTIONS, PlanOptions, RunLength
from brimful.utils.status import busy, report

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planner import JobSource, Plan, TechniqueComparison


class _Commands(TyperGroup):
    """The commands; a script that is named in place of one is answered with how to run it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a name."""
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            near = [f"brimful {each}" for each in get_close_matches(args[0], self.commands, n=1)]
            meant = f"Meant is perhaps: {near[0]}." if near else "To see all: brimful --help."
            if args[0].endswith(".py"):
                meant = (
                    f"To watch a script: brimful run {args[0]}. For a job in it: "
                    f"brimful estimate {args[0]}:NAME."
                )
            ctx.fail(f"there is no command {args[0]}. {meant}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="brimful",
    cls=_Commands,
    help="Fill your GPU to the brim, never over it: predict, plan and train inside a memory budget.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(train_app, name="train")
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)(run)
app.command()(doctor)
app.command("report")(report_page)


_START = """\
Fill your GPU to the brim, never over it. Three commands to start with:

  brimful run train.py
      what holds the memory of your training script, and what is wrong with it
  brimful estimate gpt2 --micro-batch-size 4 --device "RTX 3060"
      whether a step of a model fits a GPU; no GPU is needed
  brimful plan gpt2 --global-batch-size 32 --device "RTX 3060"
      the fastest way to train it that fits

All commands: brimful --help"""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version or context.invoked_subcommand is None:
        with report_errors(as_json=False):
            show(f"brimful {__version__}" if version else _START, dict, as_json=False)
        raise typer.Exit


@app.command()
@flattened
def estimate(
    context: typer.Context,
    model: Model,
    options: ModelOptions,
    length: RunLength,
    device: DeviceName = "auto",
    micro_batch_size: MicroBatch = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Forward and backward passes per optimizer step.", min=1)
    ] = 1,
    precision: OnePrecision = "fp32",
    optimizer: OptimizerName = None,
    optimizer_implementation: OptimizerImplementationName = None,
    recompute: Annotated[
        str,
        typer.Option("--recompute", help="Activation checkpointing: all, none, or units by pattern: *.layer.*"),
    ] = "none",
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Compute a large cross-entropy and its logits in parts.")
    ] = False,
    offload_activations: Annotated[
        bool,
        typer.Option("--offload-activations", help="Copy what every unit but the last saves to host memory."),
    ] = False,
    optimizer_in_backward: Annotated[
        bool, typer.Option("--optimizer-in-backward", help="Update each parameter in backward.")
    ] = False,
    offload_optimizer: Annotated[
        bool,
        typer.Option("--offload-optimizer", help="Keep the optimizer state in host memory and update there."),
    ] = False,
    memory_format: MemoryFormatName = None,
    compile: Annotated[
        str,
        typer.Option("--compile", help="What torch.compile compiles: none, units (blocks) or model."),
    ] = "none",
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Judge against this size, such as 11GiB, not what the device has."),
    ] = None,
    largest: LargestSize = None,
    allocator: Annotated[
        str,
        typer.Option(
            help="How PyTorch's allocator is set, as in PYTORCH_ALLOC_CONF: expandable_segments:True."
        ),
    ] = "",
    compare_allocators: Annotated[
        bool, typer.Option("--compare-allocators", help="Also show what other allocator settings would change.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases", help="Also show what evaluation, saving and loading take.")
    ] = False,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave out this correction; may be repeated.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the captured steps to this file (.json or .json.gz).")
    ] = None,
    prices: RunPrices = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Predict the memory of model.generate with as many new tokens instead, of transformers; "
            "--seq-len is then the prompt.",
            min=1,
        ),
    ] = None,
    beams: Annotated[int, typer.Option("--beams", help="Beams of each sample, with --new-tokens.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Predict the memory and time of one training step, without running it; with a length, of a whole run."""
    with report_errors(as_json):
        from brimful import api
        from brimful.prediction import Verdict
        from brimful.report import whole_run_document
        from brimful.report.plans import phase_lines

        if new_tokens is not None:
            why = "--new-tokens predicts generation, which has no training step"
            _check_nothing_is_asked_beside(context, why, _BESIDE_A_GENERATION)
            found = api.estimate_generation(
                find_job(model, options),
                device,
                new_tokens=new_tokens,
                num_beams=beams,
                prompt_tokens=options.seq_len,
                micro_batch_size=micro_batch_size or 1,
                precision=precision,
                budget=budget,
                allocator=allocator,
            )
            show(found, found.to_json, as_json)
            if found.verdict is Verdict.DOES_NOT_FIT:
                raise typer.Exit(1)
            return
        if beams != 1:
            raise UsageError("--beams are of a generation; say --new-tokens too.")
        predict_run = run_asked_for(length, prices, device)
        source = find_source(model, options)
        assert source is not None
        asked: dict[str, Any] = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "precision": precision,
            "optimizer": optimizer,
            "optimizer_implementation": optimizer_implementation,
            "recompute": recompute,
            "chunked_loss": chunked_loss,
            "offload_activations": offload_activations,
            "optimizer_in_backward": optimizer_in_backward,
            "offload_optimizer": offload_optimizer,
            "memory_format": memory_format,
            "compile": compile,
            "budget": budget,
            "allocator": allocator,
            "compare_allocators": compare_allocators,
            "evaluate": phases,
            "without": without or (),
            "save_trace": save_trace,
        }
        if largest is None:
            result = api.estimate(job_of(source), device, micro_batch_size=micro_batch_size, **asked)
            text, document = str(result), result.to_json()
        else:
            of_size = largest_estimate(source, largest, device, micro_batch_size, asked)
            result, text, document = of_size.estimate, str(of_size), of_size.to_json()
            document["largest_value"]["what"] = largest
        lines = [text, *(phase_lines(result) if phases else ())]
        if predict_run is not None:
            run = None if result.verdict is Verdict.DOES_NOT_FIT else predict_run(result)
            lines.append("  run: not predicted, as the step does not fit" if run is None else str(run))
            document |= whole_run_document(run)
        show("\n".join(lines), lambda: document, as_json)
    if result.verdict is Verdict.DOES_NOT_FIT:
        raise typer.Exit(1)


@app.command()
@flattened
def gpus(
    model: Model,
    options: ModelOptions,
    length: RunLength,
    global_batch_size: Annotated[
        int, typer.Option("--global-batch-size", help="Samples per optimizer step.", min=1)
    ],
    precision: OnePrecision = "fp32",
    optimizer: OptimizerName = None,
    split_batch_norm: SplitBatchNorm = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device", help="Only this GPU, by name or described; may be repeated. Default: all known."
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="Price per hour of GPUs, for the cost of a step, of a million samples and of a whole run: CSV "
            "with the columns gpu and price_per_hour, or a JSON object."
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(help="speed, memory or cost. Default: by speed, and JSON in the order of the table."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare GPUs for a model: which can train it, how, how fast, and at what cost; with a length, a run."""
    with report_errors(as_json):
        from brimful import api

        if length.is_given:
            length.check()
        job = find_job(model, options)
        with busy("comparing GPUs"):
            fits = api.gpus(
                job,
                global_batch_size=global_batch_size,
                precision=precision,
                optimizer=optimizer,
                split_batch_norm=split_batch_norm,
                devices=device,
                prices=prices,
                sort=sort,
            )
        if length.is_given:
            fits = fits.predict_run(**arguments(length))
        show(str(fits), fits.to_json, as_json)


@app.command()
@flattened
def plan(
    context: typer.Context,
    planning: PlanOptions,
    options: ModelOptions,
    length: RunLength,
    model: Annotated[str | None, MODEL_ARGUMENT] = None,
    global_batch_size: GlobalBatch = None,
    device: DeviceName = "auto",
    world_size: Annotated[
        int,
        typer.Option(help="Devices of this kind that divide the global batch and train together.", min=1),
    ] = 1,
    num_nodes: Annotated[int, typer.Option(help="Machines among which the ranks are divided.", min=1)] = 1,
    network: Annotated[
        str | None,
        typer.Option(
            help="Network bandwidth between machines in bytes per second, such as 25GB. Default: 100 Gbit/s."
        ),
    ] = None,
    largest: LargestSize = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="See whether the plan in this file still fits, for use in CI: exit status 1 if not. A model "
            "that is not built in must be named too."
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="FILE FILE", help="Show what differs between the plans in two files."),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL[=FILE]",
            help="Also write the plan as the file that another tool reads: transformers, accelerate, "
            "deepspeed, fsdp or lightning; may be repeated. With --check, of the plan that is checked. "
            "Standard error lists what the tool cannot express. FILE defaults to brimful-TOOL.json or .yaml.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also compute a batch with and without the plan, and compare."),
    ] = False,
    prices: RunPrices = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train a global batch inside a memory budget; with a length, predict the run."""
    with report_errors(as_json):
        from brimful import api
        from brimful.cli.exports import export_files, write_exports
        from brimful.planner import Plan
        from brimful.report import (
            differences_document,
            differences_report,
            whole_run_document,
        )
        from brimful.report.layout import as_text

        files = export_files(export or ())
        if diff is not None:
            _check_nothing_is_asked_beside(context, "--diff compares two files", {"diff", "as_json"})
            first, second = map(Plan.load, diff)
            names = str(diff[0]), str(diff[1])
            text = as_text(differences_report(first, second, names))
            show(text, lambda: differences_document(first, second), as_json)
            return
        if check is not None:
            takes = "--check takes the settings of the plan in its file"
            _check_nothing_is_asked_beside(context, takes, _BESIDE_A_CHECK)
            given = find_source(model, options)
            kept = Plan.load(check)
            job = _job_of_checked(context, check, kept, given, device, planning.budget)
            checked = api.check_plan(job, kept, None if device == "auto" else device, budget=planning.budget)
            write_exports(job, kept, files)
            show(checked, checked.to_json, as_json)
            if not checked.fits:
                raise typer.Exit(1)
            return
        source = find_source(model, options)
        if source is None:
            raise UsageError("a plan needs a model; only --check FILE of a built-in one does without.")
        predict_run = run_asked_for(length, prices, device)
        asked = {"world_size": world_size, "num_nodes": num_nodes, "network": network, **arguments(planning)}
        if largest is not None:
            of_size = largest_plan(source, largest, device, global_batch_size, asked)
            result, text, document = of_size.plan, str(of_size), of_size.to_json()
            document["largest_value"]["what"] = largest
        elif global_batch_size is not None:
            with busy("planning"):
                found = api.plan(job_of(source), device, global_batch_size=global_batch_size, **asked)
            result = replace(found, source=source)
            text, document = str(result), result.to_json()
        else:
            raise missing_batch(source, "plan")
        assert result.source is not None
        job = job_of(result.source)
        if output is not None:
            result.save(output)
        write_exports(job, result, files)
        shown = [text]
        if predict_run is not None:
            run = predict_run(result)
            shown.append(str(run))
            document |= whole_run_document(run)
        certificate = api.verify(job, result) if verify else None
        if certificate is not None:
            shown.append(str(certificate))
            document["certificate"] = certificate.to_json()
        show("\n".join(shown), lambda: document, as_json)
        if certificate is not None and not certificate.holds:
            raise typer.Exit(1)


@app.command()
@flattened
def compare(
    options: ModelOptions,
    model: Annotated[str | None, MODEL_ARGUMENT] = None,
    global_batch_size: GlobalBatch = None,
    device: DeviceName = "auto",
    budget: Annotated[
        str | None, typer.Option(help="Size that a step must fit, such as 11GiB. Default: device capacity.")
    ] = None,
    precision: OnePrecision = "fp32",
    optimizer: OptimizerName = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples in each micro-batch of gradient accumulation. Default: a quarter of the batch.", min=1
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also run each row that fits on this machine, each in a process of its own; of a study, train "
            "its small scale on the CPU.",
        ),
    ] = False,
    study: Annotated[
        str | None,
        typer.Option(
            help="Predict the table of a guide, beside its figures where it has some, instead of a model: "
            "bert-large, xlm-r, amp, dtypes, accumulation, batch-norm, bert-checkpointing, vgg16, deep-mlp, "
            "optimizers, anatomy, sizes, memory-format, dataloader, distributed, balanced-loss, zero, moe or "
            "compile. Default device: that of the guide."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw memory and speed into this file (.svg, .png, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare techniques for a model: what each costs and saves, beside the plan."""
    with report_errors(as_json):
        if markdown:
            refuse({"--json": as_json}, "--markdown prints a table")
        source = find_source(model, options)
        if study is not None:
            given: dict[str, object] = {
                "MODEL": source,
                "--global-batch-size": global_batch_size,
                "--budget": budget,
            }
            given |= {"--optimizer": optimizer, "--micro-batch-size": micro_batch_size}
            given |= {"--markdown": markdown, "--plot": plot, "--precision": precision != "fp32"}
            refuse(given, "--study says what is compared")
            _show_study(study, device, runs_small=measure, as_json=as_json)
            return
        if source is None:
            raise UsageError(
                "say what to compare: MODEL and --global-batch-size, the samples in an optimizer step; or "
                "--study NAME."
            )
        if global_batch_size is None:
            raise missing_batch(source, "compare")
        found = _compared(
            source,
            device,
            measure=measure,
            global_batch_size=global_batch_size,
            budget=budget,
            precision=precision,
            optimizer=optimizer,
            micro_batch_size=micro_batch_size,
        )
        if plot is not None:
            found.plot(plot)
        show(found.to_markdown() if markdown else found, found.to_json, as_json)


def _compared(source: JobSource, device: str, *, measure: bool, **asked: Any) -> TechniqueComparison:
    from functools import partial

    from brimful import api
    from brimful.models import resolve_job

    if measure:
        api.check_is_here(device)
    with busy("comparing"):
        found = api.compare(job_of(source), device, **asked)
        if measure:
            found = api.measured_comparison(found, partial(resolve_job, source.name, **source.options), device)
    return found


def _show_study(name: str, device: str, *, runs_small: bool, as_json: bool) -> None:
    from brimful.studies import find_study, run_study

    result = run_study(find_study(name), None if device == "auto" else device, runs_small=runs_small)
    show(result, result.to_json, as_json)


@app.command()
def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure again what is kept already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, in less than a minute, for better predictions of time."""
    with report_errors(as_json):
        from brimful import api
        from brimful.profiling import cache_path
        from brimful.report import calibration_document, calibration_text

        with busy("measuring"):
            devices = api.calibrate(remeasure=force, progress=report)
        paths = [str(cache_path(device.kind)) for device in devices]
        text = "\n".join(calibration_text(device, path) for device, path in zip(devices, paths, strict=True))
        show(text, lambda: calibration_document(devices, paths), as_json)


@app.command()
def models(
    word: Annotated[
        str, typer.Argument(help="Only those with this in their name or class.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the models that estimate, plan and gpus know by name."""
    with report_errors(as_json):
        from brimful.cli.models import models_document, models_text

        show(models_text(word), lambda: models_document(word), as_json)


_BESIDE_A_CHECK = {
    *("model", "options", "seq_len", "image_size", *VARIANT_OPTIONS),
    *("device", "budget", "check", "export", "as_json"),
}
"""Parameters that say what to check a plan against; its file has the planning options."""


def _check_nothing_is_asked_beside(context: typer.Context, why: str, permitted: Collection[str]) -> None:
    """Refuse options other than those permitted."""
    asked = asked_on_command_line(context, lambda name: name not in permitted)
    if asked:
        raise UsageError(f"{why}; it does not go with {', '.join(asked)}.")


def _job_of_checked(
    context: typer.Context, file: Path, kept: Plan, given: JobSource | None, device: str, budget: str | None
) -> Job:
    """The given job, or else the built-in one that a plan in a file was made for."""
    if given is None:
        asked = {"--device": device, "--budget": budget}
        on_command_line = asked_on_command_line(context, lambda name: name in ("device", "budget", "as_json"))
        repeated = [f"{option}={asked[option]}" if option in asked else option for option in on_command_line]
        given = built_in_source(file, kept, repeated)
    job = job_of(given)
    is_same_source = kept.source is not None and kept.source.name == given.name
    if not may_be_plan_of(kept, job) and not is_same_source:
        raise UsageError(f"{file} is a plan for {kept.job!r}, and the model given is {job.name!r}.")
    return job


_BESIDE_A_GENERATION = frozenset(
    (
        *("model", "new_tokens", "beams", "device", "micro_batch_size", "precision", "budget", "allocator"),
        *("seq_len", "image_size", "options", *VARIANT_OPTIONS, "as_json"),
    )
)
"""Options of `estimate` that a generation has too."""


_PREDICTING = ("estimate", "plan", "compare", "gpus", "models")
"""Commands that run nothing for real."""

_OF_LIBRARIES = ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree")
"""Loggers by which torchao 0.18 and bitsandbytes 0.46 warn that kernels cannot be loaded, and torch 2.13 that
torchao registers enums in a deprecated way. Transformers imports torchao wherever it is installed."""


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:  # the script's streams, warnings and arguments stay as Python has them
        sys.exit(_exit_status(sys.argv[1:]))
    replace_standard_streams()
    warnings.showwarning = show_warning  # type: ignore[assignment]  # it is called by position
    for name in _OF_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    if "WORLD_SIZE" in os.environ:  # DDP logs that looking for unused parameters takes time, once on every rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.argv[1:2] and sys.argv[1] in _PREDICTING:
        # The process ends soon, and collecting takes a second where traces are large (`gc_pause`).
        gc.disable()
    sys.exit(_exit_status(with_size_after_largest(sys.argv[1:])))


def _exit_status(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    try:
        return app(arguments, standalone_mode=False) or 0
    except typer.Abort:
        return 1
    except Exception as error:
        if not isinstance(error, _BAD_USAGE):
            raise
        explain(error)
        error.show()
        report_bad_usage(error.format_message(), as_json="--json" in sys.argv)
        return int(error.exit_code)


_BAD_USAGE: Any = typer.BadParameter.__base__
"""click's UsageError; newer typer has a click of its own."""
