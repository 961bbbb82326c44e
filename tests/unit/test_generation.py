"""The memory of `model.generate` of transformers, predicted from its first forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import brimful as bf
from brimful.api import estimate_generation
from brimful.capture.generation import GenerationCapture
from brimful.devices import find_device
from brimful.errors import UsageError
from brimful.memory import CAPTURED_FORWARDS, GrowingForwards
from brimful.prediction import GenerationEstimate, Verdict
from brimful.prediction.generation import GenerationPhase
from brimful.profiling.cpu_memory import record_cpu_memory
from brimful.profiling.peak import peak_of_cpu
from brimful.profiling.residents import resident_storages
from brimful.settings import Settings
from brimful.utils.quantities import format_bytes

transformers = pytest.importorskip("transformers")

PROMPT, NEW = 12, 20
GPU = "RTX 3090"


def gpt2(**options: Any) -> bf.Job:
    small = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 300, "sequence_length": PROMPT}
    return bf.find_architecture("gpt2", **(small | options))


def of_config(kind: Any, config: Any) -> bf.Job:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(5, 200, (samples, PROMPT))}

    return bf.Job(model=lambda: kind(config), loss=lambda model, batch: model(**batch).loss, batch=batch)


def llama(**changes: Any) -> bf.Job:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, **changes)
    return of_config(transformers.LlamaForCausalLM, config)


def windowed() -> bf.Job:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(
        **sizes, num_key_value_heads=2, vocab_size=300, sliding_window=PROMPT + 8
    )
    return of_config(transformers.MistralForCausalLM, config)


def t5() -> bf.Job:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=300, decoder_start_token_id=0
    )
    return of_config(transformers.T5ForConditionalGeneration, config)


JOBS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def forwards(job: bf.Job, device: str, *, captured: int, beams: int) -> GrowingForwards:
    capture = GenerationCapture(
        job=replace(job, count=None, batch=lambda samples: {"input_ids": bf_ids(job, samples)}),
        device=find_device(device),
        new_tokens=NEW,
        num_beams=beams,
        forwards=captured,
    )
    trace = capture(Settings(micro_batch_size=2))
    return GrowingForwards(trace=trace, cache_bytes=capture.cache_bytes_at(2))


def bf_ids(job: bf.Job, samples: int) -> torch.Tensor:
    assert callable(job.batch)
    ids: torch.Tensor = job.batch(samples)["input_ids"]
    return ids


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_further_forwards_take_what_a_capture_of_all_takes(name: str, beams: int) -> None:
    few = forwards(JOBS[name](), GPU, captured=CAPTURED_FORWARDS, beams=beams)
    every = forwards(JOBS[name](), GPU, captured=NEW, beams=beams)
    assert few.is_steady
    predicted, captured = few.play(NEW, "cuda"), every.play(NEW, "cuda")
    assert len(predicted.peaks) == len(captured.peaks) == NEW
    assert [p.allocated_bytes for p in predicted.peaks] == [p.allocated_bytes for p in captured.peaks]
    assert predicted.peak_reserved_bytes == captured.peak_reserved_bytes
    assert few.cache_bytes_after(NEW - 1) == every.cache_bytes[-1]


def test_a_cache_that_fills_its_window_stops_growing() -> None:
    job = windowed()
    found = estimate_generation(job, GPU, new_tokens=NEW, micro_batch_size=2)
    every = forwards(job, GPU, captured=NEW, beams=1)
    assert found.cache_bytes == every.cache_bytes[-1] < every.cache_bytes[0] + (NEW - 1) * 2 * 2 * 2 * 32 * 4
    assert found.phases[-1].predicted_peak_allocated_bytes == every.play(NEW, "cuda").peaks[-1].allocated_bytes


@pytest.mark.parametrize("beams", [1, 3])
def test_the_cache_has_keys_and_values_of_all_layers(beams: int) -> None:
    found = estimate_generation(llama(), GPU, new_tokens=NEW, num_beams=beams, micro_batch_size=4)
    per_token = 2 * 3 * 2 * (64 // 8) * 4  # keys and values, layers, heads of keys, size of a head, float32
    assert found.cache_bytes_per_token == per_token
    assert found.cache_bytes == per_token * 4 * beams * (PROMPT + NEW - 1)


def measured(job: bf.Job, *, beams: int, samples: int) -> int:
    assert callable(job.model)
    model: Any = job.model()
    model = model.eval()
    model.generation_config.eos_token_id = None
    ids, residents = bf_ids(job, samples), resident_storages(model, torch.optim.SGD(model.parameters()))
    with record_cpu_memory() as cpu, torch.no_grad():
        model.generate(
            ids, max_new_tokens=NEW, min_new_tokens=NEW, num_beams=beams, do_sample=False, use_cache=True
        )
    return peak_of_cpu(cpu, residents, {"input_ids": ids}).allocated_bytes


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_the_peak_on_a_cpu_is_the_measured_one(name: str, beams: int) -> None:
    """But for up to four numbers: tokens that pad or start, and what a kernel makes of a Python number."""
    job = JOBS[name]()
    found = estimate_generation(job, "cpu", new_tokens=NEW, num_beams=beams, micro_batch_size=3)
    expected = measured(job, beams=beams, samples=3)
    assert abs(found.predicted_peak_allocated_bytes - expected) <= 4 * 8
    assert found.predicted_peak_reserved_bytes == found.predicted_peak_allocated_bytes


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    def at(samples: int, budget: str | None = "400MiB") -> GenerationEstimate:
        return estimate_generation(
            gpt2(), GPU, new_tokens=NEW, num_beams=2, micro_batch_size=samples, budget=budget
        )

    largest = at(1).largest_micro_batch_size
    assert at(largest).verdict is Verdict.FITS
    assert at(largest + 1).verdict is not Verdict.FITS
    assert at(3).largest_micro_batch_size == largest
    nothing = at(1, "301MiB")
    assert (nothing.largest_micro_batch_size, nothing.verdict) == (0, Verdict.DOES_NOT_FIT)


def test_one_token_takes_the_prefill_alone() -> None:
    found = estimate_generation(gpt2(), GPU, new_tokens=1, prompt_tokens=40)
    assert [phase.name for phase in found.phases] == [GenerationPhase.PREFILL]
    assert (found.prompt_tokens, found.peak_phase) == (40, GenerationPhase.PREFILL)


def test_half_precision_weights_halve_the_cache() -> None:
    whole = estimate_generation(gpt2(), GPU, new_tokens=NEW)
    half = estimate_generation(gpt2(dtype="bf16"), GPU, new_tokens=NEW)
    assert half.cache_bytes * 2 == whole.cache_bytes
    assert half.weights_bytes * 2 == whole.weights_bytes


def test_a_model_with_adapters_generates() -> None:
    pytest.importorskip("peft")
    plain = estimate_generation(gpt2(), GPU, new_tokens=NEW)
    adapted = estimate_generation(gpt2(lora="r=4"), GPU, new_tokens=NEW)
    assert adapted.cache_bytes == plain.cache_bytes
    assert adapted.weights_bytes > plain.weights_bytes


def test_a_prompt_of_the_batch_that_is_too_long_is_shortened_and_one_that_is_asked_for_refused() -> None:
    job = gpt2(sequence_length=1020)
    found = estimate_generation(job, GPU, new_tokens=NEW)
    assert found.prompt_tokens == 1024 - (NEW - 1)
    assert "1,020" in found.notes[0]
    with pytest.raises(UsageError, match=r"1,024 positions.* takes 1,039.*at most 1,005.*at most 5 new"):
        estimate_generation(job, GPU, new_tokens=NEW, prompt_tokens=1020)
    with pytest.raises(UsageError, match="at most 1,024 tokens in all"):
        estimate_generation(job, GPU, new_tokens=1100, prompt_tokens=1100)


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("bert-base", {"new_tokens": 4}, "BertForSequenceClassification, which does not generate"),
        ("resnet18", {"new_tokens": 4}, "does not generate text"),
        ("gpt2", {"new_tokens": 0}, "at least 1 as new_tokens"),
        ("gpt2", {"new_tokens": 4, "num_beams": 0}, "at least 1 as num_beams"),
        ("gpt2", {"new_tokens": 4, "prompt_tokens": 0}, "at least 1 as prompt_tokens"),
        ("gpt2", {"new_tokens": 4, "precision": "bf17"}, "bf16"),
    ],
)
def test_what_cannot_be_generated_is_refused(job: str, options: dict[str, Any], message: str) -> None:
    small = {"num_hidden_layers": 1} if job != "resnet18" else {}
    with pytest.raises(UsageError, match=message):
        estimate_generation(bf.find_architecture(job, **small), GPU, **options)


def test_a_batch_without_tokens_is_refused() -> None:
    job = replace(gpt2(), count=None, batch=lambda samples: {"x": torch.zeros(samples, 3)})
    with pytest.raises(UsageError, match="no input_ids"):
        estimate_generation(job, GPU, new_tokens=4)


def test_unsteady_forwards_are_all_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    few = estimate_generation(gpt2(), GPU, new_tokens=NEW, micro_batch_size=2)
    counts: list[int] = []
    whole = GenerationCapture.__call__

    def counted(self: GenerationCapture, settings: Settings) -> Any:
        counts.append(self.forwards)
        return whole(self, settings)

    monkeypatch.setattr(GenerationCapture, "__call__", counted)
    monkeypatch.setattr(GrowingForwards, "is_steady", property(lambda _: False))
    assert estimate_generation(gpt2(), GPU, new_tokens=NEW, micro_batch_size=2) == few
    assert counts[-1] == NEW


def test_a_note_says_what_gaps_reserve_and_that_segments_which_expand_have_fewer() -> None:
    job, asked = gpt2(), {"new_tokens": 200, "num_beams": 4, "micro_batch_size": 64}
    found = estimate_generation(job, GPU, **asked)
    expandable = estimate_generation(job, GPU, **asked, allocator="expandable_segments:True")
    assert found.predicted_peak_reserved_bytes > 1.25 * found.predicted_peak_allocated_bytes
    assert expandable.predicted_peak_reserved_bytes < found.predicted_peak_reserved_bytes
    assert format_bytes(expandable.predicted_peak_reserved_bytes) in found.notes[-1]
    assert expandable.notes == ()


def test_expandable_segments_that_reserve_no_less_are_not_recommended() -> None:
    """The smallest segments, of 2 and 20 MiB, are larger than all that a small model needs."""
    found = estimate_generation(llama(), GPU, new_tokens=20, micro_batch_size=2)
    assert found.predicted_peak_reserved_bytes > 1.25 * found.predicted_peak_allocated_bytes
    assert found.notes == ()
