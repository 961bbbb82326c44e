"""Settings as JSON, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from brimful.codec import JsonForm, from_json_document, json_form
from brimful.settings.choices import Parallelism
from brimful.settings.settings import Settings
from brimful.settings.units import UnitAction

_JSON_KEYS = {
    "world_size": "ranks",
    "num_nodes": "nodes",
    "optimizer_in_backward": "step_in_backward",
    "offload_optimizer": "optimizer_on_host",
    "prefetch_inputs": "copies_ahead",
    "param_dtype": "gathered_dtype",
    "offload_parameters": "cpu_offload",
}
"""Fields with a different key in JSON; files and scripts use these keys."""


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Settings as a JSON object; FSDP2 options only under FSDP2, and some others only if they are set."""
    document: dict[str, Any] = {
        "precision": str(settings.precision),
        "micro_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "optimizer": settings.optimizer,
        "optimizer_implementation": settings.optimizer_implementation
        and str(settings.optimizer_implementation),
        "units": [_unit_to_json(unit) for unit in settings.units],
        "chunked_loss": settings.chunked_loss and asdict(settings.chunked_loss),
        "expandable_segments": settings.expandable_segments,
        "world_size": settings.world_size,
        "parallelism": str(settings.parallelism),
        "num_nodes": settings.num_nodes,
    }
    for name in ("optimizer_in_backward", "offload_optimizer", "prefetch_inputs"):
        if getattr(settings, name):
            document[name] = True
    if settings.memory_format is not None:
        document["memory_format"] = str(settings.memory_format)
    if not settings.own_checkpointing:
        document["own_checkpointing"] = False
    if settings.parallelism is Parallelism.FSDP2:
        document["reshard_after_forward"] = settings.reshard_after_forward
        document["param_dtype"] = settings.param_dtype
        if settings.offload_parameters:
            document["offload_parameters"] = True
    return {_JSON_KEYS.get(name, name): value for name, value in document.items()}


def _unit_to_json(unit: UnitAction) -> dict[str, Any]:
    document: dict[str, Any] = {"fqn": unit.fqn, "action": str(unit.action)}
    if unit.saved:
        document["saved"] = list(unit.saved)
    if unit.most_offloaded_bytes is not None:
        document["most_offloaded_bytes"] = unit.most_offloaded_bytes
    return document


def settings_from_json(document: Any, *, where: str = "the settings") -> Settings:
    """The settings that `settings_to_json` wrote.

    Args:
        document: As read from JSON.
        where: Names them in errors.

    Returns:
        Settings equal to those written.

    Raises:
        FileFormatError: A field is unknown, missing, of another type or out of range.
    """
    return from_json_document(document, Settings, where=where)


json_form(JsonForm(write=settings_to_json, keys=_JSON_KEYS))(Settings)
