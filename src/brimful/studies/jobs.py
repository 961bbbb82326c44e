"""Models and data of the studies: those of the articles with random data, and small ones that learn on a CPU.

The small data are scikit-learn's handwritten digits, 1797 images of 8 × 8 pixels, and the help topics of Python
(`pydoc_data`, 460 KB of English) as windows of words or bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset

from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.models import find_architecture
from brimful.optimizers import named_optimizer
from brimful.studies.published_loops import Recipe, VGG16WithHead, vgg_recipe, whole

# B samples, T bytes of a window

VALIDATION_EVERY = 6
"""One of this many samples is for validation."""
_CLASSES = 10
_WHOLE = 256
"""Training samples are a multiple of this."""
_LEARNING_RATE = 1e-3


def _split(samples: dict[str, Tensor]) -> Data:
    """The samples, of which some are for validation, the others in whole batches."""
    first = next(iter(samples.values()))
    held_out = torch.arange(len(first)) % VALIDATION_EVERY == 0
    whole = int((~held_out).sum()) // _WHOLE * _WHOLE
    return Data(
        train={name: tensor[~held_out][:whole] for name, tensor in samples.items()},
        validation={name: tensor[held_out] for name, tensor in samples.items()},
    )


@cache
def _digits() -> dict[str, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"the small scale trains on scikit-learn's digits, and it cannot be imported: {error}. "
            "pip install 'brimful[demo]'"
        ) from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return {"x": images, "y": torch.tensor(digits.target)}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean()}


def digits_job(
    network: Callable[[], nn.Module], *, optimizer: str = "adamw", learning_rate: float = _LEARNING_RATE
) -> Job:
    """A network that classifies the digits: (B, 1, 8, 8) → (B, 10)."""
    return Job(
        model=network,
        loss=_loss,
        batch=lambda samples: {name: tensor[:samples] for name, tensor in _digits().items()},
        optimizer=named_optimizer(optimizer, learning_rate=learning_rate),
        metrics=_accuracy,
        data=lambda: _split(_digits()),
        name="digits",
    )


def loaded_digits_job(workers: int, batch: int) -> Job:
    """The same digits, each enlarged, rotated and reduced again by a DataLoader's workers."""
    job = NORMED()

    def data() -> Data:
        split = _split(_digits())
        loader = DataLoader(
            _Rotated(split.train["x"], split.train["y"]),  # type: ignore[index]
            batch_size=batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        return replace(split, train=loader)

    return replace(job, data=data)


_ENLARGED = 320
"""Pixels along each side while a digit is rotated."""


class _Rotated(Dataset[dict[str, Tensor]]):
    """Digits whose preparation takes about as long as a JPEG's decoding, a few milliseconds."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        enlarged = F.interpolate(self.images[index][None], size=_ENLARGED, mode="bicubic")
        angle = (torch.rand(()) - 0.5) / 2
        turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).reshape(2, 2)
        grid = F.affine_grid(F.pad(turn, (0, 1))[None], [1, 1, _ENLARGED, _ENLARGED], align_corners=False)
        turned = F.grid_sample(enlarged, grid, align_corners=False)
        return {"x": F.adaptive_avg_pool2d(turned, 8)[0], "y": self.labels[index]}


def wide_mlp(width: int) -> nn.Module:
    """Two hidden layers of a width."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _CLASSES),
    )


def convolutions(width: int = 16, layers: int = 8) -> nn.Sequential:
    """Convolutions that keep the size of the image, its mean over 2 × 2 parts, dropout and a linear layer."""
    blocks: list[nn.Module] = []
    for inputs in (1, *[width] * (layers - 1)):
        blocks += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, _CLASSES)
    )


