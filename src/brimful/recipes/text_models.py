"""Text models for recipes, with their tokenizers: built in, of the Hub, or saved by transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brimful.errors import UnknownNameError, UsageError
from brimful.models import find_architecture
from brimful.models.adapters import LEARNING_RATE as ADAPTER_RATE
from brimful.models.adapters import LoraOptions, adapted, check_quantization, load_base
from brimful.models.hub import hub_directory
from brimful.models.huggingface import attention
from brimful.models.text import LANGUAGE_MODELS, TEXT_CLASSIFIERS
from brimful.optimizers import NamedOptimizer, named_optimizer
from brimful.recipes.tokens import Tokenizer, find_tokenizer
from brimful.recipes.weights import check_most_is_loaded, names_of_tensors, unreadable, warn_new
from brimful.utils.files import is_directory

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""File names of transformers; with ".index.json" appended if the weights are in several files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A text model that is not yet built, with its tokenizer."""

    build: Callable[[], nn.Module]
    weights: Callable[[nn.Module], None] | None
    """Loads pretrained weights; None if there are none."""
    tokenizer: Tokenizer
    padding: int
    """The padding token. It is masked, but some models count positions by it."""
    end: int | None
    """The token that ends a text."""
    about: dict[str, str]
    """Metadata of the model, for `Job.about`."""
    has_adapters: bool = False
    """Whether adapters are trained, over frozen weights."""
    lacks_pooler: bool = False
    """Whether the pooler of a classifier is new too: its directory has weights, and none for it."""

    @property
    def optimizer(self) -> NamedOptimizer:
        """AdamW at the usual learning rate of text models.

        Source: for pretrained weights 5e-5, the largest in Devlin et al. 2018, BERT, appendix A.3; for random
        ones 3e-4, as Brown et al. 2020, GPT-3, table 2.1, for 350 million parameters; for adapters see
        `adapters.LEARNING_RATE`.
        """
        of_all = 3e-4 if self.weights is None else 5e-5
        return named_optimizer("adamw", learning_rate=ADAPTER_RATE if self.has_adapters else of_all)


def find_text_model(
    name: Path | str,
    tokenizer: Path | str | None,
    *,
    num_labels: int | None,
    sequence_length: int,
    lora: str | None = None,
    quantization: str | None = None,
) -> TextModel:
    """Find a model, built in, of the Hub or in a directory, and its tokenizer; the model is not built.

    `num_labels` is the number of classes; None finds a language model. `tokenizer` is a directory or a
    `tokenizer.json`, or "bytes"; None uses that of the model's directory, or bytes for a built-in model.
    `sequence_length` is the maximum of tokens per sample. `lora` has the adapters to train over frozen weights,
    see `LoraOptions.parse`; None trains all weights. `quantization` is one of `adapters.QUANTIZATIONS`, for the
    frozen weights.

    Raises `UnknownNameError` if `name` is none, and `UsageError` if the directory has no such model, or it
    cannot take the tokenizer, the length or adapters.
    """
    adapters = None if lora is None else LoraOptions.parse(lora)
    check_quantization(quantization, has_adapters=adapters is not None)
    known = LANGUAGE_MODELS if num_labels is None else TEXT_CLASSIFIERS
    is_built_in = str(name) in known
    if not is_built_in and not is_directory(Path(name)):
        name = hub_directory(str(name)) or name
    has_directory = is_directory(Path(name))
    if has_directory and is_built_in:
        raise UsageError(
            f"{name!r} is both a built-in model and a directory here. Write ./{name} for the directory, or "
            "begin elsewhere for the built-in model."
        )
    if not has_directory and not is_built_in:
        raise UnknownNameError(
            _kind(num_labels), str(name), known, hint="Or an id on the Hub, or a directory of transformers."
        )
    read_from = name if has_directory and tokenizer is None else tokenizer
    found = find_tokenizer(read_from)
    about = {"model": str(name), "tokenizer": "bytes" if read_from is None else str(read_from)}
    if is_built_in:
        model = _built_in(str(name), found, about, num_labels, sequence_length)
    else:
        keeps_dtype = adapters is not None  # frozen weights need no float32
        model = _of_directory(Path(name), found, about, num_labels, sequence_length, keeps_dtype=keeps_dtype)
    if adapters is None:
        return model
    return _with_adapters(model, adapters, quantization, is_classifier=num_labels is not None)


def _kind(num_labels: int | None) -> str:
    return "language model" if num_labels is None else "text classifier"


def _with_adapters(
    model: TextModel, lora: LoraOptions, quantization: str | None, *, is_classifier: bool
) -> TextModel:
    def build() -> nn.Module:
        return adapted(
            model.build(),
            lora,
            quantization,
            is_classifier=is_classifier,
            trains_pooler=model.lacks_pooler,
        )

    added = {"lora": str(lora)} | ({} if quantization is None else {"quantization": quantization})
    return replace(model, build=build, about=model.about | added, has_adapters=True)


def _built_in(
    name: str, tokenizer: Tokenizer, about: dict[str, str], num_labels: int | None, sequence_length: int
) -> TextModel:
    padding = 0 if tokenizer.padding is None else tokenizer.padding
    of_classifier = {} if num_labels is None else {"num_labels": num_labels, "pad_token_id": padding}
    build = find_architecture(
        name, sequence_length=sequence_length, vocab_size=tokenizer.vocab_size, **of_classifier
    ).model
    assert callable(build)
    return TextModel(
        build=build,
        weights=None,
        tokenizer=tokenizer,
        padding=padding,
        end=tokenizer.end,
        about=about | {"starts_from": "random weights"},
    )


