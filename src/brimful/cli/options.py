"""Options that several commands take, each declared once, in records; and how a command takes a record.

A command names a record as the type of a parameter; `flattened` makes each of its fields an option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from brimful.codec import PositiveInt
from brimful.options import LoopOptions, PlanOptions
from brimful.utils.field_docs import field_docstrings


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
        metavar=field.metadata.get("metavar"),
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


def _device_names(typed: str) -> list[str]:
    """What a shell completes a device's name to, without spaces, which it would not quote."""
    from brimful.devices import known_devices

    names = ["auto", "cpu", "cuda", *(device.name.replace(" ", "-") for device in known_devices())]
    return [name for name in names if name.lower().startswith(typed.lower())]


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
        autocompletion=_device_names,
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
RunPrices = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        help="Price per hour of the device, for the cost of a whole run: CSV with the columns gpu and "
        "price_per_hour, or a JSON object.",
    ),
]
LargestSize = Annotated[
    str | None,
    typer.Option(
        "--largest",
        metavar="SIZE",
        help="Find the largest batch, seq-len, image-size, layers or hidden that fits, and its step. Default "
        "SIZE: batch.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


LoraOption = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS",
        help="Train LoRA adapters over frozen weights: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj, each "
        "part optional. Default targets: all linear layers.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(help="Quantise the frozen weights, with --lora: nf4, nf4-dq, fp4, fp4-dq or int8."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a model chosen by name."""

    seq_len: int | None = None
    """Tokens per sample, for models that have such an option."""
    image_size: int | None = None
    """Pixels per side, for models that have such an option."""
    options: list[str] | None = field(default=None, metadata={"flag": "--set"})
    """Another option of the model, as name=value; may be repeated."""
    dtype: str | None = None
    """Type of weights, gradients and optimizer state: fp32, bf16 or fp16. Default: as the model is built."""
    lora: LoraOption = None
    quantize: QuantizeOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags(LoopOptions):
    """Options of a training run on the command line."""

    schedule: str = "constant"
    """Learning rate schedule: constant, linear or cosine."""
    warmup: float = field(default=0.0, metadata={"min": 0})
    """Warmup: fraction of the run over which the learning rate rises, such as 0.05."""
    compare_plain: bool = False
    """First train without the plan, from the same seed, to compare."""

    def asked(self) -> dict[str, Any]:
        """The options as arguments of `api.fit`."""
        from brimful.trainer.step.schedules import Schedule

        asked = arguments(self)
        schedule = Schedule(asked["schedule"], asked.pop("warmup"))
        return asked | {"schedule": None if schedule == Schedule() else schedule}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Batch, plan, rates and directory of a run."""

    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step; a --plan has its own."""
    device: str = "auto"
    """cuda, cpu, or auto: the GPU if there is one; --plan-only also takes any by name."""
    plan_file: Path | None = field(default=None, metadata={"flag": "--plan"})
    """Train with this plan instead of searching for one."""
    plan_only: bool = False
    """Show the plan and exit; its --json is what --plan takes."""
    learning_rate: float | None = field(default=None, metadata={"min": 0})
    """Learning rate of the optimizer, which must be one by name."""
    weight_decay: float | None = field(default=None, metadata={"min": 0})
    """Weight decay of the optimizer, which must be one by name; not applied to biases and norms."""
    run_dir: Path | None = None
    """A new directory for weights, logs and checkpoints. Default: runs/…."""
    tensorboard: bool = False
    """Write TensorBoard's event files, to --run-dir/tensorboard."""
    wandb: str | None = field(default=None, metadata={"metavar": "PROJECT"})
    """Log to this project of Weights & Biases."""
    live: bool = False
    """Serve a page that follows the run on this machine; standard error has its address."""
    live_port: PositiveInt | None = field(default=None, metadata={"max": 65535})
    """The port of the page of --live. Default: a free one."""
    resume: bool = False
    """Resume from the newest checkpoint in --run-dir with its plan; start if there is none."""


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

    model: str = "resnet50"
    """A built-in classifier: resnet18, vit-base, …; or timm/NAME."""
    weights: Path | None = None
    """Start from the tensors of this file, .safetensors or of torch.save."""
    image_size: PositiveInt = 224
    """Pixels per side."""
    augment: bool = True
    """Crop and flip at random."""
    timm_transforms: bool = False
    """Crop and augment as timm does for its model; needs torchvision."""
    training_metrics: TrainingMetrics = False
    balance_classes: BalanceClasses = False
    validation_fraction: ValidationFraction = 0.1
    bad_samples: BadSamplesOption = "refuse"
    check_files: bool = True
    """First decode every image once."""
    workers: int | None = field(default=None, metadata={"min": 0})
    """Processes that read images to train on, and as many for validation. Default: one per processor, at most
    8."""
    prefetch_factor: PositiveInt | None = None
    """Groups of 16 images that each of these processes reads ahead. Default: 2."""


MergeAdapters = Annotated[
    bool,
    typer.Option(
        "--merge-adapters", help="Also write the model with the adapters merged into its weights, as merged/."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassificationOptions:
    """Options of `recipes.text_classification`, under the same names."""

    model: str = "bert-base"
    """A local directory of transformers, an id on the Hugging Face Hub, or a built-in one: bert-base, …"""
    tokenizer: TokenizerOption = None
    validation_file: Path | None = None
    """Another such file to validate with. Default: a part of the first."""
    text_column: str = "text"
    """Name of the texts."""
    pair_column: str | None = None
    """Name of a second text of each row."""
    label_column: str = "label"
    """Name of the classes."""
    encoding: Encoding = "utf-8"
    sequence_length: int = field(default=512, metadata={"flag": "--seq-len", "min": 8})
    """Most tokens of a text, a multiple of 8."""
    multi_label: bool = False
    """Texts have several labels, or none: a list in JSON, or names in a text."""
    label_separator: str = ","
    """Separates the labels of a text, with --multi-label."""
    balance_classes: BalanceClasses = False
    training_metrics: TrainingMetrics = False
    validation_fraction: ValidationFraction = 0.1
    lora: LoraOption = None
    quantize: QuantizeOption = None
    bad_samples: BadSamplesOption = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelOptions:
    """Options of `recipes.language_model`, under the same names."""

    model: str = "gpt2"
    """A local directory of transformers, an id on the Hugging Face Hub, or a built-in one: gpt2, …"""
    tokenizer: TokenizerOption = None
    text_column: str = "text"
    """Name of the texts in tables."""
    encoding: Encoding = "utf-8"
    sequence_length: int = field(default=1024, metadata={"flag": "--seq-len", "min": 2})
    """Tokens of each row."""
    validation_fraction: ValidationFraction = 0.05
    lora: LoraOption = None
    quantize: QuantizeOption = None
    bad_samples: BadSamplesOption = "refuse"


def arguments(record: Any) -> dict[str, Any]:
    """A record's fields, by name."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
