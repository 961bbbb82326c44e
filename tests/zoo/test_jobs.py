"""Whole jobs of `benchmarks/job_zoo` are estimated, planned at 60 %, applied, measured, beside the truth."""

from __future__ import annotations

import pytest

from job_zoo import JOBS, JobCase
from job_zoo.examine import REFUSED, SUPPORTED, examine

pytestmark = [
    pytest.mark.slow,  # minutes in all
    pytest.mark.filterwarnings("ignore"),  # what the libraries warn of is theirs
]

SLOW = {
    "autoencoder", "bitsandbytes adamw8bit", "byol with target inside", "capsules with routing",
    "clip by embed", "clip naive", "clipped policy optimisation", "compiled blocks",
    "compiled function in a model", "compiled loss", "compiled model", "consistency with teacher outside",
    "detr with matching of lists", "detr with padded targets in numpy", "diffusers unet and scheduler",
    "diffusion", "diffusion transformer", "direct preferences with reference model",
    "distillation with teacher as global", "distillation with teacher inside",
    "energy model with langevin chain", "float64 regression", "flow matching", "focal loss by hand",
    "four bit state", "fourier neural operator", "frozen backbone and head", "gpt with dropout and z loss",
    "hf bert classifier", "hf gpt2", "hf gradient checkpointing enabled", "hf llama instructions with count",
    "hf llama instructions without count", "hf mixtral eager experts", "hf mixtral grouped",
    "hf modernbert masked words", "hf t5 with adafactor", "hf trainer as loop", "in data parallel",
    "large vocabulary", "latent diffusion around frozen encoders", "lightning training step",
    "masked autoencoder", "masked diffusion of texts", "meta learning with inner loop",
    "mixture of experts by where", "multi label with pos weight", "muon and adamw", "normalising flow",
    "orthogonal recurrent weights", "own checkpointing", "own reentrant checkpointing", "peft dora",
    "peft lora with gradient checkpointing", "peft prompt tuning", "perceptual loss through frozen network",
    "physics informed in float64", "pixel cnn", "points", "recurrent policy over episodes",
    "reward model of pairs", "scripted function in a model", "scripted model", "selective scan",
    "sequence of ragged texts", "several tasks with learned weights", "sharpness aware noise in the weights",
    "siamese pairs", "simclr by embed", "sinkhorn clusters", "sliced score matching", "sounds through stft",
    "speech with ctc", "stochastic depth and early exit", "tagger of packed sequences",
    "translator with teacher forcing", "triplets", "vae mean", "vit classifier", "vit with mixup",
}  # fmt: skip
"""They take four seconds and more, or are refused by little; benchmarks/results/job_zoo.json has all."""
CASES = [case for case in JOBS if case.name not in SLOW]


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_is_exact_or_refused_in_words(case: JobCase) -> None:
    if case.missing:
        pytest.skip(f"needs {case.missing}")
    row = examine(case)
    if case.refused:
        assert row.status == REFUSED, row.why
        assert case.refused in row.why
    else:
        assert row.status == SUPPORTED, row.why


def test_the_zoo_has_jobs_of_all_kinds() -> None:
    assert len(CASES) >= 60
    assert {case.kind for case in CASES} == {case.kind for case in JOBS}
