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

from brimful.codec import PositiveInt
from brimful.field_docs import field_docstrings
from brimful.options import LoopOptions, PlanOptions


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a record by one option per field.

    Only the signature changes, which typer reads: it has the fields in the records' place. The command's
    parameters are given by name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    records = {name: hints[name] for name in parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        _check_paths(given.values())
        for name, record in records.items():
            given[name] = record(**{field.name: _taken(field, given) for field in fields(record)})
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
    described = field_docstrings(record)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=_described(field, hints[field.name], described.get(field.name)),
        )
        for field in fields(record)
    ]


def _described(field: Field[Any], hint: Any, docstring: str | None) -> Any:
    """The type of an option with its flag and help; one that declares them itself stays as it is."""
    if docstring is None:
        return hint
    name = "--" + field.name.replace("_", "-")
    if field.default is True or hint == bool | None:
        name += f"/--no-{name[2:]}"
    option = typer.Option(
        field.metadata.get("flag", name),
        help=docstring,
        show_default=field.default not in (None, ()),
        min=1 if hint in (PositiveInt, PositiveInt | None) else field.metadata.get("min"),
        max=field.metadata.get("max"),
    )
    return Annotated[_TYPES.get(hint, hint), option]


_TYPES: dict[Any, Any] = {
    PositiveInt: int,
    PositiveInt | None: int | None,
    tuple[str, ...]: list[str] | None,
}
"""What typer reads in place of types that it does not know."""


def _default_of(field: Field[Any]) -> Any:
    if field.default == ():
        return None  # typer's default of an option that may be repeated
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _taken(field: Field[Any], given: dict[str, Any]) -> Any:
    value = given.pop(field.name)
    return tuple(value or ()) if field.default == () else value


