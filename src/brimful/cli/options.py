"""Options that several commands take, each declared once, in records; and how a command takes a record.

A command names a record as the type of a parameter; `flattened` makes each of its fields an option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from brimful.training import LARGEST_SEED


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are records become an option for each of their fields.

    Args:
        command: Its parameters are given by name.

    Returns:
        The same command; what typer reads, its signature, has the fields in the records' place.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    records = {name: hints[name] for name in parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        _check_paths(given.values())
        for name, record in records.items():
            given[name] = record(**{field.name: given.pop(field.name) for field in fields(record)})
        command(**given)

    flat = []
    for name, parameter in parameters.items():
        flat += _options_of(records[name]) if name in records else [parameter.replace(annotation=hints[name])]
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    call.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    return call


def _check_paths(values: Iterable[Any]) -> None:
    """Refuse paths at which no file can be: too long, through a file, through links that lead to themselves."""
    several = [value if isinstance(value, list) else [value] for value in values]
    for path in (path for paths in several for path in paths if isinstance(path, Path)):
        try:
            path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise typer.BadParameter(f"{error.strerror}: {path}.") from None


def _options_of(record: type) -> list[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=hints[field.name],
        )
        for field in fields(record)
    ]


def _default_of(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


MODEL_ARGUMENT = typer.Argument(
    help="What to train: a built-in architecture (bert-large, resnet50, …), package.module:factory, "
    "or path/to/file.py:factory; the factory returns a brimful.Job.",
    show_default=False,
)
Model = Annotated[str, MODEL_ARGUMENT]
DeviceName = Annotated[
    str,
    typer.Option("--device", help='A GPU by name, such as "RTX 3090"; cuda or cpu of this machine; auto.'),
]
LocalDevice = Annotated[
    str,
    typer.Option(
        "--device",
        help="cuda, cpu, or auto: the GPU if there is one; --plan-only also takes any by name.",
    ),
]
OnePrecision = Annotated[str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")]
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
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch-size", help="Samples in one forward and backward pass.", min=1)
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch-size", help="Samples per optimizer step. It never changes.", min=1),
]
SplitBatchNorm = Annotated[
    bool,
    typer.Option(
        "--split-batch-norm",
        help="Permit splitting a batch that BatchNorm couples, or a layer that each forward changes; "
        "statistics are then over micro-batches.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a model that is named may take."""

    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens per sample, for models that have such an option.")
    ] = None
    image_size: Annotated[
        int | None,
        typer.Option("--image-size", help="Pixels per side, for models that have such an option."),
    ] = None
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another option of the model, as name=value; may be repeated."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is asked of a plan: settings that are pinned, and what may be chosen. Named as `api.plan` does."""

    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Bytes permitted on the device, such as 11GiB, or a share of what plain training takes, "
            "such as 50%. Left out: what the device has, less a margin of 5 % on a GPU.",
        ),
    ] = None
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16; for plans also auto.")
    ] = "fp32"
    micro_batch_size: MicroBatch = None
    recompute: Annotated[
        str, typer.Option("--recompute", help="all, none, or auto: what becomes of saved tensors.")
    ] = "auto"
    optimizer: OptimizerName = None
    optimizer_implementation: OptimizerImplementationName = None
    allow_optimizers: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-optimizer",
            help="Another optimizer that may be chosen, though it changes the mathematics: adafactor, "
            "adamw8bit, adamw4bit; may be repeated.",
        ),
    ] = None
    chunked_loss: Annotated[
        bool,
        typer.Option(
            "--chunked-loss/--no-chunked-loss",
            help="Permit computing a cross-entropy over a large vocabulary a part of the tokens at a time.",
        ),
    ] = True
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments/--no-expandable-segments",
            help="Permit telling PyTorch's CUDA allocator to grow its segments, which leaves less memory "
            "unused.",
        ),
    ] = True
    offload: Annotated[
        bool,
        typer.Option(
            "--offload/--no-offload",
            help="Permit holding what units save for backward in the host's memory meanwhile.",
        ),
    ] = True
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            help="Host memory for offloading and an optimizer on the host: 64GiB. Default: half of this "
            "machine's if the GPU is in it, half of the GPU's memory if it is only named.",
        ),
    ] = None
    split_batch_norm: SplitBatchNorm = False
    step_in_backward: Annotated[
        bool,
        typer.Option(
            "--step-in-backward",
            help="Update each parameter in backward and let go of its gradient. A step that fails then cannot "
            "be taken back; without accumulation, clipping, fp16 and other ranks.",
        ),
    ] = False
    optimizer_on_host: Annotated[
        bool | None,
        typer.Option(
            "--optimizer-on-host/--no-optimizer-on-host",
            help="Keep the optimizer's state in the host's memory and update there. Left out: where it makes "
            "the step faster, or nothing else fits, on one GPU.",
            show_default=False,
        ),
    ] = None
    copies_ahead: Annotated[
        bool,
        typer.Option(
            "--copies-ahead",
            help="Copy the next micro-batch of a step to the GPU while one is computed, for the memory of one "
            "more.",
        ),
    ] = False
    own_checkpointing: Annotated[
        str,
        typer.Option(
            help="off turns off the model's own activation checkpointing (gradient_checkpointing), so that the "
            "plan alone decides what is recomputed; keep leaves it on.",
        ),
    ] = "keep"
    parallelism: Annotated[
        str,
        typer.Option(
            "--parallelism",
            help="Several ranks: ddp keeps the model on each, fsdp2 divides it among them, auto takes the "
            "faster; zero1, zero2 and zero3 are DeepSpeed's.",
        ),
    ] = "auto"
    reshard_after_forward: Annotated[
        bool | None,
        typer.Option(
            "--reshard/--no-reshard",
            help="Under FSDP2, let go of gathered parameters between forward and backward. Left out: the "
            "faster that fits.",
            show_default=False,
        ),
    ] = None
    gathered_dtype: Annotated[
        str | None,
        typer.Option(
            help="Under FSDP2 and bf16, bfloat16 gathers parameters in half the bytes, which rounds more than "
            "autocast does.",
        ),
    ] = None

    cpu_offload: Annotated[
        bool,
        typer.Option(
            "--cpu-offload",
            help="Under FSDP2, keep each rank's parts of parameters, gradients and optimizer state in the "
            "host's memory, and update them there.",
        ),
    ] = False

    def asked(self) -> dict[str, Any]:
        """As arguments of `api.plan`."""
        return arguments(self) | {"allow_optimizers": self.allow_optimizers or ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a run goes, whatever its plan. Named as `api.fit` does."""

    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the training data, in all; 1 if --steps is not said either.", min=1),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Most optimizer steps, in all.", min=1)] = None
    seed: Annotated[
        int, typer.Option(help="Decides weights, order of samples and dropout.", min=0, max=LARGEST_SEED)
    ] = 0
    max_gradient_norm: Annotated[float | None, typer.Option(help="Scale gradients down to this norm.")] = None
    schedule: Annotated[
        str, typer.Option(help="How the learning rate falls over the run: constant, linear or cosine.")
    ] = "constant"
    warmup: Annotated[
        float, typer.Option(help="Part of the run over which the learning rate first rises: 0.05.", min=0)
    ] = 0.0
    ema_decay: Annotated[
        float | None,
        typer.Option(help="Keep an exponential moving average of the weights, 0.999 say, and validate it."),
    ] = None
    correct_batch_norm: Annotated[
        bool,
        typer.Option(
            "--correct-batch-norm",
            help="With several micro-batches, let running statistics go as far in a step as with one.",
        ),
    ] = False
    patience: Annotated[
        int | None, typer.Option(help="End after so many validations without a lower loss.", min=1)
    ] = None
    save_every: Annotated[
        int | None,
        typer.Option(help="Save after so many steps, beside the end of each epoch and of the run.", min=1),
    ] = None
    keep_saves: Annotated[int, typer.Option(help="How many saves to keep, the newest.", min=1)] = 2
    compare_plain: Annotated[
        bool,
        typer.Option("--compare-plain", help="First train without the plan, from the same seed, to compare."),
    ] = False

    def asked(self) -> dict[str, Any]:
        """As arguments of `api.fit`."""
        from brimful.train.schedules import Schedule

        asked = arguments(self)
        schedule = Schedule(asked["schedule"], asked.pop("warmup"))
        return asked | {"schedule": None if schedule == Schedule() else schedule}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run is: its batch, its plan or where one is to be found, its rates, its directory."""

    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", help="Samples per optimizer step; a --plan says its own.", min=1),
    ] = None
    device: LocalDevice = "auto"
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Train by this plan instead of searching for one.")
    ] = None
    plan_only: Annotated[
        bool,
        typer.Option("--plan-only", help="Show the plan and end; its --json is what --plan takes."),
    ] = False
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the optimizer, which must be one by name.", min=0)
    ] = None
    weight_decay: Annotated[
        float | None,
        typer.Option(help="The same; biases and the weights of norms are left out of it.", min=0),
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option(help="A new directory for weights, records and saves; runs/… if left out.")
    ] = None
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard's event files, to --run-dir/tensorboard.")
    ] = False
    wandb: Annotated[
        str | None, typer.Option(help="Log to this project of Weights & Biases.", metavar="PROJECT")
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest save in --run-dir with its plan; begin if there is none."
        ),
    ] = False


