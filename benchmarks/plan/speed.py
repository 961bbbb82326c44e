"""How long planning takes after imports, replay included.

    python benchmarks/plan/speed.py

Each plan is made in a process of its own; a first estimate imports what torch and transformers load at first
use. The aims are the project's own, for 2 cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import brimful as bf
from machine import keep

REPEATS = 3
AIMS = {"bert-large": 8.0, "llama, 100 layers": 20.0}


def llama() -> bf.Job:
    """100 layers of 1024, 1.6 billion parameters, sequences of 1024."""

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=100,
                num_attention_heads=16,
                use_cache=False,
            )
        )

    return bf.Job(
        name="llama, 100 layers",
        model=model,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        batch=lambda n: torch.zeros(n, 1024, dtype=torch.long),
        optimizer="adamw",
    )


CASES = {
    "bert-large": (lambda: bf.find_architecture("bert-large"), "RTX 3090", 32, "12GiB"),
    "llama, 100 layers": (llama, "A100 80GB SXM", 16, "50GiB"),
}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])))
        return
    rows: list[dict[str, Any]] = []
    for name, aim in AIMS.items():
        runs = []
        for _ in range(REPEATS):
            done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        seconds = statistics.median(each["seconds"] for each in runs)
        rows.append(runs[0] | {"seconds": round(seconds, 2), "aim_seconds": aim, "is_reached": seconds <= aim})
        print(rows[-1], flush=True)
    keep("plan_speed.json", "python benchmarks/plan/speed.py", {"rows": rows}, "transformers")


def run(name: str) -> dict[str, Any]:
    """One plan of a case."""
    make, device, global_batch_size, budget = CASES[name]
    job = make()
    bf.estimate(bf.find_architecture("bert-base", num_hidden_layers=1), device, precision="bf16")
    began = time.perf_counter()
    plan = bf.plan(job, device, global_batch_size=global_batch_size, precision="bf16", budget=budget)
    return {
        "model": name,
        "device": device,
        "global_batch_size": global_batch_size,
        "budget": budget,
        "seconds": time.perf_counter() - began,
        "settings": plan.settings.describe(),
        "budget_used": round(plan.predicted_peak_device_bytes / plan.budget_bytes, 3),
    }


if __name__ == "__main__":
    main()
