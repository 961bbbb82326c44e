"""Estimates and plans name sizes of layers that tensor cores load slowly, with what padding them gains."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brimful as bf

SAMPLES, WIDTH, ODD, PADDED = 8192, 512, 8193, 8256


def job(outputs: int, width: int = WIDTH) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, outputs)),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randint(0, outputs, (n,))},
        optimizer="adamw",
    )


def estimated(own: bf.Job, device: str = "A100 80GB", precision: str = "bf16") -> bf.api.Estimate:
    return bf.estimate(own, device, micro_batch_size=SAMPLES, precision=precision)


def odd_notes(found: bf.api.Estimate | bf.Plan) -> list[str]:
    return [note for note in found.notes if "not a multiple of 8" in note]


def test_the_gain_named_is_that_of_an_estimate_with_the_padded_size() -> None:
    odd, padded = estimated(job(ODD)), estimated(job(PADDED))
    (note,) = odd_notes(odd)
    assert note.startswith(f"{ODD}, a size of 2, is not a multiple of 8, which tensor cores need in bfloat16")
    assert f"padded to {PADDED}" in note
    (percent,) = re.findall(r"predicted, ([\d.]+)%", note)
    gained = 1 - padded.predicted_step_seconds / odd.predicted_step_seconds
    assert gained > 0.1
    assert float(percent) / 100 == pytest.approx(gained, rel=0.1)
    assert not odd_notes(padded)


def test_an_odd_size_between_layers_is_named_once_with_both() -> None:
    (note,) = odd_notes(estimated(job(4096, width=1001)))
    assert note.startswith("1001, a size of 0 and 1 more, is")
    assert "padded to 1008" in note


@pytest.mark.parametrize(
    ("own", "device", "precision"),
    [
        (job(ODD), "A100 80GB", "fp32"),
        (job(ODD), "P100", "fp16"),
        (job(ODD), "cpu", "bf16"),
        (job(10), "A100 80GB", "bf16"),
    ],
    ids=["not in a half type", "no tensor cores", "no GPU", "gains under 1 %"],
)
def test_nothing_is_named_where_padding_gains_nothing(own: bf.Job, device: str, precision: str) -> None:
    assert not odd_notes(estimated(own, device, precision))


def test_a_plan_names_the_size_in_its_own_precision() -> None:
    planned = bf.plan(job(ODD), "A100 80GB", global_batch_size=SAMPLES, precision="bf16")
    assert f"{ODD}, a size of 2, is" in odd_notes(planned)[0]
    assert not odd_notes(bf.plan(job(ODD), "A100 80GB", global_batch_size=SAMPLES, precision="fp32"))


@pytest.mark.slow
def test_the_head_of_a_loss_in_chunks_is_named() -> None:
    gpt2 = bf.find_architecture("gpt2", num_hidden_layers=2, sequence_length=256)
    planned = bf.plan(gpt2, "A100 80GB", budget="2GiB", global_batch_size=16, precision="bf16")
    assert planned.settings.chunked_loss is not None
    assert odd_notes(planned)[0].startswith("50257, a size of lm_head, is")
