"""Predicted memory of models by name, against what three public tables say that training them took.

    python benchmarks/published_names.py

The rows were chosen before any was predicted: those on one GPU whose model is known by that name, with no
kernels of the table's own, that state micro-batch, sequence, weights, optimizer and adapters. Of
universal-llm-trainer they are those on its A100; of LitGPT the LoRA ones without quantisation, and TinyLlama's
full fine-tuning.
Nothing but the name and the options of `brimful estimate` is given, so what a table's program does otherwise is
an error here; `DIFFERS` says what. A second prediction, which counts in no summary of names, changes the job to
do as that program does, so far as its source says it (`_as_published`). Weights and data are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import brimful as bf
from machine import keep

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure and the options that it is predicted with."""

    table: str
    name: str
    device: str
    published_bytes: int | None
    """None: out of memory."""
    micro_batch_size: int
    sequence_length: int
    lora: str | None = None
    quantize: str | None = None
    precision: str = "fp32"
    recompute: str = "none"
    gradient_accumulation_steps: int = 1
    prepared: bool = False
    """By peft's `prepare_model_for_kbit_training`, which TRL calls: what is not quantised is float32."""


SOURCES = {
    "fms-acceleration": "https://github.com/foundation-model-stack/fms-acceleration/blob/"
    "876e2ed6fc4e966785e3f4315f5ee3cdf8e3d097/scripts/benchmarks/refs/a100_80gb.csv",
    "universal-llm-trainer": "https://github.com/ljm565/universal-llm-trainer/blob/"
    "aefdc4a4982c8e9e186d4169aa5b902db1067a52/docs/gpu_test.md",
    "LitGPT": "https://github.com/Lightning-AI/litgpt/blob/"
    "03ffc5515b251fb7e3a461efd0e3c163e45b6b3b/config_hub/finetune/README.md",
}
QUANTITIES = {"fms-acceleration": "allocated", "universal-llm-trainer": "reserved", "LitGPT": "allocated"}
"""The peak that a table has: `torch.cuda.max_memory_allocated`, or what the allocator reserved."""
DIFFERS = {
    "fms-acceleration": (
        "torch 2.4.1, transformers 4.48.1, peft 0.13.2; every sequence packed to 4096 tokens, as tokens and "
        "samples a second say",
        "the loss of transformers 4.48 copies the shifted float32 logits; that of today shifts the labels",
        "two rows are prepared by peft for training in 4 bits, which makes norms, embeddings, output layer and "
        "all that they return float32; no option of brimful does",
        "flash-attn's kernel; predicted with torch's flash kernel",
    ),
    "universal-llm-trainer": (
        "torch 2.5.1, transformers 4.49",
        "read as reserved GB: the program prints memory_reserved() / 1e9, and the table's sizes of the models "
        "are their bytes / 1e9; the table says GiB, which is the variant",
        "its own cross entropy, of logits that stay bfloat16; Transformers' loss makes them float32",
        "models in 4 bits are loaded with float32 for what is not quantised, as their published sizes say too",
        "32 gradient accumulation steps of LoRA are predicted as 2, with which the peak is the same",
    ),
    "LitGPT": (
        "LitGPT's own model code: queries, keys and values in one layer, output layer and loss in chunks of "
        "128 tokens; predicted is the model of Transformers",
        "its adapters are bfloat16; peft makes them and what they save float32",
        "no sample is longer than the 512 tokens of the table, whether one is as long is not published",
    ),
}

_ATTENTION = "q_proj+k_proj+v_proj+o_proj"
_LINEAR = f"{_ATTENTION}+gate_proj+up_proj+down_proj"


def fms_acceleration() -> Iterator[Row]:
    """Mistral on an A100 80GB with Transformers' Trainer and gradient checkpointing; bytes of the CSV."""
    row = partial(
        Row,
        table="fms-acceleration",
        name="mistralai/Mistral-7B-v0.1",
        device="A100 80GB SXM",
        sequence_length=4096,
        recompute="all",
    )
    lora = f"r=16,alpha=16,dropout=0.1,targets={_ATTENTION}"
    quantised = partial(row, lora=lora, quantize="nf4-dq", precision="bf16")
    for samples, full, adapted, plain, upcast in (
        (4, 72434837504, 26704571904, 16373838336, 20669338112),
        (8, 72435230720, 38742912512, 28412178944, 37002646016),
    ):
        yield row(published_bytes=full, micro_batch_size=samples)
        yield row(published_bytes=adapted, micro_batch_size=samples, lora=lora)
        yield quantised(published_bytes=plain, micro_batch_size=samples)
        yield quantised(published_bytes=upcast, micro_batch_size=samples, prepared=True)


