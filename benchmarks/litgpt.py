"""Predicted memory and time against LitGPT's published table of LoRA and adapter fine-tuning on an A100 40GB.

    python benchmarks/litgpt.py PATH/lora.csv PATH/litgpt

The model's code runs as it was then: PATH/litgpt is a checkout of Lightning-AI/litgpt at commit 8641822
(October 2023), which the table names. Neither the checkout nor the table is part of this project. Needs
lightning and bitsandbytes. The scripts `finetune/lora.py` and `finetune/adapter.py` print
`torch.cuda.max_memory_allocated() / 1e9`, so predicted allocated bytes are compared, in GB of 10**9 bytes.

What is predicted follows their code and that of the libraries of that time:

- The first micro-batch has the longest sample, to which the others are padded. It sets the peak, before there
  are gradients or optimizer state; so a first step is captured.
- Parameters are bfloat16. The cosines and sines of positions are float32: they are computed again after
  Lightning has cast the model.
- Lightning converts the outputs of the model to float32. The loop keeps them until the next forward has ended.
- The last layer and the cross entropy work on chunks of 128 positions.
- An evaluation before training fills the adapters' cache of keys and values, which training then uses.
- Lightning's plugin quantises float16 copies of all linear layers, the last one too. bitsandbytes 0.41.1
  dequantises to float16 and then to bfloat16, and keeps the inputs of these layers with the graph.

Variants show other code: bitsandbytes of today, and norms in float32, as LitGPT has them since 24 October 2023
(pull request 606), after the table's date and before it was published.

Times are those of a micro-batch of mean length, without the evaluation before training. Nothing is fitted to
the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.cost import StepTime, step_seconds
from brimful.devices import find_device
from brimful.prediction import Estimate, estimate_trace
from brimful.trace import Phase, Trace
from machine import keep

DEVICE = "A100-SXM4-40GB"
GB = 10**9
MINUTE_SECONDS = 60
ITERATIONS = 1000
CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of the table's models."""

    name: str
    """LitGPT's."""
    longest_tokens: int
    """The longest sample of Alpaca with its tokenizer, as the table's page gives it."""


MODELS = {
    "phi-1.5": Model(name="phi-1_5", longest_tokens=1044),
    "stablelm-base-alpha-3b": Model(name="stablelm-base-alpha-3b", longest_tokens=1034),
    "llama-2-7b": Model(name="Llama-2-7b-hf", longest_tokens=1304),
    "falcon-40b": Model(name="falcon-40b", longest_tokens=1079),
}
MEAN_TOKENS = {1: 124, 2: 154, 4: 186}
"""Mean length of the longest of so many random samples, to which a micro-batch is padded. Read from the
histogram of Alpaca with Llama's tokenizer (tutorials/images/prepare_dataset/alpaca.jpg), with a median of 110.
Lengths with other tokenizers are not published; the same are taken."""

BUSY_OP_SECONDS = 41e-6
"""For a diagnosis of times, not for predictions: per op of forward and backward, what the adapter with bfloat16
weights takes by its published time. It makes no tensors of lists."""
LIST_ELEMENTS = 8192
"""Of the list that is timed."""

