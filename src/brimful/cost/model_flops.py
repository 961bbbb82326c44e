"""FLOPs of a training step, without recomputation."""

from __future__ import annotations

from brimful.trace import Phase, Trace

_FUSED_ATTENTION_BACKWARD_SHARE = 4 / 5
"""Of its five products: one makes the scores again, which is recomputing, though the kernel does it."""


def model_flops(trace: Trace) -> int:
    """Floating-point operations of forward and backward over the global batch, as MFU counts them.

    Those of matmuls, convolutions and attention, two per multiply-add; attention as if no mask left anything
    out. What is recomputed and the optimizer do not count.

    Args:
        trace: Its last captured micro-batch stands for all that were not captured.

    Returns:
        Operations in one optimizer step, of this rank.

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
