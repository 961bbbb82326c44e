"""The tables of GPU times in docs/, for `tables.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

SOURCES = {
    "vision": "training steps of vision models in two layouts, RTX 3090",
    "forward": "forward passes of vision models, RTX 4090, RTX 5090, RTX PRO 6000",
    "ops": "single blocks, A100, H100, B200, RTX 3090, RTX 4090",
    "llm": "steps of language models under FSDP, 8 A100 or 8 H100",
    "gpus": "steps of ResNet-50, BERT and Transformer-XL, six GPUs",
}
"""What each source of measurements has."""

Load = Callable[[str], dict[str, Any]]


def gpu_time_lines(load: Load, stamp: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Errors of families that were held out, by source, and how often intervals have the measured time."""
    fit = load("times_fit")
    covered = fit["coverage_of_90_percent_intervals"]
    yield f"*{fit['steps']} steps that others measured. {stamp(fit)}*"
    yield ""
    yield "| what | steps | median error | 90 % within | rank correlation | in its 90 % interval |"
    yield "|---|--:|--:|--:|--:|--:|"
    for source, about in SOURCES.items():
        found = fit["by_source"][source]
        yield (
            f"| {about} | {found['rows']} | {found['median_error']:.1%} | {found['p90_error']:.0%} "
            f"| {found['rank_correlation']:.3f} | {covered[source]:.0%} |"
        )
    ratios = fit["ratios_of_gpus"]
    yield (
        f"| ratio of two of the six GPUs on one model | {ratios['pairs']} | {ratios['median_error']:.1%} "
        f"| {ratios['p90_error']:.0%} | – | – |"
    )
    yield (
        f"| time between two layouts of one model | {fit['pairs_of_layouts']} | – | – | – "
        f"| {covered['differences_of_layouts']:.0%} |"
    )


def gpu_peer_lines(load: Load) -> Iterator[str]:
    """brimful beside FLOPs and bytes at peak rates, and beside torch's estimator; the product's tables."""
    yield "| what | steps | brimful | FLOPs and bytes at peak rates | torch's `RuntimeEstimator` |"
    yield "|---|--:|--:|--:|--:|"
    vision, forward, ops = load("times_vision"), load("times_forward"), load("times_ops")
    llm, gpus, torch = load("times_llm"), load("times_gpus"), load("times_torch_estimator")
    rows = {
        "training steps of vision models": (vision["summary"], vision["plain_roofline"], None),
        "a sample of these": (torch["brimful"], torch["plain_roofline"], torch["torch_runtime_estimator"]),
        "forward passes of vision models": (forward["summary"], forward["plain_roofline"], None),
        "single blocks": (ops["speed"], ops["speed"]["plain_roofline"], None),
        "language models, 8 to 512 GPUs": (llm["summary"], llm["plain_roofline"]["all"], None),
        "ResNet-50, BERT, Transformer-XL, one GPU": (*_beside(gpus["one_gpu"]), None),
        "ratio of two GPUs on one of these": (*_beside(gpus["ratios_of_one_gpu"]), None),
    }
    for what, (ours, *theirs) in rows.items():
        count = ours.get("rows") or ours["pairs"]
        cells = " | ".join(f"{each['median_error']:.1%}" if each else "–" for each in (ours, *theirs))
        yield f"| {what} | {count} | {cells} |"


def _beside(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return found["brimful"], found["plain_roofline"]


def gpu_class_lines(load: Load) -> Iterator[str]:
    """The factors of kernel classes, most time first."""
    factors = load("times_fit")["factors"]
    yield "| class of kernels | steps | bytes, × least | FLOPs, × a large product's | in other folds |"
    yield "|---|--:|--:|--:|---|"
    for name, row in sorted(factors.items(), key=lambda each: -each[1]["share_of_time"]):
        is_computing = row["slowdown"] != 1.0
        folds = row["slowdowns_of_folds" if is_computing else "passes_of_folds"]
        slowdown = f"{row['slowdown']:.2f}" if is_computing else "–"
        yield f"| `{name}` | {row['rows']} | {row['passes']:.2f} | {slowdown} | {folds[0]} to {folds[-1]} |"


def gpu_fraction_lines(load: Load) -> Iterator[str]:
    """What GPUs reach of their peaks."""
    yield "| GPU | steps | memory bandwidth | fp16, bf16 | TF32 | fused attention | held out, median error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    fit = load("times_fit")
    for gpu, row in fit["fractions"].items():
        cells = " | ".join(f"{row[name]:.2f}" if name in row else "–" for name in FRACTIONS)
        held_out = fit["gpus_held_out"][gpu]["median_error"]
        yield f"| {gpu} | {row['steps']} | {cells} | {held_out:.0%} |"


FRACTIONS = ("bandwidth", "half", "tf32", "attention")


def batch_verdict_lines(load: Load, stamp: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Which batch fits an RTX 3090."""
    result = load("times_memory")
    yield f"*{stamp(result)}*"
    yield ""
    yield "| predicted memory | right verdicts | of | batches that ran | batches that failed |"
    yield "|---|--:|--:|--:|--:|"
    for name in ("surviving", "reserved", "own_step_then"):
        found, about = result["summary"][name], result["statistics"][name]
        ran = f"{found['fits_right']} of {found['fits']}"
        failed = f"{found['does_not_fit_right']} of {found['does_not_fit']}"
        yield f"| {about} | {found['right']} | {found['verdicts']} | {ran} | {failed} |"