MODEL_ARGUMENT = typer.Argument(
    help="What to train: a built-in architecture (bert-large, resnet50, …), or path/to/file.py:NAME "
    "or package.module:NAME, a brimful.Job or a function that returns one.",
    show_default=False,
)
Model = Annotated[str, MODEL_ARGUMENT]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help='A GPU by name, such as "RTX 3090"; cuda or cpu of this machine; auto; or a GPU described: '
        '"name=…,memory=8GiB,bandwidth=300GB,tflops=9".',
    ),
]
LocalDevice = Annotated[
    str,
    typer.Option(
        "--device",
        help="cuda, cpu, or auto: the GPU if there is one; --plan-only also takes any by name.",
    ),
]
OnePrecision = Annotated[str, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")]
_PLAN_HELP = {name: text.partition(" Default:")[0] for name, text in field_docstrings(PlanOptions).items()}
"""The help of a plan's options, for commands where their defaults are others."""
OptimizerName = Annotated[str | None, typer.Option("--optimizer", help=_PLAN_HELP["optimizer"])]
OptimizerImplementationName = Annotated[
    str | None,
    typer.Option(
        "--optimizer-implementation",
        help=_PLAN_HELP["optimizer_implementation"],
    ),
]
MemoryFormatName = Annotated[
    str | None, typer.Option("--memory-format", help=_PLAN_HELP["memory_format"] + " Default: preserve.")
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch-size", help=_PLAN_HELP["micro_batch_size"], min=1)
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch-size", help="Samples per optimizer step. It never changes.", min=1),
]
SplitBatchNorm = Annotated[
    bool,
    typer.Option(
        "--split-batch-norm",
        help=_PLAN_HELP["split_batch_norm"],
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a model chosen by name."""

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
class TrainFlags(LoopOptions):
    """Options of a training run on the command line."""

    schedule: Annotated[str, typer.Option(help="Learning rate schedule: constant, linear or cosine.")] = (
        "constant"
    )
    warmup: Annotated[
        float,
        typer.Option(
            help="Warmup: fraction of the run over which the learning rate rises, such as 0.05.", min=0
        ),
    ] = 0.0
    compare_plain: Annotated[
        bool,
        typer.Option("--compare-plain", help="First train without the plan, from the same seed, to compare."),
    ] = False

    def asked(self) -> dict[str, Any]:
        """The options as arguments of `api.fit`."""
        from brimful.trainer.step.schedules import Schedule

        asked = arguments(self)
        schedule = Schedule(asked["schedule"], asked.pop("warmup"))
        return asked | {"schedule": None if schedule == Schedule() else schedule}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Batch, plan, rates and directory of a run."""

    global_batch_size: Annotated[
        int | None,
        typer.Option("--global-batch-size", help="Samples per optimizer step; a --plan has its own.", min=1),
    ] = None
    device: LocalDevice = "auto"
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Train with this plan instead of searching for one.")
    ] = None
    plan_only: Annotated[
        bool,
        typer.Option("--plan-only", help="Show the plan and exit; its --json is what --plan takes."),
    ] = False
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the optimizer, which must be one by name.", min=0)
    ] = None
    weight_decay: Annotated[
        float | None,
        typer.Option(
            help="Weight decay of the optimizer, which must be one by name; not applied to biases and norms.",
            min=0,
        ),
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option(help="A new directory for weights, logs and checkpoints. Default: runs/….")
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
            "--resume",
            help="Resume from the newest checkpoint in --run-dir with its plan; start if there is none.",
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
TrainingMetrics = Annotated[
    bool,
    typer.Option(
        "--training-metrics",
        help="At each validation also compute loss and metrics of training samples, as many as for validation.",
    ),
]
ValidationFraction = Annotated[float, typer.Option(help="Part of the samples to validate with.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="A local directory or tokenizer.json, or bytes. Default: that of the model."),
]
Encoding = Annotated[str, typer.Option(help="Text encoding of the files.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options of `recipes.image_classification`, under the same names."""

    model: Annotated[str, typer.Option(help="A built-in classifier: resnet18, vit-base, …; or timm/NAME.")] = (
        "resnet50"
    )
    weights: Annotated[
        Path | None, typer.Option(help="Start from the tensors of this file, .safetensors or of torch.save.")
    ] = None
    image_size: Annotated[int, typer.Option(help="Pixels per side.", min=1)] = 224
    augment: Annotated[bool, typer.Option("--augment/--no-augment", help="Crop and flip at random.")] = True
    timm_transforms: Annotated[
        bool,
        typer.Option(
            "--timm-transforms", help="Crop and augment as timm does for its model; needs torchvision."
        ),
    ] = False
    training_metrics: TrainingMetrics = False
    balance_classes: BalanceClasses = False
    validation_fraction: ValidationFraction = 0.1
    bad_samples: BadSamplesOption = "refuse"
    check_files: Annotated[
        bool, typer.Option("--check-files/--no-check-files", help="First decode every image once.")
    ] = True
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that read images to train on, and as many for validation. Default: one per "
            "processor, at most 8.",
            min=0,
        ),
    ] = None


LoraOption = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS",
        help="Train LoRA adapters over frozen weights: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj, each "
        "part optional. Default targets: all linear layers. AdamW at 2e-4 unless --learning-rate.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(help="Quantise the frozen weights, with --lora: nf4, nf4-dq, fp4, fp4-dq or int8."),
]

MergeAdapters = Annotated[
    bool,
    typer.Option(
        "--merge-adapters", help="Also write the model with the adapters merged into its weights, as merged/."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassificationOptions:
    """Options of `recipes.text_classification`, under the same names."""

    model: Annotated[
        str, typer.Option(help="A local directory of transformers, or a built-in one: bert-base, …")
    ] = "bert-base"
    tokenizer: TokenizerOption = None
    validation_file: Annotated[
        Path | None, typer.Option(help="Another such file to validate with. Default: a part of the first.")
    ] = None
    text_column: Annotated[str, typer.Option(help="Name of the texts.")] = "text"
    pair_column: Annotated[str | None, typer.Option(help="Name of a second text of each row.")] = None
    label_column: Annotated[str, typer.Option(help="Name of the classes.")] = "label"
    encoding: Encoding = "utf-8"
    sequence_length: Annotated[
        int, typer.Option("--seq-len", help="Most tokens of a text, a multiple of 8.", min=8)
    ] = 512
    multi_label: Annotated[
        bool,
        typer.Option(
            "--multi-label", help="Texts have several labels, or none: a list in JSON, or names in a text."
        ),
    ] = False
    label_separator: Annotated[
        str, typer.Option(help="Separates the labels of a text, with --multi-label.")
    ] = ","
    balance_classes: BalanceClasses = False
    training_metrics: TrainingMetrics = False
    validation_fraction: ValidationFraction = 0.1
    lora: LoraOption = None
    quantize: QuantizeOption = None
    bad_samples: BadSamplesOption = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelOptions:
    """Options of `recipes.language_model`, under the same names."""

    model: Annotated[
        str, typer.Option(help="A local directory of transformers, or a built-in one: gpt2, …")
    ] = "gpt2"
    tokenizer: TokenizerOption = None
    text_column: Annotated[str, typer.Option(help="Name of the texts in tables.")] = "text"
    encoding: Encoding = "utf-8"
    sequence_length: Annotated[int, typer.Option("--seq-len", help="Tokens of each row.", min=2)] = 1024
    validation_fraction: ValidationFraction = 0.05
    lora: LoraOption = None
    quantize: QuantizeOption = None
    bad_samples: BadSamplesOption = "refuse"


def arguments(record: Any) -> dict[str, Any]:
    """A record's fields, by name."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
