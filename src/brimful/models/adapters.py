"""LoRA adapters over the frozen weights, quantised or not, of a model of transformers or diffusers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from brimful.errors import UnknownNameError, UsageError
from brimful.models.predicted_layers import PREDICTED, PredictedLinear4bit, PredictedLinear8bit

QUANTIZATIONS: Mapping[str, tuple[str, bool]] = {
    "nf4": ("nf4", False),
    "nf4-dq": ("nf4", True),
    "fp4": ("fp4", False),
    "fp4-dq": ("fp4", True),
    "int8": ("int8", False),
}
"""Quantizations by name: the data type of frozen weights in bitsandbytes, and whether their scales are
quantised too (Dettmers et al. 2023, QLoRA, section 3)."""

LEARNING_RATE = 2e-4
"""Learning rate of AdamW for adapters. Source: Dettmers et al. 2023, QLoRA, appendix B, up to 13 billion
parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Options of peft's `LoraConfig`; defaults are peft's, except that all linear layers are adapted.

    Source of the targets: Dettmers et al. 2023, QLoRA, section 4, figure 2.
    """

    r: int = 8
    """Rank of the adapters."""
    alpha: float = 8
    """Adapters are scaled by alpha / r."""
    dropout: float = 0.0
    """Dropout probability of the adapters' inputs."""
    targets: tuple[str, ...] = ()
    """Names of the layers to adapt, such as q_proj; empty for all linear layers but the output layer."""

    @classmethod
    def parse(cls, text: str) -> LoraOptions:
        """Parse text such as "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"; each part is optional.

        Raises `UsageError` if a name is unknown or repeated, or a value is out of range.
        """
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = (word.strip() for word in part.partition("="))
            if name not in (field.name for field in fields(cls)) or not equals or name in given:
                raise UsageError(
                    f"--lora {text!r}: {part!r} is not an option, or repeats one. Write "
                    "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj, or any of these parts."
                )
            given[name] = value
        return cls(
            r=int(_number(text, given.get("r", "8"), least=1, is_whole=True)),
            alpha=_number(text, given.get("alpha", "8"), least=0),
            dropout=_number(text, given.get("dropout", "0"), least=0, below=1),
            targets=tuple(filter(None, given.get("targets", "").split("+"))),
        )

    def __str__(self) -> str:
        parts = [f"r={self.r}", f"alpha={self.alpha:g}", f"dropout={self.dropout:g}"]
        return ",".join([*parts, *([f"targets={'+'.join(self.targets)}"] if self.targets else [])])


def _number(
    text: str, value: str, *, least: float, below: float | None = None, is_whole: bool = False
) -> float:
    try:
        number = int(value) if is_whole else float(value)
    except ValueError:
        number = float("nan")
    if not (number >= least and (below is None or number < below)) or number == float("inf"):
        kind = "a whole number" if is_whole else "a number"
        limit = "" if below is None else f" and below {below:g}"
        raise UsageError(f"--lora {text!r}: {value!r} is not {kind} of at least {least:g}{limit}.")
    return number


def check_quantization(name: str | None, *, has_adapters: bool) -> None:
    """Raise `UsageError` unless `name` is None, or one of `QUANTIZATIONS` and adapters are trained.

    Quantised weights are frozen: without adapters nothing would be trained.
    """
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise UnknownNameError("quantization", name, QUANTIZATIONS)
    if not has_adapters:
        raise UsageError(
            f"quantised weights are frozen, and --quantize {name} leaves nothing to train. Add --lora r=16."
        )