def universal_llm_trainer() -> Iterator[Row]:
    """Two samples of 8192 tokens on an A100, with gradient checkpointing.

    Llama 2 and Phi-3-mini are trained beyond the positions of their configuration, which no name permits.
    """
    row = partial(
        Row,
        table="universal-llm-trainer",
        device="A100 80GB SXM",
        micro_batch_size=2,
        sequence_length=8192,
        recompute="all",
    )
    adapted = partial(row, lora=f"r=8,alpha=16,dropout=0.05,targets={_LINEAR}", gradient_accumulation_steps=2)
    quantised = partial(adapted, quantize="nf4-dq")
    yield row(name="meta-llama/Llama-3.1-8B", published_bytes=78 * GB)
    yield adapted(name="meta-llama/Llama-3.1-8B", published_bytes=36 * GB)
    yield quantised(name="meta-llama/Llama-3.1-8B", published_bytes=48 * GB)
    yield adapted(name="google/gemma-2-9b", published_bytes=60 * GB)
    yield quantised(name="google/gemma-2-9b", published_bytes=None)
    yield adapted(name="google/gemma-7b", published_bytes=51 * GB)
    yield quantised(name="google/gemma-7b", published_bytes=70 * GB)


def litgpt() -> Iterator[Row]:
    """LoRA and one full fine-tuning on an A10G: bfloat16, AdamW, no checkpointing; by its config hub."""
    row = partial(Row, table="LitGPT", device="A10G", sequence_length=512, gradient_accumulation_steps=2)
    pair = "r=32,alpha=16,dropout=0.05,targets=q_proj+v_proj"
    tiny = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
    linear = f"{_LINEAR}+lm_head"
    for name, published, samples, lora in (
        ("tiiuae/falcon-7b", 16.69, 1, "r=32,alpha=16,dropout=0.05,targets=query_key_value"),
        ("google/gemma-2b", 12.62, 2, f"r=8,alpha=16,dropout=0.1,targets={linear}"),
        ("google/gemma-7b", None, 1, f"r=16,alpha=16,dropout=0.1,targets={linear}"),
        ("google/gemma-2-9b", None, 1, f"r=16,alpha=16,dropout=0.1,targets={linear}"),
        ("meta-llama/Llama-2-7b-hf", 19.77, 2, pair),
        ("meta-llama/Llama-3.1-8B", 19.73, 1, pair),
        ("mistralai/Mistral-7B-v0.1", 20.66, 2, pair),
        (
            "microsoft/phi-2",
            13.98,
            4,
            "r=8,alpha=16,dropout=0.05,targets=q_proj+k_proj+v_proj+dense+fc1+fc2+lm_head",
        ),
        (
            "microsoft/Phi-3-mini-4k-instruct",
            19.75,
            4,
            "r=8,alpha=16,dropout=0.05,targets=qkv_proj+o_proj+gate_up_proj+down_proj+lm_head",
        ),
        (tiny, 13.5, 8, f"r=32,alpha=16,dropout=0.05,targets={linear}"),
        (tiny, 14.1, 4, None),
    ):
        yield row(
            name=name,
            published_bytes=None if published is None else round(published * GB),
            micro_batch_size=samples,
            lora=lora,
        )


def compare(row: Row) -> dict[str, Any]:
    """One published figure beside its prediction by name, and beside that of what the table's program does."""
    start = time.perf_counter()
    job = bf.find_architecture(
        row.name, sequence_length=row.sequence_length, dtype="bf16", lora=row.lora, quantize=row.quantize
    )
    found, as_published = _estimated(row, job), _estimated(row, _as_published(row, job))
    quantity = QUANTITIES[row.table]
    predicted: int = getattr(found, f"predicted_peak_{quantity}_bytes")
    otherwise: int = getattr(as_published, f"predicted_peak_{quantity}_bytes")
    published = row.published_bytes
    in_gib = None if published is None or quantity == "allocated" else published / GB * 2**30
    return asdict(row) | {
        "quantity": quantity,
        "predicted_bytes": predicted,
        "error_fraction": None if published is None else predicted / published - 1,
        "error_fraction_if_gib": None if in_gib is None else predicted / in_gib - 1,
        "predicted_verdict": str(found.verdict),
        "verdict_agrees": (str(found.verdict) == "does not fit") is (published is None),
        "breakdown_bytes": {str(category): held for category, held in found.breakdown},
        "as_published": {
            "predicted_bytes": otherwise,
            "error_fraction": None if published is None else otherwise / published - 1,
            "predicted_verdict": str(as_published.verdict),
        },
        "seconds": round(time.perf_counter() - start, 1),
    }