GLOBAL_BATCH = {"lora": 128, "adapter": 64}
"""Samples per optimizer step, in the scripts."""
LORA = {"r": 8, "alpha": 16, "dropout": 0.05, "to_query": True, "to_value": True}
OPTIMIZERS = {"lora": {"lr": 3e-4, "weight_decay": 0.01}, "adapter": {"lr": 3e-3, "weight_decay": 0.02}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Which code runs."""

    has_old_products: bool = True
    """Whether products with 4-bit weights are those of bitsandbytes 0.41.1, or today's."""
    has_float32_norms: bool = False
    """Whether RMSNorm computes in float32."""


VARIANTS = {
    "bitsandbytes of today": Code(has_old_products=False),
    "norms in float32": Code(has_float32_norms=True),
}


class _Product0411(torch.autograd.Function):
    """A product with 4-bit weights as bitsandbytes 0.41.1 computed it.

    Inputs and weights are attributes of the node, which live as long as the graph, not until its backward.

    Source: bitsandbytes 0.41.1, autograd/_functions.py, `MatMul4Bit`.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.kept, ctx.state = (inputs, weight), weight.quant_state
        return nn.functional.linear(inputs, _dequantised(weight, weight.quant_state, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ _dequantised(ctx.kept[1], ctx.state, gradient.dtype), None, None


def _dequantised(weight: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """In the type that was quantised, then in the one to multiply in."""
    from bitsandbytes.functional import dequantize_4bit

    dequantised: Tensor = dequantize_4bit(weight, state)
    return dequantised.to(dtype)


def _product_0411(layer: Any, inputs: Tensor) -> Tensor:
    result: Tensor = _Product0411.apply(inputs, layer.weight, layer.bias)
    return result


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(row: dict[str, str], tokens: int, code: Code) -> nn.Module:
    """The row's model as the script makes it, for samples of up to `tokens` tokens."""
    quantised = _quantisation(row)
    if quantised is None:
        layers: Any = nullcontext()
    else:
        from lightning.fabric.plugins import BitsandbytesPrecision

        layers = BitsandbytesPrecision(quantised, torch.bfloat16).module_init_context()
    with _default_dtype(torch.bfloat16), layers:
        model = _plain(row)
    model.max_seq_length = tokens
    for layer in [*model.modules()]:
        if quantised is not None and hasattr(layer, "compute_dtype"):
            layer.weight.data = layer.weight.data.half()  # where there is a GPU, the plugin does
            if code.has_old_products:
                _override(layer, _product_0411)
        if code.has_float32_norms and type(layer).__name__ == "RMSNorm":
            _override(layer, _in_float32)
    return model


def _plain(row: dict[str, str]) -> Any:
    from lit_gpt import adapter, lora

    name = MODELS[row["model"]].name
    model: Any
    if row["method"] == "lora":
        model = lora.GPT(lora.Config.from_name(name, **LORA))
        lora.mark_only_lora_as_trainable(model)
        return model
    model = adapter.GPT(adapter.Config.from_name(name))
    adapter.mark_only_adapter_as_trainable(model)
    _fill_adapter_caches(model)
    return model


def _override(layer: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Give one layer another forward, which is handed the layer and its inputs."""
    layer.__class__ = type(type(layer).__name__, (type(layer),), {"forward": forward})


def _in_float32(norm: Any, inputs: Tensor) -> Tensor:
    result: Tensor = super(type(norm), norm).forward(inputs.float())
    return result.to(inputs.dtype)


def _quantisation(row: dict[str, str]) -> str | None:
    """Lightning's name for it: nf4, nf4-dq, or None."""
    return None if row["quantization"] == "None" else row["quantization"].removeprefix("bnb.")


def _fill_adapter_caches(model: Any) -> None:
    """What an evaluation leaves: keys and values of the adapters' prompts, without gradients."""
    config = model.config
    shape = (1, config.n_head, config.adapter_prompt_length, config.head_size)
    for block in model.transformer.h[config.adapter_start_layer :]:
        block.attn.adapter_kv_cache = (torch.zeros(shape), torch.zeros(shape))


def job_of(row: dict[str, str], tokens: int, code: Code = Code()) -> bf.Job:
    """The row's training on samples that are all padded to `tokens` tokens."""
    from lit_gpt.utils import chunked_cross_entropy

    def batch(count: int) -> dict[str, Tensor]:
        texts = torch.randint(0, 1000, (count, tokens))
        return {"input_ids": texts, "labels": texts.clone()}

    held: dict[str, Any] = {}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        chunks = model(batch["input_ids"], lm_head_chunk_size=CHUNK_TOKENS)
        logits = held["logits"] = [chunk.float() for chunk in chunks]
        del chunks
        logits[-1] = logits[-1][..., :-1, :]
        result: Tensor = chunked_cross_entropy(logits, batch["labels"][..., 1:])
        return result

    return bf.Job(
        model=lambda: build(row, tokens, code),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZERS[row["method"]]),
        name=f"{row['model']} {row['method']}",
    )


def captured(row: dict[str, str], tokens: int, code: Code = Code()) -> Trace:
    """The first optimizer step, on one micro-batch."""
    settings = bf.Settings(micro_batch_size=int(row["micro_batch_size"]))
    return capture_step(job_of(row, tokens, code), settings, find_device(DEVICE), steps=1)


def variants_of(row: dict[str, str]) -> Iterator[tuple[str, Code]]:
    """What else the row is predicted with."""
    if _quantisation(row) is not None:
        yield "bitsandbytes of today", VARIANTS["bitsandbytes of today"]
    if row["model"].startswith("llama"):
        yield "norms in float32", VARIANTS["norms in float32"]


def compare(row: dict[str, str], list_element_seconds: float) -> dict[str, Any]:
    """One row: memory and time, predicted and published."""
    start = time.perf_counter()
    longest, size = MODELS[row["model"]].longest_tokens, int(row["micro_batch_size"])
    ran_out = row["max_memory_gb"] == "OOM"
    published = None if ran_out else float(row["max_memory_gb"])
    estimate = estimate_trace(captured(row, longest), find_device(DEVICE))
    found = {
        "model": row["model"],
        "method": row["method"],
        "quantization": row["quantization"],
        "micro_batch_size": size,
        "trainable_parameters": _trainable_parameters(row),
        "published_trainable_parameters": int(row["trainable_parameters"]),
        "longest_tokens": longest,
        "published_gb": published,
        **_memory(estimate, published),
        "predicted_verdict": str(estimate.verdict),
        "verdict_agrees": (str(estimate.verdict) == "does not fit") is ran_out,
        "variants": {
            name: _memory(estimate_trace(captured(row, longest, code), find_device(DEVICE)), published)
            for name, code in variants_of(row)
        },
    }
    minutes = None if ran_out else float(row["minutes_per_1000_iterations"])
    times = _time(row, size, minutes, list_element_seconds)
    return found | times | {"seconds": round(time.perf_counter() - start, 1)}


def _memory(estimate: Estimate, published: float | None) -> dict[str, Any]:
    predicted = estimate.predicted_peak_allocated_bytes / GB
    return {
        "predicted_gb": round(predicted, 3),
        "predicted_reserved_gb": round(estimate.predicted_peak_reserved_bytes / GB, 3),
        "error_fraction": None if published is None else predicted / published - 1,
    }


def _time(
    row: dict[str, str], size: int, published: float | None, list_element_seconds: float
) -> dict[str, Any]:
    """1000 micro-batches of mean length, with their share of the optimizer's time.

    `diagnosed_minutes` is with a slower host, and the time in which it makes tensors of lists.
    """
    trace, device = captured(row, MEAN_TOKENS[size]), find_device(DEVICE)
    step = step_seconds(trace, device)
    share = size / GLOBAL_BATCH[row["method"]]
    minutes = _minutes(step, share)
    more_seconds = BUSY_OP_SECONDS - device.launch_seconds
    dispatch = replace(device.dispatch, forward_seconds=more_seconds, backward_seconds=more_seconds)
    elements = _list_elements(row)
    diagnosed = _minutes(step_seconds(trace, replace(device, dispatch=dispatch)), share)
    diagnosed += ITERATIONS * elements * list_element_seconds / MINUTE_SECONDS
    ops = sum(op.phase in (Phase.FORWARD, Phase.BACKWARD) for op in trace.ops)
    seconds = None if published is None else published * MINUTE_SECONDS / ITERATIONS
    return {
        "mean_tokens": MEAN_TOKENS[size],
        "published_minutes": published,
        "predicted_minutes": round(minutes, 3),
        "time_error_fraction": None if published is None else minutes / published - 1,
        "ops_per_iteration": ops,
        "list_elements_per_iteration": elements,
        "diagnosed_minutes": round(diagnosed, 3),
        "diagnosed_error_fraction": None if published is None else diagnosed / published - 1,
        "published_seconds_per_op": None if seconds is None else seconds / ops,
        "predicted_host_fraction": dict(step.kernel_seconds).get("host", 0.0) / step.total_seconds,
    }


def _minutes(step: StepTime, share: float) -> float:
    iteration = step.forward_seconds + step.backward_seconds + share * step.optimizer_seconds
    return ITERATIONS * iteration / MINUTE_SECONDS


def _list_elements(row: dict[str, str]) -> int:
    """Indices that LoRA's layers hold in lists, of which each forward makes tensors."""
    with torch.device("meta"):
        model = _plain(row)
    return sum(len(getattr(layer, "lora_ind", ())) for layer in model.modules())


def measured_list_element_seconds() -> float:
    """Time per element of a tensor that is made of a list, on this CPU."""
    indices, taken = [*range(LIST_ELEMENTS)], []
    for _ in range(200):
        start = time.perf_counter()
        torch.tensor(indices)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / LIST_ELEMENTS


def _trainable_parameters(row: dict[str, str]) -> int:
    with torch.device("meta"):
        model = _plain(row)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest errors; the verdicts that agree with what was published."""
    return {
        "memory": _errors([row["error_fraction"] for row in rows]),
        "time": _errors([row["time_error_fraction"] for row in rows]),
        "diagnosed_time": _errors([row["diagnosed_error_fraction"] for row in rows]),
        "rows": len(rows),
        "verdicts_that_agree": sum(row["verdict_agrees"] for row in rows),
        "out_of_memory": sum(row["published_gb"] is None for row in rows),
        "memory_of_variants": {
            name: _errors([row["variants"][name]["error_fraction"] for row in rows if name in row["variants"]])
            for name in VARIANTS
        },
    }


def _errors(errors: list[float | None]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors if error is not None]
    return {
        "rows": len(sizes),
        "median_error_fraction": statistics.median(sizes),
        "largest_error_fraction": max(sizes),
    }


def line_of(row: dict[str, Any]) -> str:
    """A row for reading."""
    name = f"{row['model']} {row['method']} {row['quantization']} × {row['micro_batch_size']}"
    if row["published_gb"] is None:
        return f"{name:<46}    OOM {row['predicted_gb']:>6.2f} GB  {row['predicted_verdict']}"
    others = "".join(f"  {name} {found['error_fraction']:+.1%}" for name, found in row["variants"].items())
    return (
        f"{name:<46} {row['published_gb']:>6.2f} {row['predicted_gb']:>6.2f} GB {row['error_fraction']:+.1%}"
        f"  {row['published_minutes']:.2f} {row['predicted_minutes']:.2f} min {row['time_error_fraction']:+.0%}"
        f" (diagnosed {row['diagnosed_error_fraction']:+.0%}; {row['ops_per_iteration']} ops,"
        f" {row['published_seconds_per_op'] * 1e6:.0f} µs each){others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="the CSV file of published rows")
    parser.add_argument("litgpt", type=Path, help="a checkout of Lightning-AI/litgpt at commit 8641822")
    parser.add_argument("--only", help="rows whose model contains this; writes no results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(options.litgpt))
    start = time.perf_counter()
    rows = []
    with options.table.open(encoding="utf-8") as file:
        published = [row for row in csv.DictReader(file) if not options.only or options.only in row["model"]]
    list_element_seconds = measured_list_element_seconds()
    for row in published:
        rows.append(compare(row, list_element_seconds))
        print(line_of(rows[-1]), flush=True)
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if not options.only:
        seconds = round(time.perf_counter() - start, 1)
        keep(
            "litgpt.json",
            "python benchmarks/litgpt.py PATH/lora.csv PATH/litgpt",
            {
                "seconds": seconds,
                "device": DEVICE,
                "busy_op_seconds": BUSY_OP_SECONDS,
                "list_element_seconds": list_element_seconds,
                "summary": summary,
                "rows": rows,
            },
            "lightning",
            "bitsandbytes",
        )


if __name__ == "__main__":
    main()
