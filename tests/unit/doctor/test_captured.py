"""A job's captured step shows the faults that are in its trace, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import brimful as bf
from brimful import api
from brimful.devices import find_device
from brimful.doctor import Evidence
from brimful.doctor.findings import captured_findings
from brimful.doctor.text import captured_document, captured_notes, captured_text
from brimful.settings import Precision
from brimful.utils.quantities import MIB

WIDTH = 64
SETTINGS = bf.Settings(micro_batch_size=8)
GPU = find_device("RTX 3090")


class Attention(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.project, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v)
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


class Router(nn.Module):
    """A softmax and products that are no attention: experts of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = torch.einsum("bte,btd->ebtd", weights, x).flatten(1, 2)
        return torch.bmm(mixed, self.experts).sum(0).view_as(x)


def job(model: Callable[[], nn.Module], tokens: int = 256, **options: Any) -> bf.Job:
    return bf.Job(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda samples: torch.randn(samples, tokens, WIDTH),
        optimizer="adamw",
        **options,
    )


def with_vocabulary(size: int) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Linear(WIDTH, size),
        loss=lambda model, batch: functional.cross_entropy(
            model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        ),
        batch=lambda samples: {"x": torch.randn(samples, 128, WIDTH), "y": torch.zeros(samples, 128).long()},
        optimizer="adamw",
    )


class HalfUsed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)


def looping(*, keeps: bool) -> bf.Job:
    def loop(model: nn.Module, batches: Any) -> None:
        optimizer, losses = torch.optim.SGD(model.parameters()), []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch)
            loss.square().mean().backward()
            optimizer.step()
            if keeps:
                losses.append(loss)

    return job(lambda: nn.Linear(WIDTH, WIDTH), loop=loop)


def found(job: bf.Job, device: str = "cpu", settings: bf.Settings = SETTINGS) -> dict[str, int | None]:
    evidence = Evidence.of_trace(api.capture_trace(job, settings, device))
    return {each.check: each.size_bytes for each in captured_findings(evidence)}


@pytest.mark.parametrize(
    ("faulty", "well", "check"),
    [
        (job(lambda: Attention(fused=False)), job(lambda: Attention(fused=True)), "attention-not-fused"),
        (with_vocabulary(4096), with_vocabulary(16), "logits-in-the-loss"),
        (job(HalfUsed), job(lambda: nn.Linear(WIDTH, WIDTH)), "without-gradient"),
        (looping(keeps=True), looping(keeps=False), "memory-grows"),
    ],
    ids=["attention", "logits", "gradient", "growth"],
)
def test_a_fault_in_the_trace_is_found_and_nothing_without_it(faulty: bf.Job, well: bf.Job, check: str) -> None:
    assert list(found(faulty)) == [check]
    assert found(well) == {}


def test_bytes_are_those_of_the_weights_of_attention() -> None:
    assert found(job(lambda: Attention(fused=False))) == {"attention-not-fused": 8 * 256 * 256 * 4}


def test_a_softmax_beside_products_is_no_attention() -> None:
    assert found(job(Router)) == {}


def test_what_plans_choose_is_no_finding_but_in_a_loop_of_its_own() -> None:
    assert found(job(lambda: nn.Linear(WIDTH, WIDTH)), "RTX 3090") == {}
    assert set(found(looping(keeps=False), "RTX 3090")) == {"half-precision-missed"}


def test_the_text_and_the_document_have_the_peak_and_the_findings() -> None:
    settings = bf.Settings(micro_batch_size=8, precision=Precision.BF16)
    trace = api.capture_trace(with_vocabulary(4097), settings, "RTX 3090")
    evidence = Evidence.of_trace(trace)
    findings, notes = captured_findings(evidence), captured_notes(trace, GPU)
    document = captured_document(evidence, device=GPU.name, found=findings, notes=notes)
    assert sum(document["categories"].values()) == document["predicted_peak_allocated_bytes"] > 16 * MIB
    assert "logits-in-the-loss" in [each["check"] for each in document["findings"]]
    text = captured_text(evidence, device=GPU.name, found=findings, notes=notes)
    assert "on RTX 3090: a step of 8 samples, not run" in text
    assert "the loss saves log-probabilities" in text
    assert notes == tuple(document["notes"])