def _of_directory(
    directory: Path,
    tokenizer: Tokenizer,
    about: dict[str, str],
    num_labels: int | None,
    sequence_length: int,
    *,
    keeps_dtype: bool,
) -> TextModel:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{directory} is read with transformers, which is not installed: pip install transformers."
        ) from error
    make: Any = (
        transformers.AutoModelForCausalLM
        if num_labels is None
        else transformers.AutoModelForSequenceClassification
    )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever its files lead to
        raise UsageError(f"{directory} has no configuration that transformers can read: {error}") from error
    config.use_cache = False
    if num_labels is not None:
        config.num_labels = num_labels
        config.problem_type = "single_label_classification"
    if getattr(config, "pad_token_id", None) is None:  # a classifier finds the last token of a text by it
        config.pad_token_id = tokenizer.end if tokenizer.padding is None else tokenizer.padding
    _check_sizes(directory, config, tokenizer, sequence_length)
    dtype = (getattr(config, "dtype", None) if keeps_dtype else None) or torch.float32
    build = _builder(directory, make, config, num_labels, sequence_length, dtype)
    if num_labels is None:
        _check_causal(directory, build)
    has_weights = any((directory / f"{name}{end}").exists() for name in _WEIGHTS for end in ("", ".index.json"))
    if not has_weights:
        warnings.warn(f"{directory} has no weights: the model starts from random ones.", stacklevel=4)
    end = tokenizer.end
    own_end = getattr(config, "eos_token_id", None)
    if end is None and isinstance(own_end, int) and own_end < tokenizer.vocab_size:
        end = own_end
    load = partial(_load_pretrained, make=make, directory=directory, config=config, dtype=dtype)
    return TextModel(
        build=build,
        weights=load if has_weights else None,
        tokenizer=tokenizer,
        padding=config.pad_token_id or 0,
        end=end,
        about=about | {"starts_from": "pretrained weights" if has_weights else "random weights"},
        lacks_pooler=keeps_dtype and num_labels is not None and has_weights and not _has_pooler(directory),
    )


def _has_pooler(directory: Path) -> bool:
    return any("pooler" in name.split(".") for name in names_of_tensors(directory))


def _check_sizes(directory: Path, config: Any, tokenizer: Tokenizer, sequence_length: int) -> None:
    most_tokens = getattr(config, "max_position_embeddings", None)
    if most_tokens is not None and "roberta" in config.model_type:
        most_tokens -= config.pad_token_id + 1  # positions are counted from behind the padding's
    if most_tokens is not None and sequence_length > most_tokens:
        raise UsageError(
            f"{directory} has positions for {most_tokens} tokens, fewer than {sequence_length}. "
            f"Give a sequence length of {most_tokens // 8 * 8} or less."
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model in {directory} embeds "
            f"{config.vocab_size}. Give the model's own tokenizer."
        )


def _builder(
    directory: Path, make: Any, config: Any, num_labels: int | None, sequence_length: int, dtype: torch.dtype
) -> Callable[[], nn.Module]:
    """A function that builds the model with the first attention implementation that it supports.

    Each implementation is tried on meta tensors.
    """
    kinds = ["sdpa", "eager"]
    if num_labels is None and _masks_what_is_ahead_alone(config, sequence_length):
        kinds.insert(0, attention(causal=True))
    refusals = []
    for kind in kinds:

        def build(kind: str = kind) -> nn.Module:
            model: Any = make.from_config(config, attn_implementation=kind, dtype=dtype)
            built: nn.Module = model.to(dtype)
            return built

        try:
            with torch.device("meta"):
                build()
        except (ValueError, KeyError, ImportError) as error:
            refusals.append(error)
        else:
            return build
    kind = _kind(num_labels)
    raise UsageError(f"transformers makes no {kind} of {directory}: {refusals[-1]}") from refusals[-1]


def _masks_what_is_ahead_alone(config: Any, sequence_length: int) -> bool:
    """Whether every layer of a language model attends to all earlier tokens, without a sliding window."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    is_wide = window is None or window >= sequence_length
    return is_wide and layers <= {"full_attention", "sliding_attention"}


def _check_causal(directory: Path, build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        said = {getattr(module, "is_causal", None) for module in build().modules()} - {None}
    if said == {False}:
        raise UsageError(
            f"{directory} is an encoder, whose tokens see those after them: it would see what it has to "
            "predict. Give a model for the next token, such as one of GPT-2 or Llama."
        )


def _load_pretrained(model: nn.Module, *, make: Any, directory: Path, config: Any, dtype: torch.dtype) -> None:
    """Load weights through transformers, which maps old names of tensors; a new head keeps its random ones."""
    try:
        with silent_transformers():
            pretrained, found = make.from_pretrained(
                str(directory),
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                dtype=dtype,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises whatever its files lead to
        raise unreadable(directory, error) from error
    new = {*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])}
    new &= pretrained.state_dict().keys()
    check_most_is_loaded(pretrained, directory, [name for name in pretrained.state_dict() if name not in new])
    if hasattr(model, "get_base_model"):
        load_base(model, pretrained)
    else:
        model.load_state_dict(pretrained.state_dict())
    if new:
        warn_new(directory, sorted(new))


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and its report of missing weights, which brimful reports itself."""
    from transformers.utils import logging

    before, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shows_bars:
            logging.enable_progress_bar()
