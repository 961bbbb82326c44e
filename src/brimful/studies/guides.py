"""The studies: each row is options of `brimful.estimate`, and what an article published of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from brimful.errors import UnknownNameError
from brimful.results import Published
from brimful.studies.jobs import (
    deep_mlp,
    deep_mlp_job,
    digits_job,
    group_norm,
    normed_mlp,
    small_vgg,
    text_job,
    topics_job,
    vgg16_job,
)
from brimful.studies.study import Case, Study
from brimful.utils.quantities import GIB, MIB

SMALL_BATCH = 32
"""Samples per optimizer step at the small scale."""


def find_study(name: str) -> Study:
    """The study of a name; UnknownNameError has those that there are."""
    if name not in STUDIES:
        raise UnknownNameError("study", name, STUDIES)
    return STUDIES[name]


def _small(options: Mapping[str, Any], batch: int = 4) -> dict[str, Any]:
    """The options at the small scale: micro-batches enlarged in proportion, bf16 where a GPU has fp16."""
    small = {**options, "micro_batch_size": options["micro_batch_size"] * SMALL_BATCH // batch}
    return small | ({"precision": "bf16"} if options.get("precision") == "fp16" else {})


def _bert_large() -> Study:
    rows: tuple[tuple[str, dict[str, Any], int, float], ...] = (
        ("batch 4", {"micro_batch_size": 4}, 14949, 8.86),
        ("1 × 4 accumulation", {"micro_batch_size": 1}, 8681, 7.75),
        ("1 × 4, checkpointing", {"micro_batch_size": 1, "recompute": "all"}, 6775, 5.99),
        ("batch 4, fp16", {"micro_batch_size": 4, "precision": "fp16"}, 13939, 18.64),
        (
            "1 × 4, checkpointing, fp16",
            {"micro_batch_size": 1, "recompute": "all", "precision": "fp16"},
            7275,
            10.09,
        ),
        ("batch 4, Adafactor", {"micro_batch_size": 4, "optimizer": "adafactor"}, 12295, 7.96),
        (
            "1 × 4, checkpointing, fp16, Adafactor",
            {"micro_batch_size": 1, "recompute": "all", "precision": "fp16", "optimizer": "adafactor"},
            *(4847, 9.06),
        ),
        ("batch 4, 8-bit Adam", {"micro_batch_size": 4, "optimizer": "adamw8bit"}, 13085, 9.15),
        (
            "1 × 4, checkpointing, fp16, 8-bit Adam",
            {"micro_batch_size": 1, "recompute": "all", "precision": "fp16", "optimizer": "adamw8bit"},
            *(5363, 10.35),
        ),
    )
    cases = []
    for label, given, mib, speed in rows:
        options = given | {"gradient_accumulation_steps": 4 // given["micro_batch_size"]}
        is_small = options.get("optimizer") != "adamw8bit"  # bitsandbytes' is for GPUs
        cases.append(
            Case(
                label=label,
                job=partial(text_job, "bert-large"),
                options=options,
                published=Published(peak_device_bytes=mib * MIB, samples_per_second=speed),
                small_job=topics_job if is_small else None,
                small_options=_small(options),
            )
        )
    return Study(
        name="bert-large",
        title="BERT-large, 512 tokens, 4 samples a step, one technique after another",
        source="Efficient Training on a Single GPU, Transformers 4.25",
        device="V100 16GB SXM2",
        cases=tuple(cases),
        epochs=4,
        conclusion=(
            "Take half precision first: published, it alone doubles the speed. Accumulate and checkpoint until "
            "the batch fits, and change the optimizer last."
        ),
        notes=(
            "The article's torch of 2022 kept gradients as zeros between steps and had no fused attention; "
            "predictions are for today's. benchmarks/published.py predicts the loops of that time.",
            "Rows in fp16 run in bf16 at the small scale, on the CPU.",
        ),
    )


def _xlm_r() -> Study:
    rows: tuple[tuple[str, str, dict[str, Any], float | None, float | None], ...] = (
        ("base, batch 8", "base", {"micro_batch_size": 8}, 12.28, 70),
        ("base, batch 8, fp16", "base", {"micro_batch_size": 8, "precision": "fp16"}, 10.95, 50),
        ("base, batch 16, fp16", "base", {"micro_batch_size": 16, "precision": "fp16"}, 16.96, 40),
        ("large, batch 8", "large", {"micro_batch_size": 8}, None, None),
        ("large, batch 8, fp16", "large", {"micro_batch_size": 8, "precision": "fp16"}, 23.5, 100),
        (
            "large, batch 8, fp16, checkpointing",
            "large",
            {"micro_batch_size": 8, "precision": "fp16", "recompute": "all"},
            *(11.8, 110),
        ),
    )
    cases = tuple(
        Case(
            label=label,
            job=partial(text_job, f"xlm-roberta-{size}"),
            options=options,
            published=Published(
                peak_device_bytes=None if gib is None else int(gib * GIB),
                is_out_of_memory=gib is None,
                relative_speed=None if minutes is None else 70 / minutes,
            ),
            small_job=partial(topics_job, 2 if size == "base" else 4),
            small_options=_small(options, batch=8),
        )
        for label, size, options, gib, minutes in rows
    )
    return Study(
        name="xlm-r",
        title="XLM-RoBERTa base and large, text classification",
        source="Training large models with your GPU, 2021",
        device="Quadro RTX 6000",
        cases=cases,
        epochs=4,
        conclusion=(
            "Take half precision first: published, it makes the base model 1.4 times faster and leaves room "
            "for twice the batch. Checkpoint only what does not fit then."
        ),
        notes=(
            "The sequence length is not published: 512.",
            "In the article the large model ran out of memory in fp32. Its torch kept gradients as zeros "
            "between steps and had no fused attention; predictions are for today's.",
            "Rows in fp16 run in bf16 at the small scale, on the CPU.",
        ),
    )


def _vgg16() -> Study:
    options = {"micro_batch_size": 64}
    rows = (("whole", 0, 14222, 1.0), ("checkpoint_sequential, 2 segments", 2, 10550, 300 / 405))
    return Study(
        name="vgg16",
        title="VGG16, two classes, 64 images of 224 × 224 pixels",
        source="Training Larger Models on GPU with Gradient Checkpointing, 2022",
        device="P100 16GB PCIe",
        cases=tuple(
            Case(
                label=label,
                job=partial(vgg16_job, segments),
                options=options,
                published=Published(peak_device_bytes=mib * MIB, relative_speed=speed, accuracy=0.79),
                small_job=partial(digits_job, partial(small_vgg, segments)),
                small_options={"micro_batch_size": 4 * SMALL_BATCH},
            )
            for label, segments, mib, speed in rows
        ),
        epochs=8,
        conclusion=(
            "Checkpointing loses no accuracy: what it computes again is the same, dropout included. Two "
            "segments save little of VGG16, whose first layers hold most: look at the memory first."
        ),
        notes=(
            "The GPU is not published: a P100 of 16 GB, as Kaggle lent then. cuDNN's workspaces, which torch "
            "did not limit then, are not known either.",
            "The article's accuracy is of its own images.",
        ),
    )


def _batch_norm() -> Study:
    published = {
        "BatchNorm, 32": 0.7385,
        "BatchNorm, 16 × 2": 0.7325,
        "BatchNorm, 16": 0.7319,
    }
    rows = (
        ("BatchNorm, 32", nn.BatchNorm1d, 32, 1),
        ("BatchNorm, 16 × 2", nn.BatchNorm1d, 16, 2),
        ("BatchNorm, 2 × 16", nn.BatchNorm1d, 2, 16),
        ("BatchNorm, 16", nn.BatchNorm1d, 16, 1),
        ("GroupNorm, 32", group_norm, 32, 1),
        ("GroupNorm, 16 × 2", group_norm, 16, 2),
        ("GroupNorm, 2 × 16", group_norm, 2, 16),
    )
    return Study(
        name="batch-norm",
        title="Gradient accumulation under BatchNorm and under GroupNorm",
        source="Efficient GPU utilization (mmcv's figures: ResNet-34)",
        device="T4",
        cases=tuple(
            Case(
                label=label,
                published=Published(accuracy=published.get(label)),
                small_job=partial(digits_job, partial(normed_mlp, norm)),
                small_options={"micro_batch_size": size, "gradient_accumulation_steps": steps},
            )
            for label, norm, size, steps in rows
        ),
        epochs=4,
        conclusion=(
            "Accumulate freely under GroupNorm or LayerNorm: the steps are those of the whole batch. Under "
            "BatchNorm each micro-batch has its own statistics, so keep it large, or let a plan keep the batch "
            "whole."
        ),
        notes=("The article's accuracies are of a ResNet-34; here, three layers and digits.",),
    )


def _deep_mlp() -> Study:
    segments = (0, 2, 8, 32, 1000)
    return Study(
        name="deep-mlp",
        title="A Sequential of 1000 layers in any number of segments",
        source="Training on large batches, 2019",
        device="RTX 2080 Ti",
        cases=tuple(
            Case(
                label=f"{count} segments" if count else "whole",
                job=partial(deep_mlp_job, 1000, 256, count),
                options={"micro_batch_size": 4096},
                small_job=partial(digits_job, partial(deep_mlp, 1000, 32, count)),
                small_options={"micro_batch_size": 128},
            )
            for count in segments
        ),
        epochs=3,
        conclusion=(
            "About the square root of the number of layers takes least: fewer segments hold more at once, more "
            "of them keep more inputs. Up to dozens of segments the time is that of one more forward."
        ),
    )


STUDIES: Mapping[str, Study] = {
    study.name: study for study in (_bert_large(), _xlm_r(), _vgg16(), _batch_norm(), _deep_mlp())
}
"""The studies by name."""