def normed_mlp(norm: Callable[[int], nn.Module], width: int = 128) -> nn.Module:
    """Three linear layers with a norm each, whose statistics are of a micro-batch under BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (64, width, width):
        layers += [nn.Linear(inputs, width), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def group_norm(channels: int) -> nn.Module:
    """GroupNorm in eight groups."""
    return nn.GroupNorm(8, channels)


NORMED = partial(digits_job, partial(normed_mlp, group_norm))
"""Makes the job of three linear layers with GroupNorm."""


class Segmented(nn.Module):
    """A Sequential that is checkpointed in segments by `checkpoint_sequential`; with 0 it is not."""

    def __init__(self, layers: nn.Sequential, segments: int) -> None:
        super().__init__()
        self.layers, self.segments = layers, segments

    def forward(self, x: Tensor) -> Tensor:
        """The output of the layers."""
        if self.segments == 0 or not self.training:
            found: Tensor = self.layers(x)
            return found
        return checkpoint_sequential(self.layers, self.segments, x, use_reentrant=False)  # type: ignore


def vgg16_job(segments: int) -> Job:
    """The article's VGG16 as one Sequential in segments; SGD with momentum."""

    def build() -> nn.Module:
        layers = VGG16WithHead()
        return Segmented(nn.Sequential(*layers.features, *layers.head), segments)

    return from_recipe(vgg_recipe(whole), "sgd", build)


def from_recipe(recipe: Recipe, optimizer: str, model: Callable[[], nn.Module] | None = None) -> Job:
    """Model, loss and batch of an article in brimful's own loop."""
    return Job(
        model=model or recipe.model,
        loss=recipe.loss,
        batch=recipe.batch,
        optimizer=optimizer,
        name=recipe.name,
    )


def small_vgg(segments: int) -> nn.Module:
    """The layers of `convolutions` in segments."""
    return Segmented(convolutions(), segments)


def deep_mlp(layers: int, width: int, segments: int, inputs: int = 64, classes: int = 10) -> nn.Module:
    """Residual linear layers, one after another in one Sequential."""
    inner = [_Residual(width, 1 / layers) for _ in range(layers)]
    return Segmented(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *inner, nn.Linear(width, classes)), segments
    )


class _Residual(nn.Module):
    """A linear layer that begins near the identity, so that depth trains."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        """The input plus a little of what the layer makes of it."""
        return x + self.scale * F.relu(self.linear(x))


def deep_mlp_job(layers: int, width: int, segments: int) -> Job:
    """Random inputs of 64 numbers; SGD with momentum."""
    return Job(
        model=partial(deep_mlp, layers, width, segments),
        loss=_loss,
        batch=lambda samples: {"x": torch.randn(samples, 64), "y": torch.randint(0, 10, (samples,))},
        optimizer="sgd",
        name="deep-mlp",
    )


def text_job(name: str, **options: Any) -> Job:
    """A built-in text model, over 512 tokens unless `sequence_length` is given."""
    return find_architecture(name, **{"sequence_length": 512} | options)


def gpt2_job(vocabulary: int, width: int = 768) -> Job:
    """GPT-2 of 12 layers, 1024 tokens, with a vocabulary and a width of its own; 12 heads at 768, else 8."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        model: nn.Module = GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_embd=width, n_head=12 if width == 768 else 8)
        )
        return model

    return _language_model(build, vocabulary, 1024, "gpt2")


def _language_model(build: Callable[[], nn.Module], vocabulary: int, tokens: int, name: str) -> Job:
    """A language model of random tokens."""
    return Job(
        model=build,
        loss=_next_token_loss,
        batch=lambda samples: {"input_ids": torch.randint(0, vocabulary, (samples, tokens))},
        optimizer="adamw",
        name=name,
    )