def adapted(
    model: nn.Module,
    lora: LoraOptions,
    quantization: str | None,
    *,
    is_classifier: bool,
    trains_pooler: bool = False,
) -> nn.Module:
    """Freeze a model of transformers, and add trainable LoRA adapters; the model is changed.

    `quantization`, one of `QUANTIZATIONS`, quantises the frozen weights; None keeps them as they are. The new
    head of a classifier is trained too. With `trains_pooler` so is the pooler of the encoder, if it has one:
    where it is new, nothing else would keep its random weights.

    Returns a `PeftModel`. Raises `UsageError` if peft is not installed, or finds no layer with such a name.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora needs peft: pip install peft.") from error
    if quantization is not None:
        quantise_linear_layers(model, quantization)
    heads = [name for name, layer in _outside(model) if any(True for _ in layer.parameters())]
    heads += _poolers(model) if trains_pooler else []
    excluded = [*heads, *_never_called(model), *([] if lora.targets else _image_encoder_of_llava(model))]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        exclude_modules=rf"({'|'.join(map(re.escape, excluded))})(\..*)?" if excluded else None,
        modules_to_save=heads if is_classifier else None,
        task_type="SEQ_CLS" if is_classifier else "CAUSAL_LM" if _is_causal(model) else None,
    )
    if any(isinstance(layer, PREDICTED) for layer in model.modules()):
        _add_to_quantised_results(config)
    try:
        with warnings.catch_warnings():  # of transformers, about a name that peft reads, and of peft
            warnings.filterwarnings("ignore", message=".* is deprecated and will be removed in v6")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            warnings.filterwarnings(
                "ignore", message="fan_in_fan_out is set to False"
            )  # peft sets it for Conv1D
            made: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise _no_such_targets(model, lora, error) from error
    return made


_TARGETS_OF_DIFFUSERS = ("to_k", "to_q", "to_v", "to_out.0")
"""Layers that are adapted by default. Source: diffusers 0.40.0.dev0 (commit 58eb52c, August 2026),
examples/text_to_image/train_text_to_image_lora.py and train_text_to_image_lora_sdxl.py."""

_TARGETS_OF_FLUX = (
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
)
"""Layers of a FLUX that are adapted by default. Source: diffusers, the same commit,
examples/dreambooth/train_dreambooth_lora_flux.py; with 0.32.0.dev0 it adapted the first four."""


def add_adapters(model: Any, lora: LoraOptions) -> nn.Module:
    """Freeze a model of diffusers, and add trainable LoRA adapters to it, as diffusers' examples do.

    The adapters have the type of the weights. UsageError if peft is not installed, or no layer has such a name.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UsageError("--lora needs peft: pip install peft.") from error
    is_flux = type(model).__name__ == "FluxTransformer2DModel"
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets or (_TARGETS_OF_FLUX if is_flux else _TARGETS_OF_DIFFUSERS)),
        init_lora_weights="gaussian",
    )
    frozen: nn.Module = model.requires_grad_(False)
    try:
        model.add_adapter(config)
    except ValueError as error:
        raise _no_such_targets(model, lora, error) from error
    return frozen


def _no_such_targets(model: nn.Module, lora: LoraOptions, error: ValueError) -> UsageError:
    names = sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if _is_linear(layer)})
    return UsageError(f"--lora {lora}: {str(error).splitlines()[0]} The linear layers are {', '.join(names)}.")


