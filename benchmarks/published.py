"""Predicted memory against what three articles published.

    python benchmarks/published.py

The articles tried one technique after another and noted the device's memory. Each row names what of its
software or setting is not known, or is known to differ. Where an article leaves something open, what is assumed
is chosen by reason, not by fit, and other readings follow as variants. Weights and data are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from brimful.capture import capture_step
from brimful.devices import CudaContext, Device, find_device, with_context
from brimful.job import Job
from brimful.prediction import Estimate, estimate_trace
from brimful.settings import Settings
from brimful.studies import published_loops as loops
from brimful.studies.published_loops import job_as_published, text_recipe, vgg_recipe
from brimful.utils.quantities import MIB
from machine import keep

STEPS = 3
"""Optimizer steps: in the first, gradients and optimizer state are made; the third is as the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One published figure and what it is predicted from."""

    table: str
    name: str
    variant: str = ""
    """Another reading of what the article leaves open; empty for the one that counts."""
    published_bytes: int | None
    """Device memory; None: out of memory."""
    published_least_bytes: int | None = None
    """The smaller reading, where the article's unit is open."""
    job: Job
    device: Device
    micro_batch_size: int
    differs: tuple[str, ...]
    why: str = ""
    """What explains the error, so far as it is known."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="rows whose table or name contains this; writes no results")
    options = parser.parse_args()
    start = time.perf_counter()
    rows = []
    for experiment in (*xlm_r(), *vgg16(), *bert_large()):
        if options.only and options.only not in f"{experiment.table} {experiment.name} {experiment.variant}":
            continue
        rows.append(compare(experiment))
        print(line_of(rows[-1]), flush=True)
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if not options.only:
        seconds = round(time.perf_counter() - start, 1)
        keep(
            "published.json",
            "python benchmarks/published.py",
            {"seconds": seconds, "summary": summary, "rows": rows},
            "transformers",
        )


def compare(experiment: Experiment) -> dict[str, Any]:
    """One published figure: predicted against it."""
    start = time.perf_counter()
    trace = capture_step(
        experiment.job,
        Settings(micro_batch_size=experiment.micro_batch_size),
        experiment.device,
        steps=STEPS,
    )
    estimate = estimate_trace(trace, experiment.device)
    predicted = estimate.predicted_peak_device_bytes
    published, least = experiment.published_bytes, experiment.published_least_bytes
    interval = estimate.predicted_device_interval_bytes
    return {
        "table": experiment.table,
        "name": experiment.name,
        "variant": experiment.variant,
        "device": experiment.device.name,
        "published_device_bytes": published,
        "published_device_mib": None if published is None else round(published / MIB),
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
        "predicted_peak_reserved_bytes": estimate.predicted_peak_reserved_bytes,
        "predicted_peak_device_bytes": predicted,
        "predicted_device_interval_bytes": interval,
        "error_fraction": None if published is None else predicted / published - 1,
        "error_fraction_of_smaller_reading": None if least is None else predicted / least - 1,
        "is_in_interval": _is_in(interval, published, least),
        "predicted_verdict": str(estimate.verdict),
        "verdict_agrees": (str(estimate.verdict) == "does not fit") is (published is None),
        "context_bytes": experiment.device.context_bytes,
        "context_source": experiment.device.context_source,
        "cache_flushes": estimate.cache_flushes,
        **_peak_of(estimate),
        "differs": experiment.differs,
        "why": experiment.why,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _is_in(interval: tuple[int, int], published: int | None, least: int | None) -> bool | None:
    """Whether any reading of the published figure lies in the interval."""
    if published is None:
        return None
    return interval[0] <= published and (published if least is None else least) <= interval[1]


def _peak_of(estimate: Estimate) -> dict[str, Any]:
    return {
        "peak_phase": str(estimate.peak_phase),
        "peak_module": estimate.peak_module,
        "peak_op": estimate.peak_op,
        "breakdown_bytes": {str(category): held_bytes for category, held_bytes in estimate.breakdown},
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest error by table, over the rows that are no variants."""
    summary = {}
    for table in dict.fromkeys(row["table"] for row in rows):
        of_table = [row for row in rows if row["table"] == table and not row["variant"]]
        errors = [abs(row["error_fraction"]) for row in of_table if row["error_fraction"] is not None]
        summary[table] = {
            "rows": len(of_table),
            "median_error_fraction": statistics.median(errors) if errors else None,
            "largest_error_fraction": max(errors, default=None),
            "in_interval": sum(bool(row["is_in_interval"]) for row in of_table),
            "verdicts_that_agree": sum(row["verdict_agrees"] for row in of_table),
        }
    return summary


