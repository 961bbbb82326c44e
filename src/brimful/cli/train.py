"""`brimful train`: your own job, or a recipe on files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from brimful.cli.live import live_page, showing_run
from brimful.cli.options import (
    AsJson,
    ImageOptions,
    LanguageModelOptions,
    MergeAdapters,
    Model,
    ModelOptions,
    RunOptions,
    TextClassificationOptions,
    TrainFlags,
    arguments,
    flattened,
)
from brimful.cli.other_names import EXAMPLES
from brimful.cli.output import INTERRUPTED, TERMINATED, asked_on_command_line, report_errors, say, show
from brimful.cli.sources import find_job, may_be_plan_of
from brimful.cli.streams import print_result
from brimful.errors import InfeasibleError, UsageError
from brimful.options import LoadingOptions, PlanOptions
from brimful.results import StopReason
from brimful.utils.files import write_file
from brimful.utils.status import busy

if TYPE_CHECKING:
    from brimful.job import Job
    from brimful.planner import Plan
    from brimful.trainer import Callback

_OWN_JOB = "job"

_OF_ADAMS_KIND = ("adamw", "adam", "adamw8bit")
"""Optimizers that use the same learning rates."""

_TASK_BATCH = 32
"""Default samples per optimizer step of a recipe: a choice, typical of published fine-tuning."""


class _TasksOrJob(TyperGroup):
    """`train TASK …`, and `train MODEL …` for `train job MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the default command if none is given."""
        if args and args[0] not in self.commands and args[0] != "--help":
            if args[0] in EXAMPLES:
                ctx.fail(f"there is no command for {args[0]}. {EXAMPLES[args[0]]}")
            near = get_close_matches(args[0], self.commands, n=1, cutoff=0.75)
            if near:
                ctx.fail(f"no task or job is called {args[0]!r}. Meant is perhaps {near[0]!r}.")
            args = [_OWN_JOB, *args]
        return super().parse_args(ctx, args)


train_app = typer.Typer(
    cls=_TasksOrJob,
    no_args_is_help=True,
    help="Plan, train inside the budget, and show predicted beside measured; under torchrun on all its ranks.",
    epilog="`brimful train MODEL …` is short for `brimful train job MODEL …`, whose options "
    "`brimful train job --help` lists.",
    rich_markup_mode=None,
)


@train_app.command(_OWN_JOB)
@flattened
def own_job(
    context: typer.Context,
    model: Model,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    loading: LoadingOptions,
    options: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Train a job of your own: MODEL is path/to/file.py:NAME or package.module:NAME."""
    with report_errors(as_json):
        from brimful.trainer.data.loading import with_loading

        job = find_job(model, options)
        if job.data is None:
            raise UsageError(
                f"{job.name} has no data to train on. Write a job with "
                "data=lambda: bf.Data(train=…) in a file, as examples/digits.py does, and train FILE.py:job. "
                "For files of your own there are recipes, as brimful train language-model FILE --model "
                f"{model}: brimful train --help."
            )
        _train(with_loading(job, loading), context, run, planning, training, as_json)


@train_app.command("images")
@flattened
def images(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(help="A folder with a folder for each class, or with train and val that have.")
    ],
    options: ImageOptions,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    as_json: AsJson = False,
) -> None:
    """Train an image classifier on a folder of class folders; --global-batch-size defaults to 32."""
    with report_errors(as_json):
        from brimful import recipes

        if planning.memory_format is None:
            planning = replace(planning, memory_format="auto")
        with busy("looking at the images"):
            job = recipes.image_classification(directory, seed=training.seed, **arguments(options))
        _train(job, context, run, planning, training, as_json, usual_batch_size=_TASK_BATCH)


@train_app.command("text-classification")
@flattened
def text_classification(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A .csv or .tsv file with a header, or a .jsonl file.")],
    options: TextClassificationOptions,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    merge_adapters: MergeAdapters = False,
    as_json: AsJson = False,
) -> None:
    """Train a text classifier on a table; --global-batch-size defaults to 32."""
    with report_errors(as_json):
        from brimful import recipes

        finish = _saving_pretrained(options.lora, merge_adapters)
        with busy("reading the texts"):
            job = recipes.text_classification(file, seed=training.seed, **arguments(options))
        _train(job, context, run, planning, training, as_json, usual_batch_size=_TASK_BATCH, finish=finish)


@train_app.command("language-model")
@flattened
def language_model(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(help="Files of text; .jsonl, .csv and .tsv have a text in each row.")
    ],
    options: LanguageModelOptions,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    merge_adapters: MergeAdapters = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model on texts; --global-batch-size defaults to 32 sequences."""
    with report_errors(as_json):
        from brimful import recipes

        finish = _saving_pretrained(options.lora, merge_adapters)
        with busy("reading the texts"):
            job = recipes.language_model(*files, **arguments(options))
        _train(job, context, run, planning, training, as_json, usual_batch_size=_TASK_BATCH, finish=finish)


def _train(
    job: Job,
    context: typer.Context,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    as_json: bool,
    *,
    usual_batch_size: int | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Plan a job unless a plan is given, train it, and report the result."""
    from brimful import api
    from brimful.distributed.ranks import (
        check_launch,
        current_rank,
        init_distributed,
        local_device,
    )
    from brimful.execution.setup import choose_device
    from brimful.profiling.named_device import resolve_device
    from brimful.report import training_document, training_text

    check_launch()
    if run.plan_only and (run.plan_file is not None or run.resume):
        raise UsageError("--plan-only searches for a plan, and --plan and --resume bring one.")
    if run.plan_only and (run.live or run.live_port is not None):
        raise UsageError(
            "--plan-only trains nothing that the page of --live could follow. For a page of the plan, write it "
            "with --plan-only --json > plan.json, then: brimful report plan.json."
        )
    page = context.with_resource(live_page(f"training {job.name}", run.live, run.live_port))
    if run.plan_file is None and not run.resume and not run.plan_only:  # before time is spent on a plan
        choose_device(None, resolve_device(run.device).kind)
    rate = run.learning_rate
    if rate is None and planning.optimizer in _OF_ADAMS_KIND:
        rate = _own_rate(job)
    if rate is not None or run.weight_decay is not None:
        job = _with_rates(job, planning.optimizer, rate, run.weight_decay)
        planning = replace(planning, optimizer=None)

    found = None
    if current_rank() == 0 and not as_json and usual_batch_size is not None:
        print_result(_recipe_summary(job))
    if current_rank() == 0:
        found = _begin(job, context, run, planning, training, usual_batch_size)
    if run.plan_only:
        if found is not None:
            show(found[0], found[0].to_json, as_json)
        return
    with init_distributed(local_device(choose_device("cpu" if run.device == "cpu" else None, None))) as ranks:
        chosen, goes_on, where = ranks.broadcast(found)  # FSDP2 is planned for before ranks are joined
        if ranks.is_first and not as_json:
            print_result(str(chosen))
        result, plain = api.fit(
            job,
            chosen,
            run_dir=where,
            resume=goes_on,
            callbacks=[*_trackers(run, where), *showing_run(page, where)],
            show_progress=not as_json,
            **training.asked(),
        )
    if ranks.is_first:
        text = training_text(result, plain)
        write_file(where / "report.txt", f"{chosen}\n{text}\n", follows_links=False)
        if as_json:
            show(text, lambda: training_document(result, plain), as_json)
        else:
            print_result(text)  # best effort: it is in the run directory
    status = {StopReason.INTERRUPTED: INTERRUPTED, StopReason.TERMINATED: TERMINATED}
    if result.stopped_because in status:
        raise typer.Exit(status[result.stopped_because])
    if ranks.is_first and finish is not None:
        finish(where)


def _saving_pretrained(lora: str | None, merge_adapters: bool) -> Callable[[Path], None]:
    """A function that saves the model of a text recipe from its run directory, after training."""
    if merge_adapters and lora is None:
        raise UsageError("--merge-adapters needs --lora; otherwise the trained model is whole.")
    return partial(_save_pretrained, has_adapters=lora is not None, merge=merge_adapters)


def _save_pretrained(run: Path, *, has_adapters: bool, merge: bool) -> None:
    """Write the model for transformers and peft, and say where."""
    from brimful import recipes

    with busy("writing the model for from_pretrained"):
        made = recipes.save_pretrained(run)
    library = "peft's AutoPeftModel classes" if has_adapters else "transformers"
    say(f"{made} is for from_pretrained of {library}")
    if merge:
        with busy("merging the adapters"):
            merged = recipes.save_pretrained(run, run / "merged", merge=True)
        say(f"{merged} has the adapters merged into the weights, for from_pretrained of transformers")


def _recipe_summary(job: Job) -> str:
    """The samples, classes and model of a recipe's job, in one line."""
    about = dict(job.about or {})
    counts = [
        f"{about[name]} {name.replace('_', ' ')}"
        for name in about
        if name.startswith(("training_", "validation_"))
    ]
    if "classes" in about:
        counts.append(f"{len(about['classes'])} classes")
    adapters = f", LoRA {about['lora']}" if "lora" in about else ""
    frozen = f" over {about['quantization']}" if "quantization" in about else ""
    return f"{job.name}: {', '.join(counts)}; {about['model']} from {about['starts_from']}{adapters}{frozen}"


def _trackers(run: RunOptions, where: Path) -> list[Callback]:
    """The requested trackers; their files are in the run directory."""
    from brimful.trainer import TensorBoard, WandB
    from brimful.trainer.storage.run_directory import TENSORBOARD

    trackers: list[Callback] = []
    if run.tensorboard:
        trackers.append(TensorBoard(where / TENSORBOARD))
    if run.wandb is not None:
        trackers.append(WandB(run.wandb, name=where.name))
    return trackers


def _begin(
    job: Job,
    context: typer.Context,
    run: RunOptions,
    planning: PlanOptions,
    training: TrainFlags,
    usual_batch_size: int | None,
) -> tuple[Plan, bool, Path]:
    """The plan, whether to resume, and the run directory; the first rank finds them for all."""
    from brimful.planner import Plan
    from brimful.trainer.storage.run_directory import check_run_directory

    def search(samples: int) -> Plan:
        found = _search(job, run.device, samples, planning, context)
        if usual_batch_size is None or run.learning_rate is not None or planning.optimizer is not None:
            return found  # another optimizer has its own default learning rate, not the recipe's
        return replace(found, notes=(*found.notes, *_rate_notes(job, samples, usual_batch_size)))

    begun = _begun(run.run_dir, run.resume, training.compare_plain)
    if run.run_dir is not None and not run.resume:
        check_run_directory(run.run_dir)  # before time is spent on a plan
    where = run.run_dir or _new_run_dir(job.name)
    if begun is not None:
        return _plan_to_resume(begun, run.global_batch_size, search), True, where
    if run.plan_file is not None:
        _check_nothing_is_asked_beside_a_plan(context)
        chosen = Plan.load(run.plan_file)
        if not may_be_plan_of(chosen, job):
            raise UsageError(
                f"{run.plan_file} is a plan for {chosen.job!r}, not for {job.name!r}. Plan this job."
            )
        return chosen, run.resume, where
    samples = usual_batch_size if run.global_batch_size is None else run.global_batch_size
    if samples is None:
        raise UsageError("say --global-batch-size, the samples per optimizer step, or give a --plan.")
    return search(samples), run.resume, where


def _search(job: Job, device: str, samples: int, planning: PlanOptions, context: typer.Context) -> Plan:
    """Search a plan for the number of launched ranks; it suggests what this command can be asked for."""
    from brimful import api
    from brimful.distributed.ranks import nodes_launched, ranks_launched
    from brimful.integrations.suggestions import infeasible_with, translated

    translation = _flag_in(context)
    launched: dict[str, Any] = {"world_size": ranks_launched(), "num_nodes": nodes_launched()}
    with busy("planning"):
        try:
            found = api.plan(job, device, global_batch_size=samples, **launched, **arguments(planning))
        except InfeasibleError as error:
            raise infeasible_with(error, tuple(translated(error.suggestions, translation))) from None
    return replace(found, suggestions=tuple(translated(found.suggestions, translation)))


def _flag_in(context: typer.Context) -> Callable[[str], str | None]:
    """A translation of flags of `brimful plan` to this command's; torchrun starts several ranks."""
    own = {flag for parameter in context.command.params for flag in parameter.opts}

    def translate(flag: str) -> str | None:
        name, _, value = flag.partition(" ")
        if name == "--world-size":
            return f"torchrun --nproc-per-node {value}"
        return flag if name in own else None

    return translate


def _rate_notes(job: Job, samples: int, usual_batch_size: int) -> tuple[str, ...]:
    """A note on the learning rate of a recipe, if batches are not of the size that it is meant for."""
    from brimful.optimizers import NamedOptimizer

    own = job.optimizer
    rate = own.learning_rate if isinstance(own, NamedOptimizer) else None
    if rate is None or samples == usual_batch_size:
        return ()
    factor = samples / usual_batch_size
    return (
        f"The learning rate stays at {rate:g}, which the recipe has for global batches of {usual_batch_size}; "
        f"this one is of {samples}. Scaled by the square root of the batch it would be "
        f"{rate * math.sqrt(factor):.2g}, scaled linearly {rate * factor:.2g}: set --learning-rate. "
        "Gradient accumulation keeps the global batch, and so the learning rate.",
    )


def _own_rate(job: Job) -> float | None:
    """The learning rate that a job gives to an optimizer of Adam's kind; None if it has none of its own."""
    from brimful.optimizers import NamedOptimizer

    own = job.optimizer
    return own.learning_rate if isinstance(own, NamedOptimizer) and own.name in _OF_ADAMS_KIND else None


def _with_rates(
    job: Job, optimizer: str | None, learning_rate: float | None, weight_decay: float | None
) -> Job:
    """The job with an optimizer by name, or else its own, with these rates; None keeps the optimizer's."""
    from brimful.optimizers import NamedOptimizer, named_optimizer

    own = named_optimizer(job.optimizer) if isinstance(job.optimizer, str) else job.optimizer
    if optimizer is None and not isinstance(own, NamedOptimizer):
        raise UsageError(
            f"--learning-rate and --weight-decay are for an optimizer by name, and {job.name!r} makes its own. "
            "Say --optimizer adamw, or set them in the job."
        )
    chosen = own if optimizer is None else named_optimizer(optimizer)
    assert isinstance(chosen, NamedOptimizer)
    given: dict[str, Any] = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    return replace(
        job, optimizer=replace(chosen, **{name: rate for name, rate in given.items() if rate is not None})
    )


def _begun(run_dir: Path | None, resume: bool, compare_plain: bool) -> Path | None:
    """Path of the plan of the run to resume; None to start a new run."""
    from brimful.trainer.storage.run_directory import check_restart

    if not resume:
        return None
    if run_dir is None:
        raise UsageError("--resume needs --run-dir, the directory of the run to resume.")
    if compare_plain:
        raise UsageError("--compare-plain trains twice from the start; it cannot be resumed.")
    plan = run_dir / "plan.json"
    if plan.exists():
        return plan
    check_restart(run_dir)  # it was killed before it had written as much as its plan, or there is none yet
    return None


def _plan_to_resume(begun: Path, global_batch_size: int | None, search: Callable[[int], Plan]) -> Plan:
    """The plan of the run to resume; a new one for the same global batch if the world size changed."""
    from brimful.distributed.ranks import ranks_launched
    from brimful.planner import Plan

    chosen = Plan.load(begun)
    planned = chosen.settings.global_batch_size
    if global_batch_size not in (None, planned):
        raise UsageError(
            f"{begun} is a plan for a global batch of {planned}, and --global-batch-size says "
            f"{global_batch_size}: it would not be the same run."
        )
    return chosen if chosen.settings.world_size == ranks_launched() else search(planned)


def _check_nothing_is_asked_beside_a_plan(context: typer.Context) -> None:
    """Refuse planning options next to a plan, which would have no effect."""
    said = {"global_batch_size", "device", *(field.name for field in fields(PlanOptions))}
    asked = asked_on_command_line(context, said.__contains__)
    if asked:
        raise UsageError(f"--plan already says what {', '.join(asked)} would. Leave out the one or the other.")


def _new_run_dir(job: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in job)
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
