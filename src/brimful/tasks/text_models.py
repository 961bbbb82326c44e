"""Text models for ready tasks: built in, with random weights, or a local directory of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brimful.architectures import find_architecture
from brimful.architectures.huggingface import attention
from brimful.architectures.text import TEXT_ARCHITECTURES
from brimful.errors import UnknownNameError, UsageError
from brimful.optimizers import NamedOptimizer, named_optimizer
from brimful.tasks.weights import tell_new

_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """How a text model is built, and what its texts must be like."""

    build: Callable[[], nn.Module]
    weights: Callable[[nn.Module], None] | None
    """Loads pretrained weights; None if there are none."""
    config: Any
    """That of transformers."""
    directory: Path | None
    """Where it comes from; None if it is built in."""


def find_text_model(name: Path | str, *, causal: bool, **sizes: Any) -> TextModel:
    """The model that is meant.

    Args:
        name: A built-in architecture, or a directory that transformers saved.
        causal: A language model, rather than a classifier.
        **sizes: `sequence_length` and `vocab_size`, of a classifier `num_labels`; a directory's own vocabulary
            stays.

    Returns:
        The model, not yet built.

    Raises:
        UnknownNameError: It is neither.
        UsageError: The directory has no such model, or it cannot take the sizes.
    """
    names = [known for known in TEXT_ARCHITECTURES if _is_causal(known) == causal]
    if str(name) in names:
        job = find_architecture(str(name), **sizes)
        assert callable(job.model)
        with torch.device("meta"):
            config = job.model().config
        return TextModel(build=job.model, weights=None, config=config, directory=None)
    if not Path(name).is_dir():
        kind = "language model" if causal else "text classifier"
        raise UnknownNameError(kind, str(name), names, hint="A directory that transformers saved does too.")
    return _of_directory(Path(name), causal, sizes)


def default_optimizer(model: TextModel) -> NamedOptimizer:
    """AdamW at the rate that a text model is usually trained at.

    Source: of pretrained weights 5e-5, the largest in Devlin et al. 2018, BERT, appendix A.3; from random ones
    3e-4, as Radford et al. 2019 and Brown et al. 2020, table 2.1, give for models of 350 million parameters.
    """
    return named_optimizer("adamw", learning_rate=3e-4 if model.weights is None else 5e-5)


def _is_causal(name: str) -> bool:
    return name.startswith(("gpt", "llama"))


def _of_directory(directory: Path, causal: bool, sizes: dict[str, Any]) -> TextModel:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f'{directory} is read with transformers, which is not installed: pip install "brimful[hf]".'
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever its files lead to
        raise UsageError(f"{directory} has no configuration that transformers can read: {error}") from error
    config.use_cache = False
    if not causal:
        config.num_labels = sizes["num_labels"]
        config.problem_type = "single_label_classification"
    most_tokens = getattr(config, "max_position_embeddings", None)
    if most_tokens is not None and sizes["sequence_length"] > most_tokens:
        raise UsageError(
            f"{directory} has positions for {most_tokens} tokens, fewer than {sizes['sequence_length']}. "
            f"Give a sequence length of {most_tokens} or less."
        )
    if sizes["vocab_size"] > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {sizes['vocab_size']} tokens, and the model in {directory} embeds "
            f"{config.vocab_size}. Give the model's own tokenizer."
        )
    make = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification

    def build() -> nn.Module:
        model: Any = make.from_config(config, attn_implementation=attention(causal=causal))
        return model.float()

    has_weights = any(True for pattern in _WEIGHTS for _ in directory.glob(pattern))
    load = partial(_load_pretrained, make=make, directory=directory, config=config) if has_weights else None
    return TextModel(build=build, weights=load, config=config, directory=directory)


def _load_pretrained(model: nn.Module, *, make: Any, directory: Path, config: Any) -> None:
    """Through transformers, which knows what tensors were called once; a new head stays random."""
    with _silent_transformers():
        pretrained, found = make.from_pretrained(
            str(directory),
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    model.load_state_dict(pretrained.state_dict())
    new = sorted({*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])})
    if new:
        tell_new(directory, new)


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without its bars, and its report of what is missing, which we give ourselves."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
