"""Studies of convolutional and other small networks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from brimful.devices import find_device
from brimful.models import find_architecture
from brimful.results import Published
from brimful.studies.jobs import (
    NORMED,
    convolutions,
    deep_mlp,
    deep_mlp_job,
    digits_job,
    from_recipe,
    group_norm,
    loaded_digits_job,
    normed_mlp,
    small_vgg,
    text_job,
    topics_job,
    vgg16_job,
)
from brimful.studies.published_loops import (
    layers_in_two,
    sales_recipe,
    tweets_recipe,
    unet_recipe,
    vgg_recipe,
    whole,
)
from brimful.studies.study import Case, Study
from brimful.studies.text import FP16_NOTE, SINGLE_GPU, SMALL_BATCH, on_cpu
from brimful.utils.quantities import MIB

CONVOLUTIONS = partial(digits_job, convolutions, learning_rate=3e-3)
_MMCV = '"Efficient GPU utilization", with figures of mmcv'


def vgg16() -> Study:
    """Checkpointing in segments."""
    options = {"micro_batch_size": 64}
    rows = (
        ("whole", 0, whole, 14222, 1.0),
        ("checkpoint_sequential, 2 segments", 2, layers_in_two, 10550, 300 / 405),
    )
    return Study(
        name="vgg16",
        title="VGG16, two classes, 64 images of 224 × 224 pixels",
        source='"Training Larger Models on GPU with Gradient Checkpointing", 2022',
        device="P100 16GB PCIe",
        find_published_device=partial(find_device, torch_version="1.10"),
        cases=tuple(
            Case(
                label=label,
                job=partial(vgg16_job, segments),
                options=options,
                as_published=vgg_recipe(run),
                loop_batch=64,
                published=Published(peak_device_bytes=mib * MIB, relative_speed=speed, accuracy=0.79),
                small_job=partial(digits_job, partial(small_vgg, segments)),
                small_options={"micro_batch_size": 4 * SMALL_BATCH},
            )
            for label, segments, run, mib, speed in rows
        ),
        epochs=8,
        conclusion=(
            "Checkpointing loses no accuracy: what it computes again is the same, dropout included; two "
            "segments save little of VGG16, whose first layers hold most: look at the memory first."
        ),
        notes=(
            "The GPU is not published: a P100 of 16 GB, as Kaggle lent then. cuDNN's workspaces, which torch "
            "did not limit then, are not known either: likely the gigabytes that are missing.",
            "The article's accuracy is of its own images.",
        ),
    )


def amp() -> Study:
    """Automatic mixed precision of a tiny, a medium and a large network."""
    return Study(
        name="amp",
        title="fp16 autocast of a tiny feed-forward network, a U-Net and BERT-base",
        source=(
            '"Mixed Precision", 2020: '
            "https://github.com/ResidentMario/pytorch-training-performance-guide/blob/main/book/mixed-precision.md"
        ),
        device="V100 16GB SXM2",
        find_published_device=partial(find_device, torch_version="1.6"),
        cases=tuple(_amp_cases()),
        epochs=3,
        conclusion=(
            "Turn mixed precision on wherever matrix products and convolutions take the time; a network of a "
            "few small layers gains nothing, because launching its kernels takes longer than running them."
        ),
        notes=(
            "Models, batches and loops are those of the article's public code; the memory is taken as the "
            "device's, GB as 10⁹ bytes. cuDNN's workspaces, which torch did not limit then, are not known.",
            "Published times include preparing data in the training process. The U-Net's code maps each pixel "
            "of the labels by a Python function there, so its times say little of the GPU.",
            FP16_NOTE,
        ),
    )


def _amp_cases() -> Iterator[Case]:
    seconds: dict[tuple[str, str], tuple[float, float, float, float]] = {
        ("feed-forward", "V100"): (610, 655, 1.19, 1.19),
        ("feed-forward", "T4"): (523, 519, 0.932, 0.936),
        ("U-Net", "V100"): (505, 478, 4.33, 3.71),
        ("U-Net", "T4"): (787, 554, 4.26, 2.67),
        ("BERT", "V100"): (1058, 490, 9.62, 8.76),
        ("BERT", "T4"): (3317, 1227, 9.35, 8.49),
    }
    small: dict[str, Any] = {
        "feed-forward": NORMED,
        "U-Net": CONVOLUTIONS,
        "BERT": topics_job,
    }
    recipes: dict[str, tuple[Any, int]] = {
        "feed-forward": (sales_recipe, 512),
        "U-Net": (unet_recipe, 8),
        "BERT": (tweets_recipe, 64),
    }
    for (model, gpu), (off, on, off_gb, on_gb) in seconds.items():
        make_recipe, batch = recipes[model]
        for precision, time, gb in (("fp32", off, off_gb), ("fp16", on, on_gb)):
            yield Case(
                label=f"{model}, {precision} ({gpu})",
                group=f"{model} {gpu}",
                device="T4" if gpu == "T4" else None,
                job=partial(text_job, "bert-base", sequence_length=128)
                if model == "BERT"
                else partial(from_recipe, make_recipe(), "adam"),
                options={"micro_batch_size": batch, "precision": precision},
                as_published=make_recipe(fp16=precision == "fp16"),
                loop_batch=batch,
                published=Published(peak_device_bytes=int(gb * 1e9), relative_speed=off / time),
                small_job=small[model] if gpu == "V100" else None,
                small_options=on_cpu({"micro_batch_size": SMALL_BATCH, "precision": precision}),
            )


def accumulation() -> Study:
    """The same batch in parts."""
    rows = (("32", 32, 1, 0.3770), ("16 × 2", 16, 2, 0.3770), ("16", 16, 1, 0.3660))
    return Study(
        name="accumulation",
        title="Gradient accumulation without BatchNorm: the same batch whole, in parts, and half of it",
        source=f"{_MMCV} (Faster R-CNN: batches of 2, 1 × 2 and 1)",
        device="T4",
        cases=tuple(
            Case(
                label=label,
                job=partial(text_job, "bert-base", sequence_length=128),
                options={"micro_batch_size": size, "gradient_accumulation_steps": steps},
                published=Published(accuracy=accuracy),
                small_job=NORMED,
                small_options={"micro_batch_size": size, "gradient_accumulation_steps": steps},
            )
            for label, size, steps, accuracy in rows
        ),
        epochs=4,
        conclusion=(
            "Without BatchNorm accumulation is the whole batch, at the memory of a part and a little more "
            "time; training with the part alone is another training: its learning rate has to be chosen again."
        ),
        notes=("The published column is Faster R-CNN's mean average precision, in batches of two images.",),
    )


def batch_norm() -> Study:
    """Accumulation under BatchNorm and GroupNorm."""
    published = {"BatchNorm, 32": 0.7385, "BatchNorm, 16 × 2": 0.7325, "BatchNorm, 16": 0.7319}
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
        source=f"{_MMCV} (ResNet-34)",
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
            "Accumulate freely under GroupNorm or LayerNorm: the steps are those of the whole batch; under "
            "BatchNorm each micro-batch has its own statistics, so keep it large, or let a plan keep the batch "
            "whole."
        ),
        notes=("The article's accuracies are of a ResNet-34; here, three layers and digits.",),
    )


def deep_mlp_study() -> Study:
    """Any number of segments."""
    return Study(
        name="deep-mlp",
        title="A Sequential of 1000 layers in any number of segments",
        source='"Training on large batches", 2019',
        device="RTX 2080 Ti",
        cases=tuple(
            Case(
                label=f"{count} segments" if count else "whole",
                job=partial(deep_mlp_job, 1000, 256, count),
                options={"micro_batch_size": 4096},
                small_job=partial(digits_job, partial(deep_mlp, 300, 32, min(count, 300))),
                small_options={"micro_batch_size": 128},
            )
            for count in (0, 2, 8, 32, 1000)
        ),
        epochs=3,
        conclusion=(
            "About the square root of the number of layers takes least: fewer segments hold more at once, more "
            "of them keep more inputs; up to dozens of segments the time is that of one more forward."
        ),
        notes=("At the small scale there are 300 layers.",),
    )


def memory_format() -> Study:
    """channels_last."""
    return Study(
        name="memory-format",
        title="ResNet-50, 64 images of 224 × 224 pixels: contiguous and channels_last",
        source=(
            '"Channels Last Memory Format in PyTorch": '
            "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
        ),
        device="A100 40GB SXM",
        cases=tuple(
            Case(
                label=f"{memory_format}, {precision}",
                group=precision,
                job=partial(find_architecture, "resnet50"),
                options={"micro_batch_size": 64, "precision": precision, "memory_format": memory_format},
                small_job=CONVOLUTIONS if precision != "tf32" else None,
                small_options={
                    "micro_batch_size": SMALL_BATCH,
                    "precision": precision,
                    "memory_format": memory_format,
                },
            )
            for precision in ("fp32", "tf32", "bf16")
            for memory_format in ("contiguous", "channels_last")
        ),
        epochs=3,
        conclusion=(
            "Take channels_last with half precision on GPUs with tensor cores: there it is what cuDNN's "
            "kernels want; in fp32, and on a CPU, leave the format as it is unless measured."
        ),
        notes=(
            "The tutorial reports 22 % for mixed precision on a V100, of another training script.",
            "The small accuracies are of one seed: another changes them by more than the format does.",
        ),
    )


def dataloader() -> Study:
    """Workers of a DataLoader."""
    return Study(
        name="dataloader",
        title="Workers of a DataLoader, beside what the GPU consumes",
        source=SINGLE_GPU,
        device="V100 16GB SXM2",
        cases=(
            Case(
                label="ResNet-50, fp16, batch 64",
                job=partial(find_architecture, "resnet50"),
                options={"micro_batch_size": 64, "precision": "fp16"},
            ),
            *(
                Case(
                    label=("in the training process", "1 worker", "2 workers")[workers],
                    small_job=partial(loaded_digits_job, workers, 2 * SMALL_BATCH),
                    small_options={"micro_batch_size": 2 * SMALL_BATCH},
                )
                for workers in (0, 1, 2)
            ),
        ),
        epochs=1,
        conclusion=(
            "Count samples per second on both sides: as many workers as it takes to prepare what the GPU "
            "consumes, and pinned memory so that copies overlap; more workers than that only take memory."
        ),
        notes=("The guide has no figures. At the small scale a sample's preparation takes some milliseconds.",),
    )


VISION = (vgg16, amp, accumulation, batch_norm, deep_mlp_study, memory_format, dataloader)
