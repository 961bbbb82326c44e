"""Steps compiled by Inductor, predicted without compiling or running them, beside measured ones on this CPU."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache

import brimful as bf
from brimful.capture import inductor
from brimful.capture.recording.modules import ModuleCalls
from brimful.errors import UsageError
from brimful.settings import Action, Compile, UnitAction

WITHIN = 0.01
"""Fraction by which predicted peaks may be off: what kernels of oneDNN hold inside is the only known cause."""


def tiny(family: str) -> bf.Job:
    """A language model of two layers."""
    common = {"vocab_size": 500, "attn_implementation": "sdpa"}
    makers: dict[str, Callable[[], nn.Module]] = {
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, **common
            )
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=2, **common)),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **common,
            )
        ),
    }

    def batch(samples: int) -> dict[str, Tensor]:
        ids = torch.arange(samples * 64).reshape(samples, 64) % 500
        return {"input_ids": ids, "labels": ids}

    return bf.Job(model=makers[family], loss=lambda model, batch: model(**batch).loss, batch=batch)


class Breaks(nn.Module):
    """A block whose graph breaks, as it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.inner(x).tanh()


class Block(nn.Module):
    """What Inductor fuses, saves and draws: a norm, products, an activation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(*classes: type[nn.Module]) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*(each() for each in classes)),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 64, 32),
        optimizer="sgd",
    )


def settings_of(*units: str, **others: Any) -> bf.Settings:
    kept = tuple(UnitAction(fqn=unit, action=Action.KEEP) for unit in units)
    return bf.Settings(micro_batch_size=8, units=kept, **{"compile": Compile.UNITS} | others)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_peak_of_compiled_units_is_predicted(family: str) -> None:
    found = bf.estimate(tiny(family), "cpu", micro_batch_size=4, compile="units")
    assert len(found.settings.units) == 2
    assert not [note for note in found.uncertain_ops if "eagerly" in note]
    measured = bf.measure(tiny(family), found.settings, "cpu")
    assert found.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=WITHIN
    )
    eager = bf.estimate(tiny(family), "cpu", micro_batch_size=4)
    assert found.predicted_peak_allocated_bytes != eager.predicted_peak_allocated_bytes