def experts_job(experts: int, per_token: int, *, is_small: bool = False, is_bf16: bool = False) -> Job:
    """A decoder whose feed-forward layers are mixtures of experts; with one expert it is dense.

    Full: 12 layers of width 1024, 1024 tokens; small: 2 of width 64, windows of the help topics. `is_bf16`
    makes the weights bfloat16.
    """
    sizes: dict[str, Any] = (
        {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        if is_small
        else {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    )
    heads, tokens = (4, _WINDOW) if is_small else (16, 1024)

    def build() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            **sizes,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_local_experts=experts,
            num_experts_per_tok=per_token,
            max_position_embeddings=tokens,
            use_cache=False,
        )
        model: nn.Module = MixtralForCausalLM(config)
        return model.to(torch.bfloat16) if is_bf16 else model

    if is_small:
        return _next_byte_job(build)
    return _language_model(build, sizes["vocab_size"], tokens, f"{experts}-experts")


def small_gpt_job() -> Job:
    """A small GPT-2 over the bytes of the help topics, its output layer as wide as its hidden layers."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=4096, n_positions=_WINDOW, n_embd=64, n_layer=2, n_head=4, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: nn.Module = GPT2LMHeadModel(config)
        return model

    return _next_byte_job(build)


def _next_byte_job(build: Callable[[], nn.Module]) -> Job:
    return Job(
        model=build,
        loss=_next_token_loss,
        batch=lambda samples: {"input_ids": _bytes()["input_ids"][:samples]},
        optimizer=named_optimizer("adamw", learning_rate=3 * _LEARNING_RATE),
        metrics=_next_byte_accuracy,
        data=lambda: _split(_bytes()),
        name="help-topics",
    )


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _next_byte_accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    guessed = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
    return {"accuracy": (guessed == batch["input_ids"][:, 1:]).float().mean()}


_CHINESE = 21128
"""Vocabulary of google-bert/bert-base-chinese, which the article computes with."""


def gathered_logits_job(gathered: int) -> Job:
    """BERT-base as a language model; the loss also takes logits of other GPUs' samples, as DataParallel's does.

    `gathered` is the number of samples of other GPUs for each own one.
    """

    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        model: nn.Module = BertForMaskedLM(BertConfig(vocab_size=_CHINESE))
        return model

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        labels = batch["input_ids"]
        if gathered:
            others = logits.new_zeros(gathered * len(logits), *logits.shape[1:], requires_grad=True)
            logits, labels = torch.cat((logits, others)), labels.repeat(gathered + 1, 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Job(
        model=build,
        loss=loss,
        batch=lambda samples: {"input_ids": torch.randint(0, _CHINESE, (samples, 512))},
        optimizer="adamw",
        name="bert-base-lm",
    )


_TOPICS = 8
_WINDOW = 64
"""Bytes, or half as many words, of a sample."""
_WORDS = 2048


def _longest_topics() -> list[str]:
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=len, reverse=True)[:_TOPICS]


@cache
def _topics() -> dict[str, Tensor]:
    """Windows of 32 words of the longest help topics, hashed, (N, 32), and the number of the topic of each."""
    encoded = [[crc32(word.encode()) % _WORDS for word in text.split()] for text in _longest_topics()]
    windows = [_windows(words, _WINDOW // 2) for words in encoded]
    labels = [torch.full((len(of_topic),), label) for label, of_topic in enumerate(windows)]
    return {"input_ids": torch.cat(windows), "labels": torch.cat(labels)}


@cache
def _bytes() -> dict[str, Tensor]:
    """Windows of 64 bytes of the longest help topics, (N, 64)."""
    encoded = "\n".join(_longest_topics()).encode("ascii", "replace")
    return {"input_ids": _windows(list(encoded), _WINDOW)}


def _windows(numbers: list[int], length: int) -> Tensor:
    whole = len(numbers) // length * length
    return torch.tensor(numbers[:whole]).reshape(-1, length)


def _text_accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    guessed = model(input_ids=batch["input_ids"]).logits.argmax(1)
    return {"accuracy": (guessed == batch["labels"]).float().mean()}


def topics_job(layers: int = 2, **compilation: Any) -> Job:
    """A small BERT that says which help topic 32 words are from; `compilation` is for `nn.Module.compile`."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
        config = BertConfig(
            **sizes,
            intermediate_size=256,
            vocab_size=_WORDS,
            max_position_embeddings=_WINDOW,
            num_labels=_TOPICS,
        )
        model: nn.Module = BertForSequenceClassification(config)
        if compilation:
            torch.compiler.reset()  # else code of other backends counts towards torch's limit of recompilations
            model.compile(**compilation)
        return model

    return Job(
        model=build,
        loss=lambda model, batch: model(**batch).loss,
        batch=lambda samples: {name: tensor[:samples] for name, tensor in _topics().items()},
        optimizer=named_optimizer("adamw", learning_rate=_LEARNING_RATE),
        metrics=_text_accuracy,
        data=lambda: _split(_topics()),
        name="topics",
    )
