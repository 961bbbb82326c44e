"""The list of models that are known by name."""

from __future__ import annotations

from typing import Any

from brimful.models import architecture_names
from brimful.models.hub import PublishedModel, matching


def models_text(word: str) -> str:
    """The models with a word in their name or class, one a line: name, parameters, class."""
    built_in = [name for name in architecture_names() if word.lower() in name.lower()]
    lines = [f"  {each.name:<56}{_count(each):>8}  {each.architecture}" for each in matching(word)]
    parts = []
    if built_in:
        parts.append(f"built in: {', '.join(built_in)}")
    if lines:
        parts.append("\n".join(["by id on the Hugging Face Hub, or its last part: parameters, class", *lines]))
    if not parts:
        parts.append(f"no model that is known by name has {word!r} in its name or class.")
    parts.append(
        "Others: an id on the Hub, whose config.json is read from the local cache or the network; a local "
        "directory\nor config.json of transformers or diffusers; timm/NAME; path/to/file.py:NAME of your own."
    )
    return "\n".join(parts)


def _count(model: PublishedModel) -> str:
    if model.parameter_count is None:
        return ""
    billions = model.parameter_count / 1e9
    if billions >= 0.9995:  # 999.5 million have four digits
        return f"{billions:.3g}B"
    return f"{1000 * billions:.3g}M"


def models_document(word: str) -> dict[str, Any]:
    """The same as a JSON object."""
    return {
        "built_in": [name for name in architecture_names() if word.lower() in name.lower()],
        "published": [
            {"name": each.name, "architecture": each.architecture, "parameter_count": each.parameter_count}
            for each in matching(word)
        ],
    }
