"""Models, optimizers and training loops as the software of published experiments ran them.

The articles are of 2019 to early 2022, so the loops are those of torch 1.1 to 1.10: `zero_grad` leaves zeroed
gradients in place, the optimizers walk over the parameters one by one, attention is not fused, softmax saves
its input, checkpointing is reentrant. What transformers did then is written here again. Start reading at
`job_as_published`.
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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from brimful.job import Job

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
    "bert-base": ("BertForSequenceClassification", "BertConfig", _BERT),
    "bert-large": ("BertForSequenceClassification", "BertConfig", _BERT | _WIDE),
    "xlm-roberta-base": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _XLM_R),
    "xlm-roberta-large": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", _XLM_R | _WIDE),
}

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an experiment trains."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    optimizer: MakeOptimizer
    accumulation: int = 1
    prepare: Callable[[Any], None] | None = None
    """Changes the model before training, such as to checkpoint activations."""
    fp16: bool = False
    max_gradient_norm: float | None = None


def job_as_published(recipe: Recipe) -> Job:
    """A job whose own loop is that of transformers' Trainer about 4.15; scripts had the same."""
    return Job(
        model=recipe.model,
        loss=_unused,
        batch=recipe.batch,
        loop=partial(_loop, recipe),
        name=recipe.name,
    )


def text_recipe(
    name: str,
    tokens: int,
    *,
    torch_saves_softmax_input: bool = True,
    optimizer: str = "transformers AdamW",
    **options: Any,
) -> Recipe:
    """A classifier of random tokens with two labels.

    Args:
        name: "bert-base", "bert-large", "xlm-roberta-base" or "xlm-roberta-large".
        tokens: Length of each sequence.
        torch_saves_softmax_input: As torch did until 1.10.
        optimizer: One of `OPTIMIZERS`.
        **options: Other fields of `Recipe`.

    Returns:
        The recipe.
    """
    return Recipe(
        name=name,
        model=partial(_text_model, name, torch_saves_softmax_input),
        batch=partial(_tokens, tokens),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=OPTIMIZERS[optimizer],
        **options,
    )


def vgg_recipe(segments: Callable[[nn.Sequential, nn.Sequential, Tensor], Tensor]) -> Recipe:
    """VGG16 with a new head for two classes; `segments(features, head, images)` runs the two."""
    return Recipe(
        name="vgg16",
        model=partial(VGG16WithHead, segments),
        batch=_images,
        loss=_cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.001, momentum=0.9, foreach=False),
    )


def tweets_recipe(**options: Any) -> Recipe:
    """BERT-base that finds where the sentiment of a tweet of 128 tokens begins and ends."""
    return Recipe(
        name="bert-base",
        model=TweetModel,
        batch=_tweets,
        loss=_span_loss,
        optimizer=TransformersAdamW,
        **options,
    )


def unet_recipe(**options: Any) -> Recipe:
    """A U-Net without padding that segments images of 256 × 256 pixels into nine classes."""
    return Recipe(
        name="unet", model=UnpaddedUNet, batch=_paintings, loss=_cross_entropy, optimizer=_ADAM, **options
    )


def sales_recipe(**options: Any) -> Recipe:
    """A small network on 22 categorical and 16 continuous columns."""
    return Recipe(
        name="feed-forward", model=SalesModel, batch=_sales, loss=_squared_error, optimizer=_ADAM, **options
    )


_ADAM = partial(torch.optim.Adam, foreach=False)


def whole(features: nn.Sequential, head: nn.Sequential, images: Tensor) -> Tensor:
    """Nothing is recomputed."""
    found: Tensor = head(features(images))
    return found


def layers_in_two(features: nn.Sequential, head: nn.Sequential, images: Tensor) -> Tensor:
    """The first half of all layers, the head's among them, is recomputed."""
    return in_two([*features, *head], images)


def in_two(layers: list[nn.Module], images: Tensor) -> Tensor:
    """The layers, of which the first half is recomputed."""
    found: Tensor = checkpoint_sequential(layers, 2, images.requires_grad_(), use_reentrant=True)  # type: ignore
    return found


