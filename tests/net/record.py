# ruff: noqa: E501  # a table
"""Predictions and plans as they were before the code is rearranged: `python tests/net/record.py [--write]`.

Without `--write`, everything is computed again and compared with the digests in `recorded.json`; the exit status is
the number of entries that differ. `--full FILE` also writes everything in full. The prose of results (notes, labels,
what is uncertain) is not compared.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import brimful as bf  # noqa: E402
from brimful.models import resolve_job  # noqa: E402
from brimful.report.documents import estimate_document  # noqa: E402
from zoo import ZOO, missing  # noqa: E402

RECORDED = HERE / "recorded.json"
PROSE = {
    "notes", "uncertain", "uncertain_about", "corrections", "torch_version", "description", "summary", "label",
    "text", "where", "asked",
}  # fmt: skip

# fmt: off
PLANS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("bert-large", {"sequence_length": 512}, {"device": "RTX 3090", "global_batch_size": 32, "budget": "11GiB"}),
    ("bert-large", {"sequence_length": 512}, {"device": "GTX 1080 Ti", "global_batch_size": 32}),
    ("bert-large", {"sequence_length": 512}, {"device": "RTX 3090", "global_batch_size": 32, "precision": "bf16"}),
    ("bert-large", {"sequence_length": 128}, {"device": "T4", "global_batch_size": 64, "precision": "fp16"}),
    ("bert-large", {"sequence_length": 128}, {"device": "RTX 3090", "global_batch_size": 64, "world_size": 2}),
    ("bert-large", {"sequence_length": 128},
     {"device": "RTX 3090", "global_batch_size": 64, "world_size": 8, "num_nodes": 2, "parallelism": "fsdp2"}),
    ("bert-large", {"sequence_length": 128},
     {"device": "A100 40GB SXM", "global_batch_size": 64, "world_size": 4, "parallelism": "fsdp2",
      "param_dtype": "bfloat16", "precision": "bf16"}),
    ("bert-large", {"sequence_length": 128},
     {"device": "RTX 3090", "global_batch_size": 64, "world_size": 2, "parallelism": "zero2", "precision": "bf16"}),
    ("bert-large", {"sequence_length": 128},
     {"device": "RTX 3090", "global_batch_size": 64, "world_size": 2, "parallelism": "fsdp2", "offload_parameters": True}),
    ("gpt2", {"sequence_length": 512}, {"device": "RTX 3060", "global_batch_size": 32, "budget": "6GiB"}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 32, "budget": "40%", "precision": "bf16"}),
    ("gpt2", {"sequence_length": 512}, {"device": "RTX 3060", "global_batch_size": 32, "recompute": "all"}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 8, "micro_batch_size": 8, "chunked_loss": False}),
    ("gpt2", {"sequence_length": 512}, {"device": "RTX 3060", "global_batch_size": 8, "optimizer": "sgd"}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 8, "offload_optimizer": True}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 4, "micro_batch_size": 4, "optimizer_in_backward": True}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 32, "budget": "4GiB", "offload_activations": False}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 32, "budget": "4GiB", "allow_optimizers": ("adafactor", "sgd")}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 32, "expandable_segments": False, "prefetch_inputs": True}),
    ("gpt2", {"sequence_length": 512},
     {"device": "RTX 3060", "global_batch_size": 16, "precision": ("fp32", "tf32", "bf16")}),
    ("resnet50", {}, {"device": "RTX 3060", "global_batch_size": 64, "budget": "60%"}),
    ("resnet50", {}, {"device": "RTX 3060", "global_batch_size": 256, "split_batch_norm": True}),
    ("unet", {}, {"device": "A100 40GB SXM", "global_batch_size": 16, "precision": "bf16", "budget": "55%"}),
    ("vgg16", {}, {"device": "GTX 1080 Ti", "global_batch_size": 64}),
    ("vit-large", {}, {"device": "RTX 4090", "global_batch_size": 64, "precision": "bf16"}),
    ("examples/tiny_gpt.py:job", {}, {"device": "RTX 3090", "global_batch_size": 32, "budget": "70%"}),
    ("examples/tiny_gpt.py:job", {}, {"device": "L4", "global_batch_size": 32, "micro_batch_size": 4}),
    ("examples/digits.py:job", {}, {"device": "RTX 3090", "global_batch_size": 128}),
    ("examples/digits.py:job", {}, {"device": "T4", "global_batch_size": 128, "world_size": 2}),
    ("examples/digits.py:job", {}, {"device": "RTX 3090", "global_batch_size": 128, "budget": "1KiB"}),
)
# fmt: on
"""30 requests: devices, budgets, ranks, precisions, and each option once; the last cannot be met."""


def numbers(document: Any) -> Any:
    """A document without its prose."""
    if isinstance(document, dict):
        return {key: numbers(value) for key, value in document.items() if key not in PROSE}
    if isinstance(document, list | tuple):
        return [numbers(value) for value in document]
    # Where a model masks at random, sums of times differ in the last bit.
    return float(f"{document:.12g}") if isinstance(document, float) else document


def digest(document: Any) -> str:
    """Of its numbers."""
    return hashlib.sha256(json.dumps(numbers(document), sort_keys=True).encode()).hexdigest()[:16]


def estimates() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every model of the zoo that can be imported, for a CPU and a GPU; the demo's jobs in three precisions."""
    for model in ZOO:
        if model.needs and missing(model.needs):
            continue
        for device in ("RTX 3090", "A100 40GB SXM"):
            yield (
                f"{model.name} on {device}",
                lambda model=model, device=device: bf.estimate(
                    model.job(), device, micro_batch_size=model.micro_batch_size
                ),
            )
    for name in ("examples/digits.py:job", "examples/tiny_gpt.py:job"):
        for precision in ("fp32", "bf16", "fp16"):
            yield (
                f"{name} {precision}",
                lambda name=name, precision=precision: bf.estimate(
                    resolve_job(str(ROOT / name)), "RTX 3090", micro_batch_size=8, precision=precision
                ),
            )