def line_of(row: dict[str, Any]) -> str:
    """A row for reading."""
    published, error, interval = (
        row["published_device_mib"],
        row["error_fraction"],
        row["predicted_device_interval_bytes"],
    )
    ends = f"[{interval[0] / MIB:.0f} {interval[1] / MIB:.0f}]"
    name = f"    or: {row['variant']}" if row["variant"] else f"{row['table']} {row['name']}"
    return (
        f"{name:<58} {'OOM' if published is None else published:>6}"
        f" {row['predicted_peak_device_bytes'] / MIB:>6.0f} {'' if error is None else f'{error:+.1%}':>7}"
        f"  {ends:<15}  {row['predicted_verdict']:<12}  {row['seconds']:>5.1f} s"
    )


# A: "Training large models with your GPU", HP, spring 2021

_XLM_R_DIFFERS = (
    "sequence length not published: 512, the model's maximum; 256 is a variant",
    "optimizer not published: torch.optim.AdamW, as the article's samples are torch's own",
    "torch not published: 1.8, of that spring, whose CUDA context is taken from contexts.csv",
    "G read as GiB; nvidia-smi's MiB over 1000 would be 2.3 % less, the smaller reading",
    "every batch full; batches padded to their own longest text would fragment the cache further",
    "what else the workstation's display held on the GPU is not known and not in the prediction",
)
_XLM_R_WHY = (
    "at batch 8 the base model misses by 0.4 GiB in fp32 and 0.3 in fp16, which the unit, the context or a "
    "display would explain; the large model in fp16 by 1.1, in line with batch 4 in fp16 of E (0.5 GiB at half "
    "the samples); batch 16 by 1.7, more than that explains: not known. With 256 tokens every row would take "
    "far less, and the one that ran out of memory would fit"
)


def xlm_r() -> Iterator[Experiment]:
    """XLM-RoBERTa on one Quadro RTX 6000."""
    device = find_device("Quadro RTX 6000", torch_version="1.8")
    base: dict[str, Any] = {"name": "xlm-roberta-base", "tokens": 512, "optimizer": "torch AdamW"}
    half = base | {"fp16": True}
    large = base | {"name": "xlm-roberta-large"}
    cases: tuple[tuple[str, float | None, int, dict[str, Any]], ...] = (
        ("base, batch 8, fp32", 12.28, 8, base),
        ("base, batch 8, fp16", 10.95, 8, half),
        ("base, batch 16, fp16", 16.96, 16, half),
        ("large, batch 8, fp32", None, 8, large),
        ("large, batch 8, fp16", 23.5, 8, large | {"fp16": True}),
        ("large, batch 8, fp16, checkpointing", 11.8, 8, large | {"fp16": True, "checkpoints": True}),
    )
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        ("transformers' AdamW", {"optimizer": "transformers AdamW"}),
        ("256 tokens", {"tokens": 256}),
    )
    for name, published_g, samples, recipe in cases:
        for variant, changes in variants:
            yield Experiment(
                table="A XLM-R",
                name=name,
                variant=variant,
                published_bytes=None if published_g is None else int(published_g * 2**30),
                published_least_bytes=None if published_g is None else int(published_g * 1000 * MIB),
                job=job_as_published(text_recipe(**recipe | changes)),
                device=device,
                micro_batch_size=samples,
                differs=_XLM_R_DIFFERS,
                why=_XLM_R_WHY,
            )


# B: "Training Larger Models on GPU with Gradient Checkpointing", 2022

_VGG_DIFFERS = (
    "GPU not published: a P100 of 16 GB, as Kaggle lent then; its context is the default of contexts.csv, "
    "whose interval holds those of the T4 and V100 too",
    "torch not published: 1.10, of that winter",
    "cuDNN's kernels, their workspaces and torch.backends.cudnn.benchmark are not known",
    "torchvision's features (ReLU in place); the article's own may differ",
    "validation after each epoch is not in it; without no_grad it would hold what training holds",
)
_VGG_SEGMENTS_DIFFERS = (
    "what the segments are is not published: all layers as one Sequential, as in torch's documentation; "
    "features alone, and features against head, are variants",
    "the images require a gradient, without which reentrant checkpointing trains nothing in the first segment",
)
_VGG_WHY = (
    "likely cuDNN's workspaces: until 2.0, torch took the algorithm that cuDNN's heuristics put first, "
    "with whatever workspace it asked for; FFT and Winograd ones ask for gigabytes at 64 images. "
    "The likely size has none of it, the upper end one copy of a convolution's activations. What is certain "
    "(weights, gradients, momentum, saved tensors) is 5.8 GiB of the whole; the three choices of segments "
    "differ by 0.5 GiB"
)


