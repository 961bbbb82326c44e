"""The models, optimizers and training loops of the published experiments that `published.py` predicts.

The articles are of 2021 and early 2022, so the loops are those of torch 1.8 to 1.10: `zero_grad` leaves zeroed
gradients in place, the optimizers walk over the parameters one by one, attention is not fused, softmax saves
its input, checkpointing is reentrant. What transformers did then is written here anew.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from transformers.optimization import Adafactor

import brimful as bf

# B samples, H heads, T tokens, D head size

REENTRANT = {"use_reentrant": True}
_WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_XLM_R: dict[str, Any] = {
    "vocab_size": 250002,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_BERT: dict[str, Any] = {"vocab_size": 30522}
_TEXT_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: model class, config class, what differs from the class's defaults in the published config.json
    "bert-large": ("BertForSequenceClassification", "BertConfig", _BERT | _WIDE),
    "xlm-roberta-base": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _XLM_R),
    "xlm-roberta-large": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _XLM_R | _WIDE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an experiment trains a text classifier."""

    model: str
    tokens: int
    accumulation: int = 1
    checkpoints: bool = False
    fp16: bool = False
    optimizer: str = "transformers AdamW"
    """One of `OPTIMIZERS`."""
    max_gradient_norm: float | None = None
    torch_saves_softmax_input: bool = True
    """As it did until 1.10."""


def text_job(recipe: Recipe) -> bf.Job:
    """A classifier of random tokens with two labels, trained as transformers' Trainer did then."""
    return bf.Job(
        model=partial(_text_model, recipe),
        loss=_unused,
        batch=partial(_tokens, recipe.tokens),
        loop=partial(_trainer_loop, recipe),
        name=recipe.model,
    )


def vgg_job(segments: Callable[[nn.Sequential, nn.Module, Tensor], Tensor]) -> bf.Job:
    """VGG16 with a new head for two classes; `segments(features, head, images)` runs the two."""
    return bf.Job(
        model=partial(VGG16WithHead, segments),
        loss=_unused,
        batch=_images,
        loop=_image_loop,
        name="vgg16",
    )


def whole(features: nn.Sequential, head: nn.Module, images: Tensor) -> Tensor:
    """Nothing is recomputed."""
    return head(features(images))


def features_in_two(features: nn.Sequential, head: nn.Module, images: Tensor) -> Tensor:
    """The first half of the layers of `features` is recomputed; the second half and the head are kept."""
    return head(checkpoint_sequential(features, 2, images.requires_grad_(), use_reentrant=True))


def layers_in_two(features: nn.Sequential, head: nn.Sequential, images: Tensor) -> Tensor:
    """The first half of all layers, the head's among them, is recomputed."""
    return checkpoint_sequential([*features, *head], 2, images.requires_grad_(), use_reentrant=True)


def parts_in_two(features: nn.Sequential, head: nn.Sequential, images: Tensor) -> Tensor:
    """Features and head are the two segments: all features are recomputed at once."""
    return checkpoint_sequential([features, head], 2, images.requires_grad_(), use_reentrant=True)


class VGG16WithHead(nn.Module):
    """torchvision's `vgg16().features`, its pooling, and the article's head."""

    def __init__(self, segments: Callable[..., Tensor]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for convolutions, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(),
            nn.Linear(25088, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 2),
        )
        self._segments = segments

    def forward(self, images: Tensor) -> Tensor:
        return self._segments(self.features, self.head, images)


def _image_loop(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)
    for images, labels in batches:
        images, labels = images.to("cuda"), labels.to("cuda")
        optimizer.zero_grad(set_to_none=False)
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()


def _images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 224, 224), torch.randint(0, 2, (samples,))


def _trainer_loop(recipe: Recipe, model: Any, batches: Iterable[dict[str, Tensor]]) -> None:
    """The order of transformers' Trainer about 4.15: `training_step`, clip, step, `model.zero_grad()`."""
    if recipe.checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers 5 is about to rename it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    optimizer = OPTIMIZERS[recipe.optimizer](_grouped(model))
    scaler = torch.amp.GradScaler("cuda") if recipe.fp16 else None
    total = torch.zeros((), device="cuda")
    for index, batch in enumerate(batches, 1):
        total += _training_step(recipe, model, batch, scaler)
        if index % recipe.accumulation:
            continue
        if recipe.max_gradient_norm is not None:
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm, foreach=False)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        model.zero_grad(set_to_none=False)