def plans() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every request of `PLANS`; of one that fails, the kind of error."""

    def planned(source: str, sizes: dict[str, Any], options: dict[str, Any]) -> Any:
        job = resolve_job(str(ROOT / source) if ".py" in source else source, **sizes)
        try:
            return bf.plan(job, **options).to_json()
        except bf.BrimfulError as error:
            return type(error).__name__

    for request in PLANS:
        yield " ".join(map(str, request)), partial(planned, *request)


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    """All, by name; each computes its document."""
    for name, make in estimates():
        yield f"estimate {name}", lambda make=make: estimate_document(make())
    for name, make in plans():
        yield f"plan {name}", make


def compute(make: Callable[[], Any]) -> Any:
    """An entry's document, from the same random numbers each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return json.loads(json.dumps(numbers(make())))


def main() -> int:
    """Record or compare; how many entries differ."""
    warnings.simplefilter("ignore")
    writes = "--write" in sys.argv
    kept = {} if writes else json.loads(RECORDED.read_text())
    found: dict[str, Any] = {}
    differing = []
    began = time.monotonic()
    for name, make in entries():
        found[name] = compute(make)
        if not writes and kept.get(name) != digest(found[name]):
            differing.append(name)
            print(f"DIFFERS {name}", flush=True)
        gc.freeze()
    if writes:
        digests = {name: digest(value) for name, value in found.items()}
        RECORDED.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
    else:
        differing += sorted(kept.keys() - found.keys())
    if "--full" in sys.argv:
        Path(sys.argv[sys.argv.index("--full") + 1]).write_text(json.dumps(found, indent=1, sort_keys=True))
    print(f"{len(found)} entries in {time.monotonic() - began:.0f} s, {len(differing)} differ")
    return len(differing)


if __name__ == "__main__":
    sys.exit(main())