def _estimated(row: Row, job: bf.Job) -> bf.api.Estimate:
    return bf.estimate(
        job,
        row.device,
        micro_batch_size=row.micro_batch_size,
        gradient_accumulation_steps=row.gradient_accumulation_steps,
        precision=row.precision,
        optimizer="adamw",
        recompute=row.recompute,
        suggest=False,
    )


def _as_published(row: Row, job: bf.Job) -> bf.Job:
    """The job with what the source of the table's program says it does otherwise."""
    if row.table == "LitGPT":
        return replace(job, model=lambda: _built(job).to(torch.bfloat16))
    if row.table == "universal-llm-trainer":
        in_float32, upcasts = row.quantize is not None, False
    else:
        in_float32, upcasts = row.prepared, True
    made = replace(job, model=lambda: _in_float32(_built(job))) if in_float32 else job
    return replace(made, loss=partial(_loss_of_shifted_logits, is_float=upcasts))


def _built(job: bf.Job) -> Any:
    assert callable(job.model)
    return job.model()


def _in_float32(model: Any) -> Any:
    """What is not quantised in float32, as peft prepares it, and as universal-llm-trainer loads it.

    Source: peft/utils/other.py, prepare_model_for_kbit_training (0.13.2); src/models/llama3.py, `dtype`.
    """
    for parameter in model.parameters():
        if parameter.dtype is torch.bfloat16:
            parameter.data = parameter.data.to(torch.float32)
    return model


def _loss_of_shifted_logits(model: Any, batch: Any, *, is_float: bool) -> torch.Tensor:
    """Next-token loss of copied logits.

    Source: transformers/loss/loss_utils.py, ForCausalLMLoss (4.48); without float32: src/models/llama3.py of
    universal-llm-trainer.
    """
    logits = model(input_ids=batch["input_ids"]).logits
    upcast = logits.float() if is_float else logits  # both have a name there, so both live until the end
    shifted = upcast[:, :-1].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), batch["labels"][:, 1:].flatten())


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of some rows."""
    errors = [abs(row["error_fraction"]) for row in rows if row["error_fraction"] is not None]
    as_published = [abs(row["as_published"]["error_fraction"]) for row in rows if row["published_bytes"]]
    return {
        "rows": len(rows),
        "names": len({row["name"] for row in rows}),
        "figures": len(errors),
        "median_error_fraction": statistics.median(errors),
        "largest_error_fraction": max(errors),
        "within_5_percent": sum(error <= 0.05 for error in errors),
        "verdicts_that_agree": sum(row["verdict_agrees"] for row in rows),
        "median_error_fraction_as_published": statistics.median(as_published),
        "largest_error_fraction_as_published": max(as_published),
    }


def line_of(row: dict[str, Any]) -> str:
    """A row for reading."""
    name = f"{row['table']} {row['name'].rpartition('/')[2]}"
    options = f"{row['micro_batch_size']} × {row['sequence_length']} {row['quantize'] or ''}"
    options += " LoRA" if row["lora"] else " full"
    published, error = row["published_bytes"], row["error_fraction"]
    figures = (
        f"{'OOM' if published is None else f'{published / GB:.2f}':>6} {row['predicted_bytes'] / GB:>6.2f}"
    )
    verdict = row["predicted_verdict"] if error is None else f"{error:+.1%}"
    otherwise = row["as_published"]["error_fraction"]
    as_published = row["as_published"]["predicted_verdict"] if otherwise is None else f"{otherwise:+.1%}"
    return f"{name:<60} {options:<24} {figures} {verdict:>12} {as_published:>12} {row['seconds']:>5.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="rows whose table or name contains this; writes no results")
    only: str | None = parser.parse_args().only
    rows = []
    for row in (*fms_acceleration(), *universal_llm_trainer(), *litgpt()):
        if only is None or only in f"{row.table} {row.name}":
            rows.append(compare(row))
            print(line_of(rows[-1]), flush=True)
    tables = dict.fromkeys(row["table"] for row in rows)
    summary = {table: summarise([row for row in rows if row["table"] == table]) for table in tables}
    summary["all"] = summarise(rows)
    print(summary)
    if only is None:
        content = {"sources": SOURCES, "differs": DIFFERS, "summary": summary, "rows": rows}
        keep(
            "published_names.json",
            "python benchmarks/published_names.py",
            content,
            *("transformers", "peft", "bitsandbytes"),
        )


if __name__ == "__main__":
    main()