def _is_causal(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _add_to_quantised_results(config: Any) -> None:
    """Make adapters over predicted layers add their results as peft's do over bitsandbytes' layers.

    Source: peft/tuners/lora/bnb.py, forward (0.21).
    """
    from peft.tuners.lora import Linear

    class Adapted(Linear):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base_layer(x)
            if isinstance(self.base_layer, PredictedLinear4bit):
                result = result.clone()
            for name in self.active_adapters:
                lora_a: Any = self.lora_A[name]
                converts = not torch.is_autocast_enabled()
                if converts:
                    x = self._cast_input_dtype(x, lora_a.weight.dtype)
                added = self.lora_B[name](lora_a(self.lora_dropout[name](x))) * self.scaling[name]
                if converts:
                    added = added.to(result.dtype)
                result = result + added
            return result

    config._register_custom_module(dict.fromkeys(PREDICTED, Adapted))


def _never_called(model: nn.Module) -> list[str]:
    """The `MultiheadAttention.out_proj`, whose weight is used without calling the layer."""
    return [
        f"{name}.out_proj" for name, layer in model.named_modules() if isinstance(layer, nn.MultiheadAttention)
    ]


def _image_encoder_of_llava(model: nn.Module) -> list[str]:
    """The image encoder of a LLaVA; its features are from inside it, and adapters behind those never train."""
    if not type(model).__name__.startswith("Llava"):
        return []
    return [name for name, _layer in model.named_modules() if name.rpartition(".")[2] == "vision_tower"]


def _poolers(model: Any) -> list[str]:
    """The path of the pooler of a classifier's encoder; empty without one."""
    has_one = isinstance(getattr(model.base_model, "pooler", None), nn.Module)
    return [f"{model.base_model_prefix}.pooler"] if has_one else []


def quantise_linear_layers(model: nn.Module, quantization: str) -> None:
    """Replace linear layers by quantised ones of bitsandbytes, as transformers' `from_pretrained` does.

    The model of transformers is changed. Layers outside its `base_model` stay, such as the head.
    """
    heads = {head for _name, layer in _outside(model) for head in layer.modules()}
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, layer in list(model.named_modules()):
        if _is_linear(layer) and layer not in heads and name.rpartition(".")[2] not in kept:
            model.set_submodule(name, _quantised(layer, quantization))
    setattr(model, "is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit", True)


def _outside(model: Any) -> list[tuple[str, nn.Module]]:
    """The children of a transformers model beside its `base_model`; its output layer if it has no such part."""
    output = model.get_output_embeddings() if model.base_model is model else None
    return [
        (name, part)
        for name, part in model.named_children()
        if (part is output if model.base_model is model else part is not model.base_model)
    ]


def _is_linear(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(layer) in (nn.Linear, Conv1D)


def _quantised(layer: nn.Module, quantization: str) -> nn.Module:
    """A frozen copy of a layer with quantised weights; needs bitsandbytes, except for meta and fake weights."""
    assert isinstance(layer.weight, Tensor)
    weight = _by_rows(layer)
    kind, is_nested = QUANTIZATIONS[quantization]
    try:
        import bitsandbytes
    except ImportError as error:
        if not weight.is_meta and not isinstance(weight, FakeTensor):
            raise UsageError(
                f"to train with --quantize {quantization} install bitsandbytes: pip install bitsandbytes. Only "
                "predictions do without."
            ) from error
        bias = layer.bias if isinstance(layer.bias, Tensor) else None
        if kind == "int8":
            return PredictedLinear8bit(weight, bias)
        return PredictedLinear4bit(weight, bias, is_nested=is_nested)
    rows, columns = weight.shape
    made: Any
    library: Any = bitsandbytes.nn
    with torch.device("meta"):  # the new layer's own weights are replaced at once
        if kind == "int8":
            made = library.Linear8bitLt(columns, rows, bias=layer.bias is not None, has_fp16_weights=False)
        else:
            made = library.Linear4bit(
                columns,
                rows,
                bias=layer.bias is not None,
                compute_dtype=weight.dtype,
                compress_statistics=is_nested,
                quant_type=kind,
            )
    made.weight = quantised_like(made, weight)
    if isinstance(layer.bias, Tensor):
        made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    # a model that is captured is built on meta, where only a move to another device quantises
    quantised: nn.Module = made.to("cpu" if weight.is_meta else weight.device)
    return quantised


def _by_rows(layer: nn.Module) -> Tensor:
    """The weights of a linear layer, (outputs, inputs); a `Conv1D` holds their transpose."""
    assert isinstance(layer.weight, Tensor)
    weight = layer.weight.detach()
    return weight if type(layer) is nn.Linear else weight.T.contiguous()


def quantised_like(layer: Any, weight: Tensor) -> nn.Parameter:
    """A parameter for a `Linear4bit` or `Linear8bitLt`, quantised when the layer moves to a device.

    `weight` is (outputs, inputs), of a floating-point type.
    """
    import bitsandbytes

    made: Any
    library: Any = bitsandbytes.nn
    if isinstance(layer, library.Linear4bit):
        own: Any = layer.weight
        made = library.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=own.compress_statistics,
            quant_type=own.quant_type,
            quant_storage=own.quant_storage,
            module=layer,
        )
    else:
        made = library.Int8Params(weight, has_fp16_weights=False, requires_grad=False)
    parameter: nn.Parameter = made
    return parameter


def load_base(model: nn.Module, pretrained: nn.Module) -> None:
    """Load pretrained weights into the frozen layers of a `PeftModel`, quantised as these are.

    `model` is one by `adapted`; `pretrained` is the same model without adapters, not quantised.
    """
    adapted_model: Any = model
    base = adapted_model.get_base_model()
    with torch.no_grad():
        for path, layer in pretrained.named_modules():
            for twin in _twins(base.get_submodule(path)):
                _load_layer(twin, layer)


def _twins(layer: nn.Module) -> list[nn.Module]:
    """The layers inside peft's wrapper: two, frozen and trained, for a layer that is trained as a whole."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(layer, ModulesToSaveWrapper):
        return [layer.original_module, *layer.modules_to_save.values()]
    return [layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer]


def _load_layer(twin: Any, layer: nn.Module) -> None:
    """Copy a layer's own parameters and buffers, not those of its submodules."""
    is_quantised = type(twin).__module__.startswith("bitsandbytes.")
    for name, value in (*layer._parameters.items(), *layer._buffers.items()):
        if value is None:
            continue
        if is_quantised and name == "weight":
            device = twin.weight.device
            twin.weight = quantised_like(twin, _by_rows(layer))
            twin.to(device)
        else:
            getattr(twin, name).copy_(value)
