"""Predicted peak memory against measured, on a CPU.

    python benchmarks/cpu_truth.py

Small models, each plain, with dropout, with every unit recomputed, and with its batch in 2 and 4 micro-batches.
Predicted: `capture_step` for the device "cpu", then `predict_memory`. Measured: one real step under torch's
profiler. A capture sees ops, not what a kernel allocates inside itself and frees before it returns. So where a
prediction is low, the temporaries live at the measured peak are named; `unexplained_bytes` is what of the
difference they do not cover.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import find_units
from brimful.utils.quantities import format_bytes
from machine import keep

NAMED_ABOVE_FRACTION = 0.01
"""Errors above this are explained in the table."""

# B samples, C channels, H height, W width, T tokens, D width


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.projection_in = nn.Linear(width, 3 * width)
        self.projection_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            self.projection_in(x)
            .view(batch, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return self.projection_out(y.transpose(1, 2).reshape(batch, tokens, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), Attention(width, heads, dropout, causal), nn.Dropout(dropout)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Token ids (B, T) → logits (B, T, V): a GPT if causal, a BERT if not."""

    def __init__(self, *, causal: bool, dropout: float, width: int = 256, vocabulary: int = 2000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, 8, dropout, causal) for _ in range(6))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Images (B, 3, 64, 64) → logits (B, 10)."""

    def __init__(self, *, dropout: float, width: int = 256, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (64 // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, 8, dropout) for _ in range(6)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(1))


class LSTM(nn.Module):
    """Sequences (B, T, D) → logits (B, 10)."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class UNet(nn.Module):
    """Images (B, 3, H, W) → logits (B, 2, H, W)."""

    def __init__(self, *, dropout: float, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = self._double(3, widths[0], dropout)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), self._double(a, b, dropout)) for a, b in pairwise(widths)
        )
        inner = widths[:0:-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(width, width // 2, 2, stride=2) for width in inner)
        self.up = nn.ModuleList(self._double(width, width // 2, dropout) for width in inner)
        self.head = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _double(channels: int, width: int, dropout: float) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
        )

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.stem(images), []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([skips.pop(), widen(x)], 1))
        return self.head(x)


def make_mlp(dropout: float) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 512)]
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def make_cnn(dropout: float) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64), (64, 128)):
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def make_resnet(dropout: float) -> nn.Module:
    def block(width: int) -> nn.Module:
        return Residual(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for width in (32, 64):
        layers += [block(width), nn.ReLU(), block(width), nn.ReLU()]
        layers.append(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def predict_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def random_batch(shape: tuple[int, ...], samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, *shape), "y": torch.randint(0, 10, (samples,))}


def random_masks(size: int, samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, size, size), "y": torch.randint(0, 2, (samples, size, size))}


def random_tokens(length: int, samples: int) -> dict[str, Tensor]:
    return {"x": torch.randint(0, 2000, (samples, length)), "y": torch.randint(0, 2000, (samples, length))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    build: Callable[[float], nn.Module]
    """From a dropout rate."""
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor] = classify
    batch_size: int

    def job(self, dropout: float) -> Job:
        return Job(model=lambda: self.build(dropout), loss=self.loss, batch=self.batch, name=self.name)


MODELS = (
    Model(name="mlp", build=make_mlp, batch=partial(random_batch, (64,)), batch_size=2048),
    Model(name="cnn", build=make_cnn, batch=partial(random_batch, (3, 64, 64)), batch_size=32),
    Model(name="resnet", build=make_resnet, batch=partial(random_batch, (3, 64, 64)), batch_size=16),
    Model(
        name="unet",
        build=lambda dropout: UNet(dropout=dropout),
        batch=partial(random_masks, 96),
        loss=classify,
        batch_size=8,
    ),
    Model(
        name="vit",
        build=lambda dropout: ViT(dropout=dropout),
        batch=partial(random_batch, (3, 64, 64)),
        batch_size=16,
    ),
    Model(
        name="gpt",
        build=lambda dropout: Transformer(causal=True, dropout=dropout),
        batch=partial(random_tokens, 128),
        loss=predict_tokens,
        batch_size=8,
    ),
    Model(
        name="bert",
        build=lambda dropout: Transformer(causal=False, dropout=dropout),
        batch=partial(random_tokens, 128),
        loss=predict_tokens,
        batch_size=8,
    ),
    Model(
        name="lstm",
        build=lambda dropout: LSTM(dropout=dropout),
        batch=partial(random_batch, (64, 64)),
        batch_size=64,
    ),
)


