"""The trained model of a text recipe as a directory that transformers and peft read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from brimful.codec import PositiveInt, from_json_document, parse_json, read_regular_file
from brimful.errors import FileFormatError, UsageError
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
    about = read_recipe_run(run)
    target = run / "pretrained" if directory is None else Path(directory)
    if merge and about.lora is None:
        raise UsageError(f"{run} trained all weights; there are no adapters to merge.")
    model: Any = _merged(run, about) if merge else _trained(run, about)
    if about.classes is not None:
        model.config.id2label = dict(enumerate(about.classes))
        model.config.label2id = {name: number for number, name in enumerate(about.classes)}
    if about.multi_label:
        model.config.problem_type = "multi_label_classification"  # inference by sigmoids, not by softmax
    options = {} if about.lora is None or merge else {"save_embedding_layers": False}  # they are frozen
    with silent_transformers():
        model.save_pretrained(target, **options)
    if about.tokenizer != "bytes":
        Pretrained(Path(about.tokenizer)).save(target)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRun:
    """The metadata of a text recipe's model, from `job.json` in the run directory."""

    task: str
    model: str
    tokenizer: str
    sequence_length: PositiveInt
    classes: tuple[str, ...] | None = None
    multi_label: bool = False
    lora: str | None = None
    quantization: str | None = None

    def text_model(self, *, is_quantised: bool = True) -> TextModel:
        """The model as the recipe makes it, not yet built.

        `is_quantised=False` keeps frozen weights as they are where the run quantised them.
        """
        return find_text_model(
            self.model,
            self.tokenizer,
            num_labels=len(self.classes or ()) if self.task == "text-classification" else None,
            sequence_length=self.sequence_length,
            lora=self.lora,
            quantization=self.quantization if is_quantised else None,
        )


def read_recipe_run(run: Path) -> RecipeRun:
    """Read what a run of a text recipe trained: model, tokenizer and classes.

    Raises `UsageError` if the directory is not that of a text recipe, or its `job.json` is damaged.
    """
    where = f"the metadata {run / JOB}"
    try:
        document = parse_json(read_regular_file(run / JOB, what="metadata"), where=where)
        if not isinstance(document, dict) or document.get("task") not in TASKS:
            raise UsageError(f"{run} is not the run of a text recipe ({', '.join(TASKS)}).")
        known = {field.name for field in fields(RecipeRun)}
        own = {name: value for name, value in document.items() if name in known}
        return from_json_document(own, RecipeRun, where=where)
    except FileFormatError as error:
        raise UsageError(f"{run} is not the run of a recipe: {error}") from error


def _trained(run: Path, about: RecipeRun) -> nn.Module:
    model = about.text_model().build()
    load_weights(model, run)
    return model


def _merged(run: Path, about: RecipeRun) -> nn.Module:
    """The model with its adapters added to the weights."""
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    found = about.text_model(is_quantised=False)
    model: Any = found.build()
    if about.quantization is None:
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
