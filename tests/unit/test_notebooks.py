"""Results as the last line of a notebook's cell."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import torch
from torch import nn

import brimful as bf


def shown_in_a_notebook(value: object) -> str:
    """By IPython's protocol; without IPython, which is not needed for it."""
    printed: list[str] = []
    printer = SimpleNamespace(text=printed.append)
    value._repr_pretty_(printer, False)  # type: ignore[attr-defined]
    return "".join(printed)


def test_a_notebook_shows_results_as_print_does() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(64, 1),
        loss=lambda model, x: model(x).mean(),
        batch=lambda n: torch.randn(n, 64),
        data=lambda: bf.Data(train=torch.randn(32, 64)),
        name="toy",
    )
    plan = bf.plan(job, "cpu", global_batch_size=8, budget="1GiB")
    results = {
        "toy on cpu": bf.estimate(job, "cpu", micro_batch_size=8),
        "toy on cpu, global batch 8": plan,
        "global batch 8: fits 2 of 2 GPUs": bf.gpus(job, global_batch_size=8, devices=["T4", "A100-40GB"]),
        "measured on cpu": bf.measure(job, plan, "cpu"),
        "2 steps, loss": bf.fit(job, plan, steps=2, show_progress=False)[0],
        "plan": bf.verify(job, plan),
    }
    for words, result in results.items():
        assert words in shown_in_a_notebook(result)
        assert len(shown_in_a_notebook(result)) < 3000


def test_a_table_of_gpus_is_copied_as_any_record() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(8, 1), loss=lambda model, x: model(x).mean(), batch=lambda n: torch.randn(n, 8)
    )
    found = bf.gpus(job, global_batch_size=8, devices=["T4"])
    assert copy.deepcopy(found) == found
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