def variants(model: Model) -> Iterator[tuple[str, Job, Settings]]:
    """Every way in which a model is trained, by name."""
    plain, whole = model.job(0.0), Settings(micro_batch_size=model.batch_size)
    yield "plain", plain, whole
    yield "dropout", model.job(0.1), whole
    units = find_units(capture_step(plain, whole, find_device("cpu")))
    recomputed = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in units)
    yield "recompute", plain, replace(whole, units=recomputed)
    yield "recompute, dropout", model.job(0.1), replace(whole, units=recomputed)
    for steps in (2, 4):
        split = replace(whole, micro_batch_size=model.batch_size // steps, gradient_accumulation_steps=steps)
        yield f"{steps} micro-batches", plain, split


def compare(job: Job, settings: Settings) -> dict[str, Any]:
    """One row: predicted, measured, and what explains their difference."""
    trace = capture_step(job, settings, find_device("cpu"))
    prediction = predict_memory(trace)
    measurement = measure_step(job, settings, steps=1)
    predicted, measured = prediction.peak_allocated_bytes, measurement.measured_peak_allocated_bytes
    temporaries = measurement.temporaries_at_peak
    named = sum(temporary.size_bytes for temporary in temporaries)
    return {
        "predicted_peak_allocated_bytes": predicted,
        "measured_peak_allocated_bytes": measured,
        "error_fraction": (predicted - measured) / measured,
        "temporaries_at_peak": [
            {"op": temporary.op, "size_bytes": temporary.size_bytes} for temporary in temporaries
        ],
        "unexplained_bytes": max(0, measured - named - predicted) + max(0, predicted - measured),
        "predicted_peak_op": prediction.peak_op,
        "predicted_peak_phase": str(prediction.peak_phase),
        "uncertain_ops": list(trace.uncertain_ops),
    }


def explanation(row: dict[str, Any]) -> str:
    """What inside an op makes the difference, where there is one to speak of."""
    if abs(row["error_fraction"]) <= NAMED_ABOVE_FRACTION:
        return ""
    named = ", ".join(
        f"{each['op']} {format_bytes(each['size_bytes'])}" for each in row["temporaries_at_peak"][:2]
    )
    unexplained = row["unexplained_bytes"]
    if row["error_fraction"] > 0 and row["uncertain_ops"]:
        return "; ".join(row["uncertain_ops"])
    return named + (f" (unexplained: {format_bytes(unexplained)})" if unexplained else "")


def main() -> None:
    start = time.perf_counter()
    rows = []
    print(
        f"{'model':<8} {'variant':<20} {'predicted':>11} {'measured':>11} {'error':>8}  inside ops, if over 1 %"
    )
    for model in MODELS:
        for variant, job, settings in variants(model):
            row = {"model": model.name, "variant": variant, **compare(job, settings)}
            rows.append(row)
            predicted, measured = row["predicted_peak_allocated_bytes"], row["measured_peak_allocated_bytes"]
            print(
                f"{model.name:<8} {variant:<20} {format_bytes(predicted):>11} {format_bytes(measured):>11} "
                f"{row['error_fraction']:>8.2%}  {explanation(row)}",
                flush=True,
            )
    errors = [abs(row["error_fraction"]) for row in rows]
    summary = {
        "rows": len(rows),
        "rows_equal_to_the_byte": sum(error == 0 for error in errors),
        "rows_within_1_percent": sum(error <= NAMED_ABOVE_FRACTION for error in errors),
        "largest_error_fraction": max(errors),
    }
    print(summary)
    seconds = round(time.perf_counter() - start, 1)
    content = {"seconds": seconds, "summary": summary, "rows": rows}
    keep("cpu_truth.json", "python benchmarks/cpu_truth.py", content)


if __name__ == "__main__":
    sys.exit(main())
