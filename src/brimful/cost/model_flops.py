"""FLOPs of a training step, without recomputation."""

from __future__ import annotations

from brimful.trace import Phase, Trace

_FUSED_ATTENTION_BACKWARD_SHARE = 4 / 5
"""Share of its FLOPs that count: of five products one makes the scores again, which is recomputing, though the
kernel does it."""


def model_flops(trace: Trace) -> int:
    """Floating-point operations of forward and backward in one optimizer step of this rank, as MFU counts them.

    Matmuls, convolutions and attention count, with two operations per multiply-add, and attention as if it had
    no mask. What is recomputed and the optimizer do not count. The last captured micro-batch stands for all
    that were not captured.

    Source: A. Chowdhery et al., PaLM (arXiv 2204.02311), appendix B.
    """
    last_step, last_micro_batch = trace.captured_steps - 1, trace.captured_micro_batches - 1
    repeats = trace.settings.gradient_accumulation_steps - last_micro_batch
    flops = 0.0
    for op in trace.ops:
        if op.step != last_step or op.recomputed or op.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        times = repeats if op.micro_batch == last_micro_batch else 1
        share = _FUSED_ATTENTION_BACKWARD_SHARE if _is_fused_attention_backward(op.name) else 1
        flops += op.flops * times * share
    return round(flops)


def _is_fused_attention_backward(name: str) -> bool:
    return name.startswith("aten._scaled_dot_product_") and "_backward" in name