def checkpoint_layers(model: Any) -> None:
    """Checkpoint each layer of the model, or of the first module in it that can."""
    able = next(module for module in model.modules() if hasattr(module, "gradient_checkpointing_enable"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 is about to rename it
        able.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)


def composite_gelu(model: Any) -> None:
    """The activation of BERT as pytorch-pretrained-bert computed it in 2019, by ops that each save a tensor."""
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = _CompositeGELU()


def checkpoint_attention_and_gelu(model: Any) -> None:
    """Checkpoint attention, its output layer included, and the activation of each layer of a BERT of 2019.

    Not reentrant: layers pass keyword arguments today.
    """
    composite_gelu(model)
    for layer in model.bert.encoder.layer:
        layer.attention.forward = partial(checkpoint, layer.attention.forward, use_reentrant=False)
        layer.intermediate.intermediate_act_fn = _Checkpointed(layer.intermediate.intermediate_act_fn)


class _CompositeGELU(nn.Module):
    """GELU by erf, without a kernel of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation, of the shape of x."""
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class _Checkpointed(nn.Module):
    """A module whose forward is computed again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The output of the module."""
        found: Tensor = checkpoint(self.module, x, use_reentrant=False)
        return found


class VGG16WithHead(nn.Module):
    """torchvision's `vgg16().features`, its pooling, and the article's head."""

    def __init__(self, segments: Callable[..., Tensor] = whole) -> None:
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
        """Logits (B, 2) of images (B, 3, 224, 224)."""
        return self._segments(self.features, self.head, images)


class UnpaddedUNet(nn.Module):
    """Ronneberger et al. 2015, U-Net, a level shallower, with BatchNorm after each ReLU: 7,703,497 parameters.

    Source of sizes: github spellml/unet-bob-ross, models/model_3.py.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.down = nn.ModuleList(map(_convolutions, (3, *widths), widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merges = nn.ModuleList(_convolutions(2 * width, width) for width in widths[-2::-1])
        self.pool, self.classify = nn.MaxPool2d(2), nn.Conv2d(64, 9, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 9, 164, 164) of images (B, 3, 256, 256)."""
        x = images
        skips: list[Tensor] = []
        for block in self.down:
            x = block(self.pool(x) if skips else x)
            skips.append(x)
        for up, merge, skip in zip(self.ups, self.merges, skips[-2::-1], strict=True):
            x = up(x)
            margin = (skip.shape[-1] - x.shape[-1]) // 2
            cropped = skip[:, :, margin : margin + x.shape[-1], margin : margin + x.shape[-1]]
            x = merge(torch.cat((cropped, x), 1))
        found: Tensor = self.classify(x)
        return found


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3), nn.ReLU(), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers)


_CATEGORIES = (
    *((1115, 80), (7, 4), (3, 3), (12, 6), (31, 10), (2, 2), (25, 10), (26, 10), (4, 3), (3, 3), (4, 3)),
    *((23, 9), (8, 4), (12, 6), (52, 15), (22, 9), (6, 4), (6, 4), (3, 3), (3, 3), (8, 4), (8, 4)),
)
_NUMBERS = 16


class SalesModel(nn.Module):
    """Embeddings of the categories, then three linear layers with BatchNorm.

    Source of sizes: github spellml/feedforward-rossman, models/model_4.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(*sizes) for sizes in _CATEGORIES)
        self.dropout, self.norm = nn.Dropout(0.04), nn.BatchNorm1d(_NUMBERS)
        layers: list[nn.Module] = []
        inputs = sum(width for _, width in _CATEGORIES) + _NUMBERS
        for outputs, dropout in ((1000, 0.001), (500, 0.01)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.BatchNorm1d(outputs), nn.Dropout(dropout)]
            inputs = outputs
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, columns: Tensor) -> Tensor:
        """Predictions (B,) of columns (B, 38), the categories first."""
        embedded = [embed(columns[:, index].long()) for index, embed in enumerate(self.embeddings)]
        numbers = self.norm(columns[:, len(_CATEGORIES) :])
        found: Tensor = self.layers(torch.cat((self.dropout(torch.cat(embedded, 1)), numbers), 1))
        return found.squeeze(1)


class TweetModel(nn.Module):
    """BERT-base with a linear layer on its last two hidden states.

    Source of sizes: github spellml/tweet-sentiment-extraction, models/model_2.py.
    """

    def __init__(self) -> None:
        import transformers

        super().__init__()
        config = transformers.BertConfig(
            **_BERT, output_hidden_states=True, attn_implementation=_article_attention()
        )
        self.bert = transformers.BertModel(config)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(2 * config.hidden_size, 2)
        _save_softmax_inputs(self, saves=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the first and of the last token, each (B, T)."""
        states = self.bert(input_ids, attention_mask=attention_mask).hidden_states
        logits = self.head(self.dropout(torch.cat((states[-1], states[-2]), -1)))
        start, end = logits.split(1, -1)
        return start.squeeze(-1), end.squeeze(-1)


