"""Studies of several GPUs, and of models that outgrow one."""

from __future__ import annotations

from functools import partial
from typing import Any

from brimful.prediction import Estimate
from brimful.settings import ChunkedLoss, Parallelism, Settings
from brimful.studies.jobs import (
    NORMED,
    experts_job,
    gathered_logits_job,
    small_gpt_job,
    text_job,
)
from brimful.studies.study import Case, Figure, Ranks, Study
from brimful.studies.text import SINGLE_GPU, SMALL_BATCH
from brimful.trace import Category

_LARGE_BATCHES = '"Training on large batches", 2019'


def distributed() -> Study:
    """One process per GPU."""
    small = NORMED
    return Study(
        name="distributed",
        title="BERT-base, 128 tokens, 32 samples on each GPU: one process per GPU",
        source=_LARGE_BATCHES,
        device="V100 16GB SXM2",
        cases=tuple(
            Case(
                label=f"{count} GPUs" if count > 1 else "1 GPU",
                job=partial(text_job, "bert-base", sequence_length=128),
                options={"settings": Settings(micro_batch_size=32, world_size=count)},
                small_job=small if count < 4 else None,
                small_options={"micro_batch_size": SMALL_BATCH // count},
                small_ranks=None if count == 1 else Ranks(count=count, parallelism=Parallelism.DDP),
            )
            for count in (1, 2, 4, 8)
        ),
        epochs=4,
        conclusion=(
            "One process per GPU with DDP: the loss and the accuracy are those of one GPU with the whole "
            "batch; give each GPU enough samples that averaging gradients hides behind the backward pass."
        ),
        notes=(
            "The article trains MNIST over gloo and publishes no times. At the small scale two processes share "
            "the batch of 32 and the CPU.",
        ),
    )


def balanced_loss() -> Study:
    """The loss of DataParallel."""
    rows: tuple[tuple[str, int, Any], ...] = (
        ("GPU 0 of 4 under DataParallel, batch 32", 3, None),
        ("each of 4 GPUs, its own loss, batch 8", 0, None),
        ("the same, the loss in 8 chunks", 0, ChunkedLoss(layer="cls.predictions.decoder", chunks=8)),
    )
    return Study(
        name="balanced-loss",
        title="BERT-base as a language model, 512 tokens, vocabulary 21128: where the logits are",
        source=_LARGE_BATCHES,
        device="RTX 2080 Ti",
        cases=tuple(
            Case(
                label=label,
                job=partial(gathered_logits_job, gathered),
                options={"settings": Settings(micro_batch_size=8, chunked_loss=chunked)},
                figures=(
                    Figure(
                        name="logits of 32 samples",
                        unit="bytes",
                        of=_gathered_logits_bytes,
                        published=1.44e9,
                    ),
                )
                if gathered
                else (),
                small_job=None if gathered else small_gpt_job,
                small_options={
                    "settings": Settings(
                        micro_batch_size=SMALL_BATCH,
                        chunked_loss=None if chunked is None else ChunkedLoss(layer="lm_head", chunks=8),
                    )
                },
            )
            for label, gathered, chunked in rows
        ),
        epochs=2,
        conclusion=(
            "Do not gather outputs on one GPU: compute the loss where the logits are, as DDP does, and in "
            "chunks where the vocabulary is large; both give the same gradients."
        ),
        notes=("The article computes the size of the logits: 1.44 GB, twice with their gradient.",),
    )


def _gathered_logits_bytes(predicted: Estimate) -> float:
    """The largest tensor of the step."""
    return max(held.held_bytes for held in predicted.largest)


def zero() -> Study:
    """Sharding of model state."""
    rows: tuple[tuple[str, Parallelism, float | None], ...] = (
        ("DDP", Parallelism.DDP, 16.0),
        ("ZeRO-1", Parallelism.ZERO1, 8 + 8 / 8),
        ("ZeRO-2", Parallelism.ZERO2, 4 + 12 / 8),
        ("ZeRO-3", Parallelism.ZERO3, 16 / 8),
        ("FSDP2", Parallelism.FSDP2, None),
    )
    return Study(
        name="zero",
        title="GPT-2 XL, 512 tokens, 1 sample on each of 8 GPUs, AdamW: what each rank holds",
        source='"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models": arXiv 1910.02054',
        device="V100 32GB SXM2",
        cases=tuple(
            Case(
                label=label,
                job=partial(text_job, "gpt2-xl"),
                options={
                    "settings": Settings(micro_batch_size=1, world_size=8, parallelism=parallelism),
                },
                figures=(
                    Figure(
                        name="model state at the peak",
                        unit="bytes per parameter",
                        of=_state_bytes,
                        published=published,
                    ),
                ),
                small_job=NORMED if parallelism in (Parallelism.DDP, Parallelism.FSDP2) else None,
                small_options={"micro_batch_size": SMALL_BATCH // 2},
                small_ranks=Ranks(count=2, parallelism=parallelism),
            )
            for label, parallelism, published in rows
        ),
        epochs=4,
        conclusion=(
            "Shard only what does not fit: ZeRO-1 costs no more communication than DDP, sharded parameters "
            "half as much again; the loss is the same under all of them."
        ),
        notes=(
            "The published figures are the paper's formulas, of 4 bytes each for weights and gradients and 8 "
            "for the state of AdamW in fp32, over 8 GPUs. At the small scale two processes share the CPU.",
        ),
    )


def _state_bytes(predicted: Estimate) -> float:
    held = dict(predicted.breakdown)
    state = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    return sum(held[category] for category in state) / predicted.parameter_count


def moe() -> Study:
    """Mixtures of experts."""
    rows = (
        ("dense", 1, 1, False),
        ("8 experts, 1 for each token", 8, 1, False),
        ("8 experts, 2 for each token", 8, 2, False),
        ("dense, weights in bf16", 1, 1, True),
        ("8 experts, 1 for each, weights in bf16", 8, 1, True),
    )
    return Study(
        name="moe",
        title="A decoder of 12 layers of width 1024, 1024 tokens: dense and with experts",
        source=SINGLE_GPU,
        device="A100 80GB SXM",
        cases=tuple(
            Case(
                label=label,
                job=partial(experts_job, experts, per_token, is_bf16=is_bf16),
                options={"micro_batch_size": 4, "precision": "fp32" if is_bf16 else "bf16"},
                figures=(
                    Figure(
                        name="parameters", unit="million", of=lambda predicted: predicted.parameter_count / 1e6
                    ),
                ),
                small_job=None if is_bf16 else partial(experts_job, experts, per_token, is_small=True),
                small_options={"micro_batch_size": SMALL_BATCH},
            )
            for label, experts, per_token, is_bf16 in rows
        ),
        epochs=2,
        conclusion=(
            "Experts buy parameters with memory: 16 bytes each with AdamW, whether a token uses them or not; "
            "load their weights in bf16: autocast does not cast torch's grouped product, which runs in fp32."
        ),
        notes=("The guide has no figures of its own. Rows are in bf16 autocast where their weights are fp32.",),
    )


MULTI_GPU = (distributed, balanced_loss, zero, moe)
