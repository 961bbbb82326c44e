"""Building a model class of transformers from published hyper-parameters, with random weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from brimful.errors import UsageError
from brimful.models.resized import resized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from brimful.job import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model: its classes in transformers and its hyper-parameters."""

    config_class: str
    model_class: str
    config: dict[str, Any]
    """Every hyper-parameter that sizes a tensor or changes an operation, by transformers' name."""
    causal: bool = False
    """Whether a token attends to those before it only."""

    def resized(self, name: str, **sizes: int | None) -> dict[str, Any]:
        """What changes in the configuration with another number of layers or width; see `resized`."""
        return resized(name, SimpleNamespace(**self.config), **sizes)


def build_model(name: str, published: Published, *, without: tuple[str, ...] = (), **changes: Any) -> nn.Module:
    """A published model with random weights, in float32, in training mode, with sdpa attention.

    Nothing is looked up or downloaded. Each of `changes` takes the place of a published hyper-parameter, unless
    it is None; hyper-parameters in `without` are None. `name` is for errors: UsageError if transformers is not
    installed.
    """
    transformers = import_transformers(name)
    changed = {option: value for option, value in changes.items() if value is not None}
    config = getattr(transformers, published.config_class)(
        **(published.config | changed | dict.fromkeys(without)),
        attn_implementation=attention(causal=published.causal),
    )
    model: Any = getattr(transformers, published.model_class)(config)
    if published.causal:
        set_causal_loss(model)
    return model


def set_causal_loss(model: Any) -> None:
    """Name the loss that transformers falls back to, with a warning, as "GPT2LMHeadModel" does not name it."""
    model.loss_type = "ForCausalLM"


_IMPORTED_WHEN_CALLED = {
    "scipy.optimize": ("linear_sum_assignment",),
    "torchao.prototype.safetensors.safetensors_support": ("flatten_tensor_state_dict",),
}
"""Functions that transformers imports with any model: for losses of detectors, and to save quantised weights.
SciPy and torchao take as long to import as all that a model of language needs. Source: transformers.loss,
transformers.quantizers.quantizer_torchao (checked: 5.23)."""


class _Later(ModuleType):
    """Stands for a module while others import functions of it; these import the module when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks all modules for their files
            raise AttributeError(name)
        if name not in _IMPORTED_WHEN_CALLED[self.__name__]:  # another thread wants it
            sys.modules.pop(self.__name__, None)
            return getattr(import_module(self.__name__), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


def import_transformers(name: str) -> Any:
    """transformers, with what all models share, but without SciPy and torchao until their functions are called.

    `name` is for errors: UsageError if transformers is not installed.
    """
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"{name} is built with transformers, which is not installed: pip install transformers."
        ) from error
    stand_ins = {each: _Later(each) for each in _IMPORTED_WHEN_CALLED if each not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import_module("transformers.modeling_utils")
    finally:
        for each, stand_in in stand_ins.items():
            if sys.modules.get(each) is stand_in:
                del sys.modules[each]
    return transformers


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def attention(*, causal: bool) -> str:
    """The attention that transformers' models are built with, as `attn_implementation` takes it.

    For a causal model it is transformers' own sdpa attention under a name for which no mask is made.

    Under the name "sdpa", a causal model reads from its position ids, with an `.all()` in Python, whether a row
    holds several packed sequences, and omits the mask if none does. On fake tensors it does not ask but builds
    a mask of (B, 1, T, T), which then rules out flash attention: what is captured would be another program.
    Without a mask the model calls `scaled_dot_product_attention(…, is_causal=True)` on real and on fake
    tensors. It is right only for batches without padding and packing, as ours are.

    Source: transformers.masking_utils, `find_packed_sequence_indices`, `_preprocess_mask_arguments` (checked:
    5.23).
    """
    if not causal:
        return "sdpa"
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "sdpa_without_mask"
    AttentionInterface.register(name, sdpa_attention_forward)
    return name