def _cross_entropy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _squared_error(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _span_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    start, end = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(start, batch["first"]) + F.cross_entropy(end, batch["last"])


def _images(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 224, 224), "y": torch.randint(0, 2, (samples,))}


def _paintings(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 256, 256), "y": torch.randint(0, 9, (samples, 164, 164))}


def _sales(samples: int) -> dict[str, Tensor]:
    categories = [torch.randint(0, count, (samples, 1)) for count, _ in _CATEGORIES]
    return {"x": torch.cat((*categories, torch.randn(samples, _NUMBERS)), 1), "y": torch.randn(samples)}


def _tweets(samples: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(100, 30000, (samples, 128)),
        "attention_mask": torch.ones(samples, 128, dtype=torch.int64),
        "first": torch.randint(0, 128, (samples,)),
        "last": torch.randint(0, 128, (samples,)),
    }


def _loop(recipe: Recipe, model: Any, batches: Iterable[dict[str, Tensor]]) -> None:
    """The order of transformers' Trainer about 4.15: `training_step`, clip, step, `model.zero_grad()`."""
    if recipe.prepare is not None:
        recipe.prepare(model)
    optimizer = recipe.optimizer(_grouped(model))
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
        loss = recipe.loss(model, batch)
    if recipe.accumulation > 1:
        loss = loss / recipe.accumulation
    (scaler.scale(loss) if scaler else loss).backward()
    return loss.detach()


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices first, then biases and the parameters of norms, as the Trainer gives them to its optimizer."""
    norms = {
        id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if "bias" in name or id(parameter) in norms else decayed).append(parameter)
    return [{"params": decayed}, {"params": others}]


class TransformersAdamW(torch.optim.Optimizer):
    """`transformers.AdamW`, the Trainer's default then: for each parameter, one temporary of its size."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
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


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def _adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(groups, lr=5e-5, scale_parameter=False, relative_step=False)
    return made


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "transformers AdamW": TransformersAdamW,
    "torch AdamW": partial(torch.optim.AdamW, foreach=False),
    "Adafactor": _adafactor,
    "8-bit Adam": Adam8bit,
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
    def backward(ctx: Any, gradient: Tensor) -> Any:
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


def _article_attention() -> str:
    """The name of `_attention` for transformers' configurations."""
    import transformers

    transformers.AttentionInterface.register("attention_of_4_15", _attention)
    return "attention_of_4_15"


def _save_softmax_inputs(model: nn.Module, *, saves: bool) -> None:
    for module in model.modules():
        module.saves_softmax_input = saves  # type: ignore[assignment]


def _unused(_model: nn.Module, _batch: Any) -> Tensor:
    raise AssertionError("these jobs bring their own loop")


def _text_model(name: str, torch_saves_softmax_input: bool) -> nn.Module:
    import transformers

    model_class, config_class, changes = _TEXT_MODELS[name]
    config = getattr(transformers, config_class)(
        **changes,
        num_labels=2,
        use_cache=False,
        problem_type="single_label_classification",
        attn_implementation=_article_attention(),
    )
    model: nn.Module = getattr(transformers, model_class)(config)
    _save_softmax_inputs(model, saves=torch_saves_softmax_input)
    return model


def _tokens(tokens: int, samples: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(100, 30000, (samples, tokens)),  # (B, T)
        "labels": torch.zeros(samples, dtype=torch.int64),
    }
