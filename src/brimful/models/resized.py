"""A configuration of transformers with another depth or width."""

from __future__ import annotations

from typing import Any

from brimful.errors import UsageError
from brimful.models.checks import check_multiple, check_range, checked_size

_OF_WIDTH = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "hidden_dim"),
    *("n_inner", "ffn_hidden_size", "word_embed_proj_dim", "pooler_hidden_size"),
)
"""Sizes that stay in proportion to the width, where a configuration has them."""
_OF_OTHER_WIDTHS = ("kv_lora_rank", "depths", "hidden_sizes", "is_encoder_decoder")
"""Fields of models whose width is not one number of heads times one size of a head."""
_OF_LAYERS = ("layer_types", "no_rope_layers")
"""Lists with an entry for each layer."""


def resized(
    name: str, config: Any, *, num_hidden_layers: int | None = None, hidden_size: int | None = None
) -> dict[str, Any]:
    """What changes in a configuration with another number of layers or width; None leaves either as it is.

    Of another width are the number of heads, each of the same size and as many for each head of keys and
    values, and the sizes between layers, in proportion. UsageError if the configuration has no such size.
    """
    changes: dict[str, Any] = {}
    if num_hidden_layers is not None:
        _check_has(name, config, "num_hidden_layers", but=("depths",))
        check_range(name, "num_hidden_layers", num_hidden_layers, 1)
        lists = {key: getattr(config, key, None) for key in _OF_LAYERS}
        changes["num_hidden_layers"] = num_hidden_layers
        changes |= {
            key: [each[layer % len(each)] for layer in range(num_hidden_layers)]
            for key, each in lists.items()
            if isinstance(each, list) and each
        }
    if hidden_size is not None:
        _check_has(name, config, "hidden_size", "num_attention_heads", but=_OF_OTHER_WIDTHS)
        changes |= _of_width(name, config, hidden_size)
    return changes


def _of_width(name: str, config: Any, hidden_size: int) -> dict[str, Any]:
    width = checked_size(name, "hidden_size", config.hidden_size)
    heads = checked_size(name, "num_attention_heads", config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    groups = heads if kv_heads == 1 else kv_heads  # one head of keys and values stays the only one
    check_multiple(name, "hidden_size", hidden_size, width // groups)
    sizes = {key: getattr(config, key, None) for key in _OF_WIDTH}
    changes = {key: size * hidden_size // width for key, size in sizes.items() if isinstance(size, int)}
    changes |= {"hidden_size": hidden_size, "num_attention_heads": heads * hidden_size // width}
    if kv_heads not in (1, heads) or getattr(config, "num_key_value_heads", None) == heads:
        changes["num_key_value_heads"] = kv_heads * hidden_size // width
    return changes


def _check_has(name: str, config: Any, *sizes: str, but: tuple[str, ...]) -> None:
    has_others = any(getattr(config, key, None) for key in but)
    missing = [key for key in sizes if not isinstance(getattr(config, key, None), int)]
    if missing or has_others:
        raise UsageError(f"{name} takes no {sizes[0]}: its configuration has not one such size for all layers.")
