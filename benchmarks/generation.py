"""Predicted memory of text generation, against what `model.generate` of transformers takes on this CPU.

    python benchmarks/generation.py

Small models with random weights generate, greedily and with four beams, for two and for eight samples. No token
ends a sequence. The model is measured with transformers' own attention. Each case is run twice under the
profiler: for the peak of all of it, and for that of its last decoding step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import brimful as bf
from brimful.api import estimate_generation
from brimful.profiling.cpu_memory import CpuPeak, record_cpu_memory
from brimful.profiling.peak import peak_of_cpu
from brimful.profiling.residents import resident_storages
from machine import keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A generation."""

    name: str
    options: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    num_beams: int
    micro_batch_size: int


MODELS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("gpt2", {"num_hidden_layers": 3, "vocab_size": 5000}, 32, 128),
    ("llama-3.2-1b", {"num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 4000}, 64, 128),
    ("t5-small", {}, 64, 64),
)
"""Name, options, tokens of the prompt and new tokens. Llama's has a key for every four queries."""


def cases() -> Iterator[Case]:
    """All cases."""
    for name, options, prompt_tokens, new_tokens in MODELS:
        for num_beams in (1, 4):
            for samples in (2, 8):
                yield Case(
                    name=name,
                    options=options,
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                    num_beams=num_beams,
                    micro_batch_size=samples,
                )


def compare(case: Case) -> dict[str, Any]:
    """The predicted beside the measured peaks of a case."""
    job = bf.find_architecture(case.name, sequence_length=case.prompt_tokens, **case.options)
    predicted = estimate_generation(
        job,
        "cpu",
        new_tokens=case.new_tokens,
        num_beams=case.num_beams,
        micro_batch_size=case.micro_batch_size,
    )
    model: Any = job.model() if callable(job.model) else job.model
    model = model.eval()
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    assert callable(job.batch)
    ids = job.batch(case.micro_batch_size)["input_ids"]
    last = predicted.phases[-1]
    pairs = {
        "peak": (predicted.predicted_peak_allocated_bytes, measured(model, ids, case, from_forward=0)),
        "last_step": (
            last.predicted_peak_allocated_bytes,
            measured(model, ids, case, from_forward=case.new_tokens - 1),
        ),
    }
    row: dict[str, Any] = asdict(case) | {
        "peak_phase": str(predicted.peak_phase),
        "weights_bytes": predicted.weights_bytes,
        "cache_bytes": predicted.cache_bytes,
        "cache_bytes_per_token": predicted.cache_bytes_per_token,
    }
    for what, (prediction, measurement) in pairs.items():
        beside_bytes = measurement - predicted.weights_bytes
        row |= {
            f"predicted_{what}_bytes": prediction,
            f"measured_{what}_bytes": measurement,
            f"{what}_error_fraction": prediction / measurement - 1,
            f"{what}_error_fraction_beside_weights": (prediction - measurement) / beside_bytes,
        }
    return row


def measured(model: Any, ids: torch.Tensor, case: Case, *, from_forward: int) -> int:
    """Peak bytes of a generation from one of its forwards on, weights and prompt included."""
    residents = resident_storages(model, torch.optim.SGD(model.parameters()))
    with record_cpu_memory() as cpu, torch.no_grad():
        counted = _counted_from(model, cpu, from_forward)
        try:
            made = model.generate(
                ids,
                max_new_tokens=case.new_tokens,
                min_new_tokens=case.new_tokens,
                num_beams=case.num_beams,
                do_sample=False,
                use_cache=True,
            )
        finally:
            counted.remove()
    prompt = 1 if model.config.is_encoder_decoder else case.prompt_tokens
    assert made.shape == (case.micro_batch_size, prompt + case.new_tokens)
    return peak_of_cpu(cpu, residents, {"input_ids": ids}).allocated_bytes


def _counted_from(model: Any, cpu: CpuPeak, forward: int) -> Any:
    run = iter(range(1 << 20))

    def before(*_given: Any) -> None:
        if next(run) == forward and forward:
            cpu.count_from_here()

    return model.register_forward_pre_hook(before)


def main() -> None:
    rows = []
    for case in cases():
        rows.append(compare(case))
        print(rows[-1], flush=True)
    names = [f"{what}_error_fraction{of}" for what in ("peak", "last_step") for of in ("", "_beside_weights")]
    summary = {f"largest_{name}": max(abs(row[name]) for row in rows) for name in names}
    print(summary)
    keep(
        "generation.json",
        "python benchmarks/generation.py",
        {"summary": summary, "rows": rows},
        "transformers",
    )


if __name__ == "__main__":
    main()
