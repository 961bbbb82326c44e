"""What holds for all tools: what they cannot express, what the user sets, when training would be another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from brimful.errors import UsageError
from brimful.exports.records import ExportSource, ExportTool
from brimful.settings import Action, Compile, MemoryFormat, OptimizerImplementation, Settings

_PLAIN: Mapping[str, Any] = {
    "units": (),
    "chunked_loss": None,
    "optimizer_in_backward": False,
    "offload_optimizer": False,
    "prefetch_inputs": False,
    "optimizer_implementation": None,
}
"""Fields of settings that change memory and time, not the result, each with the value that changes nothing."""

_DONE = {
    Action.SAVE: "recomputed in part",
    Action.RECOMPUTE: "recomputed",
    Action.OFFLOAD: "offloaded",
    Action.NEST: "nested",
}

_IMPLEMENTATIONS = {
    OptimizerImplementation.FUSED: "fused=True",
    OptimizerImplementation.FOREACH: "foreach=True",
    OptimizerImplementation.FOR_LOOP: "foreach=False",
}
"""Arguments of torch's optimizers."""

_CLASSES = {
    "adamw": "AdamW(…",
    "adam": "Adam(…",
    "sgd": "SGD(…, momentum=0.9",
    "rmsprop": "RMSprop(…",
    "adagrad": "Adagrad(…",
    "adafactor": "Adafactor(…",
}
"""Calls of torch's optimizers, by brimful's names."""


def check_mathematics(source: ExportSource, tool: ExportTool) -> None:
    """Raise `UsageError` for a plan whose steps compute something else in a tool.

    Tools average the gradients of micro-batches and ranks with equal weights; the job's loss must be such an
    average.
    """
    settings = source.settings
    if settings.gradient_accumulation_steps * settings.world_size == 1:
        return
    division = f"{settings.gradient_accumulation_steps} micro-batches on each of {settings.world_size} ranks"
    if source.couples:
        raise UsageError(
            "the loss couples all samples of the global batch (Job.embed), which the plan divides into "
            f"{division}. {tool} would compute a loss of each part. Plan with "
            f"micro_batch_size={settings.global_batch_size} on one rank, or train with brimful.fit."
        )
    if source.sums:
        raise UsageError(
            f'the job adds the losses of micro-batches (Job.reduction="sum"), and the plan has {division}. '
            f"{tool} averages them. Make the loss a mean, or train with brimful.fit."
        )


def without_others(settings: Settings, expressed: frozenset[str]) -> tuple[Settings, tuple[str, ...]]:
    """The settings that a tool can express, and descriptions of the others.

    `expressed` has the names of fields that the tool, or its user by a remark, can set. The remaining fields
    get values that change nothing.
    """
    removed = {
        name: plain
        for name, plain in _PLAIN.items()
        if name not in expressed and getattr(settings, name) != plain
    }
    if not settings.changed:
        removed.pop("units", None)
    described = tuple(text for name in removed for text in _described(settings, name))
    return replace(settings, **removed), described


def _described(settings: Settings, name: str) -> Iterator[str]:
    if name == "units":
        counts = Counter(_DONE[unit.action] for unit in settings.units if unit.action in _DONE)
        yield from (f"{count} of {len(settings.units)} units {done}" for done, count in counts.items())
    elif name == "chunked_loss":
        assert settings.chunked_loss is not None
        yield f"the loss computed in {settings.chunked_loss.chunks} chunks"
    elif name == "optimizer_implementation":
        yield f"the {settings.optimizer_implementation} optimizer"
    else:
        yield {
            "optimizer_in_backward": "parameters updated in backward",
            "offload_optimizer": "the optimizer on the host",
            "prefetch_inputs": "micro-batches copied ahead",
        }[name]


def recomputes_all(settings: Settings) -> bool:
    """Whether every unit is recomputed, and nothing else is done to one."""
    return bool(settings.units) and all(unit.action is Action.RECOMPUTE for unit in settings.units)


def environment(source: ExportSource) -> tuple[tuple[str, str], ...]:
    """Environment variables of torch that the settings need."""
    if source.settings.expandable_segments and source.device_kind == "cuda":
        return (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)
    return ()


def model_remarks(settings: Settings) -> Iterator[str]:
    """What the user does to the model."""
    if settings.memory_format is not None:
        named = "channels_last" if settings.memory_format is MemoryFormat.CHANNELS_LAST else "contiguous_format"
        yield f"Call model.to(memory_format=torch.{named}), and the same on images."
    if settings.compile is Compile.UNITS:
        yield "Compile each unit that the plan keeps: model.get_submodule(name).compile(dynamic=False)."
    elif settings.compile is Compile.MODEL:
        yield "Call model.compile(dynamic=False)."
    if not settings.own_checkpointing:
        yield "Turn off the model's own activation checkpointing, such as by gradient_checkpointing_disable()."


def optimizer_remark(source: ExportSource) -> str:
    """How to make the optimizer, for tools that are given one."""
    implementation = source.settings.optimizer_implementation
    chosen = "" if implementation is None else f", {_IMPLEMENTATIONS[implementation]}"
    if source.optimizer is None:
        return f"Make the job's own optimizer{chosen.replace(',', ' with', 1)}."
    if source.optimizer in _CLASSES:
        return f"Make the optimizer: torch.optim.{_CLASSES[source.optimizer]}{chosen})."
    return f'Make the optimizer: brimful.optimizers.named_optimizer("{source.optimizer}")(model).'


def weight_remark(source: ExportSource, tool: ExportTool) -> Iterator[str]:
    """A warning where micro-batches have weights of their own."""
    settings = source.settings
    if source.counts and settings.gradient_accumulation_steps * settings.world_size > 1:
        yield (
            f"{tool} weights all micro-batches equally, and brimful weights them by Job.count: the gradient is "
            "the same only if each micro-batch has the same count, such as of tokens."
        )


def tf32_remark(settings: Settings) -> Iterator[str]:
    """How TF32 is turned on by hand."""
    if settings.precision == "tf32":
        yield "Set torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True."
