"""Whether plans, estimates and comparisons of GPUs are what they were, for changes of speed alone.

    python benchmarks/plan/same_plans.py record plans.json     # before the change
    python benchmarks/plan/same_plans.py compare plans.json    # after it

Compares whole documents, predicted bytes and seconds to the last digit. The CPU's rates are those of the tests.
Sums over sets are in the order of hashes, so Python's hashes are fixed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo import ZOO  # first: it prepares torchvision

# isort: split
import torch
from torch import nn

import brimful as bf
from brimful.errors import BrimfulError
from helpers.calibrated import calibrated
from helpers.models import GPT, ResNet, UNet
from helpers.planned_jobs import image_job, language_job, vector_job
from plan.speed_jobs import detr, llama, llama_lora, unet

Request = Callable[[], Any]


def zoo(name: str) -> bf.Job:
    return next(each for each in ZOO if each.name == name).job()


class Uneven(nn.Module):
    """Blocks of one class that differ: in width, in dropout, in what they compute, in being frozen."""

    def __init__(self) -> None:
        super().__init__()
        widths = (256, 256, 512, 512, 512, 256, 256, 256)
        self.blocks = nn.ModuleList(
            UnevenBlock(width, dropout=0.1 if index % 3 == 2 else 0.0, twice=index == 4)
            for index, width in enumerate(widths)
        )
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UnevenBlock(nn.Module):
    def __init__(self, width: int, *, dropout: float, twice: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, width), nn.Linear(width, 256)
        self.norm = nn.LayerNorm(256)
        self.dropout, self.twice = dropout, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if self.twice else 1):
            y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
            x = x + torch.nn.functional.dropout(y, self.dropout, self.training)
        return x


def plan(job: Callable[[], bf.Job], device: str, **options: Any) -> Request:
    return lambda: bf.plan(job(), device, **options).to_json()


def gpus(job: Callable[[], bf.Job], **asked: Any) -> Request:
    """A comparison of all GPUs."""
    return lambda: bf.gpus(job(), **asked).to_json()


def estimate(job: Callable[[], bf.Job], device: str, **options: Any) -> Request:
    return lambda: bf.estimate(job(), device, **options).to_json()


def bert(layers: int, **options: Any) -> Callable[[], bf.Job]:
    return lambda: bf.find_architecture("bert-large", num_hidden_layers=layers, **options)


REQUESTS: dict[str, Request] = {
    "bert 6, 3 GiB": plan(bert(6), "RTX 3090", global_batch_size=32, budget="3GiB"),
    "bert 6, 2 GiB": plan(bert(6), "RTX 3090", global_batch_size=32, budget="2GiB"),
    "bert 6, impossible": plan(bert(6), "RTX 3090", global_batch_size=32, budget="1GiB"),
    "bert 4, bf16, no offloading": plan(
        bert(4),
        "A100 80GB SXM",
        global_batch_size=16,
        budget="40%",
        precision="bf16",
        offload_activations=False,
    ),
    "bert 4, cpu": plan(bert(4), "cpu", global_batch_size=8, budget="60%"),
    "bert 3, auto precision": plan(bert(3), "RTX 4090", global_batch_size=12, budget="50%", precision="auto"),
    "bert-large whole, 11 GiB": plan(bert(24), "RTX 3090", global_batch_size=32, budget="11GiB"),
    "gpt2 4, tied": plan(
        lambda: bf.find_architecture("gpt2", num_hidden_layers=4),
        "RTX 3060",
        global_batch_size=16,
        budget="4GiB",
    ),
    "llama-3.2 3": plan(
        lambda: bf.find_architecture("llama-3.2-1b", num_hidden_layers=3),
        "RTX 4090",
        global_batch_size=8,
        budget="16GiB",
        precision="bf16",
    ),
    "llama 8, 4 ranks": plan(
        lambda: llama(8), "A100 80GB SXM", global_batch_size=32, world_size=4, budget="6GiB", precision="bf16"
    ),
    "llama 5, fsdp2": plan(
        lambda: llama(5), "RTX 4090", global_batch_size=16, world_size=2, budget="4GiB", parallelism="fsdp2"
    ),
    "llama 8, other optimizers": plan(
        lambda: llama(8),
        "RTX 3060",
        global_batch_size=16,
        budget="5GiB",
        precision="bf16",
        allow_optimizers=("adafactor",),
    ),
    "lora 3": plan(lambda: llama_lora(3), "RTX 4090", global_batch_size=8, budget="6GiB"),
    "unet of diffusers, small": plan(lambda: unet(small=True), "RTX 3060", global_batch_size=8, budget="3GiB"),
    "uneven blocks": plan(lambda: vector_job(Uneven, 64, 256), "RTX 3060", global_batch_size=256, budget="50%"),
    "uneven blocks, cpu": plan(lambda: vector_job(Uneven, 64, 256), "cpu", global_batch_size=64, budget="50%"),
    "own checkpointing": plan(lambda: zoo("own checkpoint"), "RTX 3060", global_batch_size=64, budget="90%"),
    "module called 4 times": plan(
        lambda: zoo("module called 4 times"), "RTX 3060", global_batch_size=64, budget="80%"
    ),
    "experts": plan(lambda: zoo("experts"), "RTX 3060", global_batch_size=16, budget="90%"),
    "resnet, kept whole": plan(lambda: image_job(ResNet), "RTX 3060", global_batch_size=64, budget="70%"),
    "unet of the tests": plan(lambda: image_job(UNet), "cpu", global_batch_size=16, budget="70%"),
    "gpt, recompute all": plan(
        lambda: language_job(lambda: GPT(layers=5, width=64)),
        "RTX 3060",
        global_batch_size=64,
        budget="60%",
        recompute="all",
    ),
    "gpt, optimizer in backward": plan(
        lambda: language_job(lambda: GPT(layers=5, width=64)),
        "RTX 3060",
        global_batch_size=64,
        budget="60%",
        optimizer_in_backward=True,
    ),
    "nn.TransformerEncoder": plan(
        lambda: zoo("nn.TransformerEncoder"), "RTX 3060", global_batch_size=64, budget="70%"
    ),
    "bert-large whole, 4 GiB": plan(bert(24), "RTX 3090", global_batch_size=32, budget="4GiB"),
    "llama-3.2 whole": plan(
        lambda: bf.find_architecture("llama-3.2-1b", sequence_length=2048), "RTX 3090", global_batch_size=16
    ),
    "llama-3.2 whole, bf16": plan(
        lambda: bf.find_architecture("llama-3.2-1b", sequence_length=2048),
        "RTX 3090",
        global_batch_size=16,
        precision="bf16",
    ),
    "llama-3.2 4, 8 GiB": plan(
        lambda: bf.find_architecture("llama-3.2-1b", num_hidden_layers=4),
        "RTX 4090",
        global_batch_size=8,
        budget="8GiB",
    ),
    "llama 24, adafactor in backward": plan(
        lambda: llama(24),
        "RTX 3060",
        global_batch_size=16,
        budget="3GiB",
        optimizer="adafactor",
        optimizer_in_backward=True,
    ),
    "vit-large": plan(lambda: bf.find_architecture("vit-large"), "RTX 3060", global_batch_size=64),
    "detr": plan(detr, "RTX 3060", global_batch_size=16),
    "lora 6, bf16": plan(
        lambda: llama_lora(6), "RTX 4090", global_batch_size=16, budget="5GiB", precision="bf16"
    ),
    **{
        f"bert 6, {budget}, {precision}": plan(
            bert(6), "RTX 4090", global_batch_size=16, budget=budget, precision=precision
        )
        for budget, precision in (("2500MiB", "fp32"), ("4GiB", "fp16"), ("6GiB", "bf16"), ("1900MiB", "bf16"))
    },
    **{
        f"gpt of the tests, {budget}": plan(
            lambda: language_job(lambda: GPT(layers=8, width=128)),
            "RTX 3060",
            global_batch_size=64,
            budget=budget,
        )
        for budget in ("700MiB", "500MiB", "420MiB", "380MiB")
    },
    **{
        f"uneven blocks, {budget}": plan(
            lambda: vector_job(Uneven, 64, 256), "RTX 3060", global_batch_size=4096, budget=budget
        )
        for budget in ("1GiB", "600MiB", "450MiB")
    },
    **{
        f"resnet-50, {budget}": plan(
            lambda: bf.find_architecture("resnet50"), "RTX 3060", global_batch_size=64, budget=budget
        )
        for budget in ("8GiB", "4GiB")
    },
    "gpus, bert 6": gpus(bert(6), global_batch_size=16),
    "gpus, bert 5 in bf16": gpus(bert(5), global_batch_size=8, precision="bf16", optimizer="adafactor"),
    "gpus, llama 6": gpus(lambda: llama(6), global_batch_size=4),
    "gpus, resnet-50": gpus(lambda: bf.find_architecture("resnet50"), global_batch_size=64),
    "gpus, unet of the tests": gpus(lambda: image_job(UNet), global_batch_size=1024),
    "gpus, lstm": gpus(lambda: zoo("lstm lm"), global_batch_size=4096),
    "estimate bert 4": estimate(bert(4), "RTX 3090", micro_batch_size=4, evaluate=True),
    "estimate resnet-50": estimate(lambda: bf.find_architecture("resnet50"), "RTX 3090", micro_batch_size=8),
    "estimate llama 4, all recomputed": estimate(
        lambda: llama(4),
        "RTX 3090",
        micro_batch_size=2,
        gradient_accumulation_steps=3,
        precision="bf16",
        recompute="all",
    ),
    "estimate lstm, cpu": estimate(lambda: zoo("lstm lm"), "cpu", micro_batch_size=4),
}


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    what, path, *names = sys.argv[1:]
    known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    different = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(calibrated(Path(folder)))
        for name, request in REQUESTS.items():
            if names and not any(each in name for each in names):
                continue
            began = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = answer_of(request)
            is_same = known.get(name) == answer
            print(
                f"{time.process_time() - began:6.1f} s  {name}",
                end="" if what == "compare" else "\n",
                flush=True,
            )
            if what == "compare":
                print("" if is_same else "   DIFFERS", flush=True)
                if not is_same:
                    different.append(name)
                    show_difference(known.get(name), answer)
            else:
                known[name] = answer
    if what == "record":
        Path(path).write_text(json.dumps(known, indent=1))
    elif different:
        raise SystemExit(f"{len(different)} of {len(REQUESTS)} differ: {', '.join(different)}")


def answer_of(request: Request) -> Any:
    """The document of an answer, or the error, as JSON."""
    try:
        document = request()
    except BrimfulError as error:
        document = {"error": f"{type(error).__name__}: {error}"}
    return json.loads(json.dumps(document))


def show_difference(before: Any, after: Any, where: str = "") -> None:
    """Print the first fields that differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                show_difference(before.get(key), after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (a, b) in enumerate(zip(before, after, strict=True)):
            if a != b:
                show_difference(a, b, f"{where}[{index}]")
    else:
        print(f"      {where}: {str(before)[:300]} -> {str(after)[:300]}")


if __name__ == "__main__":
    main()