BadSamplesOption = Annotated[
    str,
    typer.Option(
        "--bad-samples", help="refuse files or rows that cannot be used, or skip them; both list them."
    ),
]
BalanceClasses = Annotated[
    bool,
    typer.Option("--balance-classes", help="Weigh samples so that each class weighs the same."),
]
ValidationFraction = Annotated[float, typer.Option(help="Part of the samples to validate with.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="A local directory or tokenizer.json, or bytes; that of the model if left out."),
]
Encoding = Annotated[str, typer.Option(help="Of the files.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """What is asked of `tasks.image_classification`, by its names."""

    model: Annotated[str, typer.Option(help="A built-in classifier: resnet18, vit-base, …; or timm/NAME.")] = (
        "resnet50"
    )
    weights: Annotated[
        Path | None, typer.Option(help="Start from the tensors of this file, .safetensors or of torch.save.")
    ] = None
    image_size: Annotated[int, typer.Option(help="Pixels per side.", min=1)] = 224
    augment: Annotated[bool, typer.Option("--augment/--no-augment", help="Crop and flip at random.")] = True
    balance_classes: BalanceClasses = False
    validation_fraction: ValidationFraction = 0.1
    bad_samples: BadSamplesOption = "refuse"
    check_files: Annotated[
        bool, typer.Option("--check-files/--no-check-files", help="First decode every image once.")
    ] = True
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that read images to train on, and as many for validation; left out, as many as "
            "there are processors, 8 at most.",
            min=0,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassificationOptions:
    """What is asked of `tasks.text_classification`, by its names."""

    model: Annotated[
        str, typer.Option(help="A local directory of transformers, or a built-in one: bert-base, …")
    ] = "bert-base"
    tokenizer: TokenizerOption = None
    validation_file: Annotated[
        Path | None, typer.Option(help="Another such file to validate with; a part of the first if left out.")
    ] = None
    text_column: Annotated[str, typer.Option(help="Name of the texts.")] = "text"
    pair_column: Annotated[str | None, typer.Option(help="Name of a second text of each row.")] = None
    label_column: Annotated[str, typer.Option(help="Name of the classes.")] = "label"
    encoding: Encoding = "utf-8"
    sequence_length: Annotated[
        int, typer.Option("--seq-len", help="Most tokens of a text, a multiple of 8.", min=8)
    ] = 512
    balance_classes: BalanceClasses = False
    validation_fraction: ValidationFraction = 0.1
    bad_samples: BadSamplesOption = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelOptions:
    """What is asked of `tasks.language_model`, by its names."""

    model: Annotated[
        str, typer.Option(help="A local directory of transformers, or a built-in one: gpt2, …")
    ] = "gpt2"
    tokenizer: TokenizerOption = None
    text_column: Annotated[str, typer.Option(help="Name of the texts in tables.")] = "text"
    encoding: Encoding = "utf-8"
    sequence_length: Annotated[int, typer.Option("--seq-len", help="Tokens of each row.", min=2)] = 1024
    validation_fraction: ValidationFraction = 0.05
    bad_samples: BadSamplesOption = "refuse"


def arguments(record: Any) -> dict[str, Any]:
    """A record's fields, by name."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
