"""Compiled steps on this CPU: predicted beside measured peak, blocks or whole, and what compilation changes.

    python benchmarks/compiled.py
    python benchmarks/compiled.py bert gpt2

Small models with random weights, in fp32 with AdamW. Each is predicted eagerly, with its units compiled and
with the whole model compiled, and each step is then compiled by Inductor and run. Kernels are compiled without
optimization, which takes as much memory and less time; times are not looked at.
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import brimful as bf
from machine import Rows

SAMPLES = 8
MODES = ("none", "units", "model")
ATTENTION = {"attn_implementation": "sdpa", "use_cache": False}


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm around a skip connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = (
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.second, self.second_norm = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.skip = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W)"""
        inner = F.relu(self.first_norm(self.first(images)))
        return F.relu(self.second_norm(self.second(inner)) + self.skip(images))


class ResNet(nn.Module):
    """Three stages of two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = (width, width, 2 * width, 2 * width, 4 * width, 4 * width)
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(before, after, 1 + (before != after))
                for before, after in zip((width, *widths), widths, strict=False)
            )
        )
        self.head = nn.Linear(4 * width, 100)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 100)"""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ConvNextBlock(nn.Module):
    """A depthwise convolution and an inverted bottleneck."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W)"""
        inner = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        return images + self.down(F.gelu(self.up(inner))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """One stage."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(ConvNextBlock(width) for _ in range(4)))
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 100)"""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class DoubleConv(nn.Module):
    """Two convolutions with GroupNorm and SiLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, width, 3, 1, 1), nn.GroupNorm(8, width)
        self.second, self.second_norm = nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(8, width)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W)"""
        return F.silu(self.second_norm(self.second(F.silu(self.first_norm(self.first(images))))))


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [DoubleConv(3, width), DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([DoubleConv(6 * width, 2 * width), DoubleConv(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W)"""
        top = self.down[0](images)
        middle = self.down[1](F.max_pool2d(top, 2))
        bottom = self.down[2](F.max_pool2d(middle, 2))
        middle = self.up[0](torch.cat([middle, F.interpolate(bottom, scale_factor=2.0)], 1))
        return self.out(self.up[1](torch.cat([top, F.interpolate(middle, scale_factor=2.0)], 1)))


def _language_model(make: Callable[[], nn.Module], tokens: int, vocabulary: int = 2000) -> bf.Job:
    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.randint(vocabulary, (samples, tokens))
        return {"input_ids": ids, "labels": ids}

    return bf.Job(model=make, loss=lambda model, batch: model(**batch).loss, batch=batch)


def _bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        attn_implementation="sdpa",
    )
    return hf.BertForMaskedLM(config)


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=2000, n_embd=256, n_layer=4, n_head=4, n_positions=256, **ATTENTION)
    return hf.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **ATTENTION,
    )
    return hf.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=2000,
        d_model=256,
        d_ff=1024,
        d_kv=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit() -> bf.Job:
    def model() -> nn.Module:
        config = hf.ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=112,
            patch_size=8,
            num_labels=10,
            attn_implementation="sdpa",
        )
        return hf.ViTForImageClassification(config)

    return bf.Job(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch=lambda n: {"pixel_values": torch.randn(n, 3, 112, 112), "labels": torch.randint(10, (n,))},
    )


def _classifier(make: Callable[[], nn.Module], size: int) -> bf.Job:
    return bf.Job(
        model=make,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch=lambda n: (torch.randn(n, 3, size, size), torch.randint(100, (n,))),
    )


def _unet() -> bf.Job:
    return bf.Job(
        model=UNet,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batch=lambda n: (torch.randn(n, 3, 96, 96), torch.randn(n, 3, 96, 96)),
    )


JOBS: dict[str, Callable[[], bf.Job]] = {
    "bert": lambda: _language_model(_bert, 128),
    "gpt2": lambda: _language_model(_gpt2, 128),
    "llama": lambda: _language_model(_llama, 128),
    "t5": lambda: _language_model(_t5, 128),
    "vit": _vit,
    "resnet": lambda: _classifier(ResNet, 64),
    "convnext": lambda: _classifier(ConvNext, 128),
    "unet": _unet,
}


def compare(name: str, mode: str) -> dict[str, Any]:
    """One model in one mode: its peak on this CPU, predicted and measured."""
    job, row = JOBS[name](), {"model": name, "compile": mode}
    predicted = bf.estimate(job, "cpu", micro_batch_size=SAMPLES, compile=mode)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        measured = bf.measure(job, predicted.settings, "cpu")
    peak, real = predicted.predicted_peak_allocated_bytes, measured.measured_peak_allocated_bytes
    eager = [note for note in predicted.uncertain_ops if "runs eagerly" in note]
    return row | {
        "predicted_peak_allocated_bytes": peak,
        "measured_peak_allocated_bytes": real,
        "error_fraction": peak / real - 1,
        "units": len(predicted.settings.units),
        "predicted_to_run_eagerly": eager,
        "ran_eagerly": [str(each.message) for each in warned if "runs eagerly" in str(each.message)],
    }


def main(names: list[str]) -> None:
    """Measure and keep rows, until it is interrupted."""
    os.environ["TORCHINDUCTOR_DEBUG_COMPILE"] = "1"
    rows = Rows("compiled.json", " ".join(("python benchmarks/compiled.py", *names)), "transformers")
    try:
        for name in names or JOBS:
            for mode in MODES:
                if not rows.has(model=name, compile=mode):
                    rows.add(compare(name, mode))
                    print(name, mode, f"{rows.rows[-1]['error_fraction']:+.4%}", flush=True)
    except KeyboardInterrupt:
        print("stopped; what is measured is kept")
    asked = [row for row in rows.rows if row["compile"] != "none"]
    compiled = [abs(row["error_fraction"]) for row in asked if not row["ran_eagerly"]]
    eager = {
        row["model"]: row["measured_peak_allocated_bytes"] for row in rows.rows if row["compile"] == "none"
    }
    changes = {
        f"{row['model']} {row['compile']}": row["measured_peak_allocated_bytes"] / eager[row["model"]] - 1
        for row in asked
    }
    summary = {
        "compiled_rows": len(compiled),
        "median_error_fraction": statistics.median(compiled),
        "largest_error_fraction": max(compiled),
        "measured_change_fraction": changes,
    }
    print(summary)
    rows.keep({"samples": SAMPLES, "summary": summary})


if __name__ == "__main__":
    main(sys.argv[1:])