def _training_step(recipe: Recipe, model: Any, batch: dict[str, Tensor], scaler: Any) -> Tensor:
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    with torch.autocast("cuda", torch.float16) if recipe.fp16 else nullcontext():
        loss = model(**batch).loss
    if recipe.accumulation > 1:
        loss = loss / recipe.accumulation
    (scaler.scale(loss) if scaler else loss).backward()
    return loss.detach()


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices first, then biases and the parameters of norms, as the Trainer gives them to its optimizer."""
    norms = {
        id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()
    }
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "bias" in name or id(parameter) in norms else decayed).append(parameter)
    return [{"params": decayed}, {"params": others}]


class TransformersAdamW(torch.optim.Optimizer):
    """`transformers.AdamW`, the Trainer's default then: for each parameter, one temporary of its size."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group, parameter in _with_gradients(self):
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            gradient = parameter.grad
            state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            # the name keeps the last parameter's until this one's is there, as it did
            denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
            corrected = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
            parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * corrected)


class Adam8bit(torch.optim.Optimizer):
    """The memory of `bitsandbytes.optim.Adam8bit`, not its arithmetic: fused kernels without temporaries.

    Two bytes a parameter, two float32 maxima per block of 2048, and two tables of 256 for all; tensors of fewer
    than 4096 elements keep float32 state, and so do those of at least `least_kept_float32` rows.
    """

    BLOCK = 2048
    LEAST_QUANTIZED = 4096

    def __init__(self, groups: list[dict[str, Any]], *, least_kept_float32: int | None = None) -> None:
        super().__init__(groups, {"lr": 5e-5})
        self._least_kept_float32 = least_kept_float32
        self._tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not self._tables:
            self._tables = [torch.zeros(256, device="cuda") for _ in range(2)]
        for _, parameter in _with_gradients(self):
            state = self.state[parameter]
            if not state:
                self._make_state(parameter, state)
            for tensor in state.values():
                tensor.mul_(1)
            parameter.add_(parameter.grad, alpha=0.0)

    def _make_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        numel = parameter.numel()
        is_kept = self._least_kept_float32 is not None and parameter.shape[0] >= self._least_kept_float32
        if is_kept or numel < self.LEAST_QUANTIZED:
            state["state1"], state["state2"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            return
        for name in ("1", "2"):
            state[f"state{name}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"absmax{name}"] = torch.zeros(-(-numel // self.BLOCK), device="cuda")


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "transformers AdamW": TransformersAdamW,
    "torch AdamW": partial(torch.optim.AdamW, foreach=False),
    "Adafactor": partial(Adafactor, lr=5e-5, scale_parameter=False, relative_step=False),
    "8-bit Adam": Adam8bit,
    "8-bit Adam, word embeddings in float32": partial(Adam8bit, least_kept_float32=30000),
}


class _SoftmaxOf110(torch.autograd.Function):
    """Softmax over the last dimension as torch had it until 1.10: it saves its input too, and never reads it.

    Source: pytorch issue 49600, mended by pull request 65242 in 1.11.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        result = torch.softmax(scores, -1)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        scores, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, result, -1, scores.dtype)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over (B, H, T, D) as BERT computed it then; a batch without a mask got one of zeros.

    That mask is float32, so under autocast the scores become so too. The names keep what they kept.
    """
    extended_mask = torch.zeros(key.shape[0], 1, 1, key.shape[2], device=query.device)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + extended_mask
    softmax = _SoftmaxOf110.apply if module.saves_softmax_input else partial(torch.softmax, dim=-1)
    probabilities = softmax(scores)
    probabilities = F.dropout(probabilities, options["dropout"], module.training)
    context = torch.matmul(probabilities, value)
    return context.permute(0, 2, 1, 3).contiguous(), None


transformers.AttentionInterface.register("attention_of_4_15", _attention)


def _unused(_model: nn.Module, _batch: Any) -> Tensor:
    raise AssertionError("these jobs bring their own loop")


def _text_model(recipe: Recipe) -> nn.Module:
    model_class, config_class, changes = _TEXT_MODELS[recipe.model]
    config = getattr(transformers, config_class)(
        **changes,
        num_labels=2,
        use_cache=False,
        problem_type="single_label_classification",
        attn_implementation="attention_of_4_15",
    )
    model: nn.Module = getattr(transformers, model_class)(config)
    for module in model.modules():
        module.saves_softmax_input = recipe.torch_saves_softmax_input
    return model


def _tokens(tokens: int, samples: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(100, 30000, (samples, tokens)),  # (B, T)
        "labels": torch.zeros(samples, dtype=torch.int64),
    }
