"""The trained model of a text recipe as a directory that transformers and peft read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from brimful.errors import UsageError
from brimful.recipes.adapters import LoraOptions
from brimful.recipes.text_models import TextModel, find_text_model, silent_transformers
from brimful.recipes.tokens import Pretrained
from brimful.trainer.storage.run_directory import JOB
from brimful.trainer.storage.weights import load_weights, read_tensors, weights_of_run

TASKS = ("text-classification", "language-model")
"""Recipes whose models are of transformers, by their name in `Job.about`."""


def save_pretrained(run: Path | str, directory: Path | str | None = None, *, merge: bool = False) -> Path:
    """Write the best weights of a run of a text recipe as transformers' or peft's `save_pretrained` does.

    A fully trained model is written whole. Of a model with LoRA the adapters are written, and a classifier's
    head: `AutoPeftModelForCausalLM.from_pretrained` adds them to the model that they were trained over.

    Args:
        run: The run directory.
        directory: Is created; files there are overwritten. None means `pretrained` in the run directory.
        merge: Add the adapters to the frozen weights, as these are before quantisation, and write the whole
            model.

    Returns:
        The directory.

    Raises:
        UsageError: The run is of another recipe, has no weights, or has nothing to merge.
    """
    run = Path(run)
    about = _about(run)
    target = run / "pretrained" if directory is None else Path(directory)
    lora = about.get("lora")
    if merge and lora is None:
        raise UsageError(f"{run} trained all weights; there are no adapters to merge.")
    model: Any = _merged(run, about) if merge else _trained(run, about)
    classes = about.get("classes")
    if classes is not None:
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {name: number for number, name in enumerate(classes)}
    options = {} if lora is None or merge else {"save_embedding_layers": False}  # they are frozen
    with silent_transformers():
        model.save_pretrained(target, **options)
    if about["tokenizer"] != "bytes":
        Pretrained(Path(about["tokenizer"])).save(target)
    return target


def _about(run: Path) -> dict[str, Any]:
    try:
        about = json.loads((run / JOB).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{run} is not the run of a recipe: its {JOB} cannot be read ({error}).") from error
    if not isinstance(about, dict) or about.get("task") not in TASKS:
        raise UsageError(f"{run} is not the run of a text recipe ({', '.join(TASKS)}).")
    return about


def _model(about: dict[str, Any], *, is_quantised: bool = True) -> TextModel:
    """The model of a run, not yet built."""
    classes = about.get("classes")
    return find_text_model(
        about["model"],
        about["tokenizer"],
        sequence_length=about["sequence_length"],
        num_labels=None if classes is None else len(classes),
        lora=None if "lora" not in about else LoraOptions.parse(about["lora"]),
        quantization=about.get("quantization") if is_quantised else None,
    )


def _trained(run: Path, about: dict[str, Any]) -> nn.Module:
    model = _model(about).build()
    load_weights(model, run)
    return model


def _merged(run: Path, about: dict[str, Any]) -> nn.Module:
    """The model with its adapters added to the weights."""
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    found = _model(about, is_quantised=False)
    model: Any = found.build()
    if "quantization" not in about:
        load_weights(model, run)
    elif found.weights is None:
        raise UsageError(
            f"{run} quantised random weights, which are in no file as they were before: adapters cannot be "
            "merged into them."
        )
    else:
        found.weights(model)
        trained = read_tensors(weights_of_run(run))
        adapters = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
        set_peft_model_state_dict(model, adapters)
    merged: nn.Module = model.merge_and_unload()
    return merged
