"""A small language model, two steps of it by brimful, and by other tools that read a plan's export.

Run as a script, it trains under `accelerate launch`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import brimful as bf

VOCABULARY, LENGTH, GLOBAL_BATCH, STEPS, LEARNING_RATE = 97, 16, 8, 2, 1e-2


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def texts() -> Tensor:
    """Samples of all steps, in order."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def job(optimizer: str = "adamw") -> bf.Job:
    return bf.Job(
        model=gpt2,
        loss=loss_of,
        batch=lambda n: torch.zeros(n, LENGTH, dtype=torch.long),
        optimizer=optimizer,
        name="tiny",
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def by_brimful(settings: bf.Settings, optimizer: str = "adamw") -> list[float]:
    """The loss of each step, on one rank."""
    model = gpt2()
    made = bf.named_optimizer(optimizer, learning_rate=LEARNING_RATE, weight_decay=0.0)(model)
    step = bf.apply(settings, job(optimizer), model, made)
    return [float(step(batch).loss) for batch in texts().split(GLOBAL_BATCH)]


def rank_batches(micro_batch_size: int, accumulation: int) -> Iterator[list[Tensor]]:
    """This rank's micro-batches of each step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for batch in texts().split(micro_batch_size * accumulation * ranks):
        yield list(batch.chunk(ranks)[rank].split(micro_batch_size))


def mean_of_ranks(losses: list[Tensor]) -> float:
    mean = torch.stack(losses).detach().mean()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


def by_fully_shard(file: str) -> list[float]:
    """The loss of each step on these ranks, by the loader that the documentation shows."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options = json.loads(Path(file).read_text())
    model = gpt2()
    dtypes = {name: getattr(torch, dtype) for name, dtype in options["mp_policy"].items()}
    policies: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**dtypes)}
    if options["cpu_offload"]:
        policies["offload_policy"] = CPUOffloadPolicy()
    for path in options["modules"]:
        block = model.get_submodule(path)
        fully_shard(block, reshard_after_forward=options["reshard_after_forward"], **policies)
    fully_shard(model, **policies)
    optimizer = adamw(model)
    found = []
    for batches in rank_batches(options["micro_batch_size"], options["gradient_accumulation_steps"]):
        losses = []
        for batch in batches:
            dtype = options["autocast"]
            with torch.autocast("cpu", getattr(torch, dtype)) if dtype else nullcontext():
                losses.append(loss_of(model, batch))
            (losses[-1] / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean_of_ranks(losses))
    return found


def by_deepspeed(file: str) -> list[float]:
    """The loss of each step on these ranks."""
    from brimful.distributed.deepspeed import _deepspeed

    deepspeed = _deepspeed(torch.device("cpu"))
    warnings.simplefilter("ignore")  # its own
    options = json.loads(Path(file).read_text())
    model = gpt2()
    engine, *_others = deepspeed.initialize(model=model, optimizer=adamw(model), config=file)
    assert engine.train_batch_size() == GLOBAL_BATCH
    found = []
    for batches in rank_batches(
        options["train_micro_batch_size_per_gpu"], options["gradient_accumulation_steps"]
    ):
        losses = []
        for batch in batches:
            losses.append(loss_of(engine, batch))
            engine.backward(losses[-1])
            engine.step()
        found.append(mean_of_ranks(losses))
    engine.destroy()
    return found


def by_accelerate(micro_batch_size: int) -> list[float]:
    """The loss of each step of a script that `accelerate launch` runs."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = gpt2()
    loader = DataLoader(texts(), batch_size=micro_batch_size)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    found, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            losses.append(loss_of(model, batch))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(mean_of_ranks(losses))
            losses = []
    return found


if __name__ == "__main__":
    print(json.dumps(by_accelerate(int(sys.argv[1]))))