def vgg16() -> Iterator[Experiment]:
    """VGG16 on some card of 16 GB."""
    cases: tuple[tuple[str, str, int, Any], ...] = (
        ("batch 64, whole", "", 14222, loops.whole),
        ("batch 64, checkpoint_sequential, 2 segments", "", 10550, loops.layers_in_two),
        ("batch 64, checkpoint_sequential, 2 segments", "features alone", 10550, loops.features_in_two),
        ("batch 64, checkpoint_sequential, 2 segments", "features against head", 10550, loops.parts_in_two),
    )
    for name, variant, published_mib, segments in cases:
        yield Experiment(
            table="B VGG16",
            name=name,
            variant=variant,
            published_bytes=published_mib * MIB,
            job=job_as_published(vgg_recipe(segments)),
            device=find_device("P100 16GB PCIe", torch_version="1.10"),
            micro_batch_size=64,
            differs=_VGG_DIFFERS + (() if segments is loops.whole else _VGG_SEGMENTS_DIFFERS),
            why=_VGG_WHY,
        )


# E: "Efficient Training on a Single GPU", documentation of transformers 4.25; its nvidia-smi is of 2022-01-11

_BERT_DIFFERS = (
    "torch 1.10 and transformers 4.15, of the date in the article's nvidia-smi; the loop is written anew",
    "the context is the 1343 MiB that the article measured, less torch's first segment; what cuBLAS adds to it "
    "at the first matmul is not known",
    "cuBLAS's workspace was its own then; the prediction has one of 8 MiB for each of two threads in the cache",
    "kernels of 1.10 other than softmax's are taken to save what those of today save",
)
_FP16_DIFFERS = (
    "fp16 is the Trainer's: autocast and a scaler, float32 weights; a first step that overflows is not in it "
    "(tried: 12 MiB more)",
)
_ADAM8BIT_DIFFERS = (
    "Adam8bit stands for bitsandbytes': every tensor of 4096 elements or more in 8 bits, the embeddings too, "
    "as the article's code reads; its note on embeddings would mean the variant",
)
_BERT_FP16_WHY = (
    "not known: 510 MiB, 21 a layer. It is not the allocator's order (ten orders of addresses: no difference; "
    "other orders of parameters, other optimizers: 80 MiB at most), nor a skipped first step. With "
    "checkpointing, where a layer's tensors come once and one sample at a time, fp16 fits to 10 MiB. So likely "
    "something that 1.10 saved per layer under autocast"
)
_SOFTMAX_WHY = (
    "torch 1.11 no longer saves softmax's input: 24 × 64 MiB (pytorch issue 49600, pull request 65242)"
)


def bert_large() -> Iterator[Experiment]:
    """BERT-large on one V100."""
    article = '1343 MiB after a tensor of one element in "Efficient Training on a Single GPU", less 2 of torch'
    context = CudaContext(
        context_bytes=1341 * MIB, low_bytes=1341 * MIB, high_bytes=1341 * MIB, source=article, is_measured=False
    )
    device = with_context(find_device("V100 16GB SXM2"), context)
    plain: dict[str, Any] = {"name": "bert-large", "tokens": 512, "max_gradient_norm": 1.0}
    accumulated = plain | {"accumulation": 4}
    checkpointed = accumulated | {"checkpoints": True}
    small = checkpointed | {"fp16": True}
    experiment = partial(Experiment, table="E BERT-large", device=device)

    def row(name: str, mib: int, recipe: dict[str, Any], *, variant: str = "", why: str = "") -> Experiment:
        return experiment(
            name=name,
            variant=variant,
            published_bytes=mib * MIB,
            job=job_as_published(text_recipe(**recipe)),
            micro_batch_size=4 // recipe.get("accumulation", 1),
            differs=_BERT_DIFFERS
            + (_FP16_DIFFERS if "fp16" in recipe else ())
            + (_ADAM8BIT_DIFFERS if "8-bit" in recipe.get("optimizer", "") else ()),
            why=why,
        )

    kept = "8-bit Adam, word embeddings in float32"
    everything = "1 × 4, checkpointing, fp16"
    yield row("batch 4, fp32", 14949, plain)
    newer = plain | {"torch_saves_softmax_input": False}
    yield row("batch 4, fp32", 14949, newer, variant="torch 1.11 or later", why=_SOFTMAX_WHY)
    yield row("1 × 4", 8681, accumulated)
    yield row("1 × 4, checkpointing", 6775, checkpointed)
    yield row("batch 4, fp16", 13939, plain | {"fp16": True}, why=_BERT_FP16_WHY)
    yield row(everything, 7275, small)
    yield row("batch 4, Adafactor", 12295, plain | {"optimizer": "Adafactor"})
    yield row(f"{everything}, Adafactor", 4847, small | {"optimizer": "Adafactor"})
    yield row("batch 4, 8-bit Adam", 13085, plain | {"optimizer": "8-bit Adam"})
    yield row("batch 4, 8-bit Adam", 13085, plain | {"optimizer": kept}, variant="embeddings in float32")
    yield row(f"{everything}, 8-bit Adam", 5363, small | {"optimizer": "8-bit Adam"})
    yield row(f"{everything}, 8-bit Adam", 5363, small | {"optimizer": kept}, variant="embeddings in float32")


if __name__ == "__main__":
    main()
