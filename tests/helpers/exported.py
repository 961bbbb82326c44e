"""A small language model, two steps of it by brimful, and by other tools that read a plan's export.

Run as a script, it trains under a launcher.
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
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

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
    made = bf.optimizers.named_optimizer(optimizer, learning_rate=LEARNING_RATE, weight_decay=0.0)(model)
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


class InOrder(Trainer):
    """Takes samples in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def by_transformers(file: str) -> tuple[TrainingArguments, list[float]]:
    """Arguments as they are read, and the loss of each step, with few digits."""
    (args,) = HfArgumentParser(TrainingArguments).parse_json_file(file)
    args.output_dir = str(Path(file).parent)
    args.report_to, args.save_strategy, args.disable_tqdm = [], "no", True
    args.learning_rate, args.lr_scheduler_type, args.max_grad_norm = LEARNING_RATE, "constant", 0.0
    args.max_steps, args.logging_steps = STEPS, 1
    labels = texts().index_fill(1, torch.tensor([0]), -100)  # not predicted; the Trainer divides by the others
    samples = [{"input_ids": text, "labels": label} for text, label in zip(texts(), labels, strict=True)]
    trainer = InOrder(model=gpt2(), args=args, train_dataset=samples)
    trainer.train()
    return args, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_lightning(file: str) -> list[float]:
    """The loss of each step, on these ranks."""
    import lightning
    import yaml

    options = yaml.safe_load(Path(file).read_text())
    losses: list[Tensor] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: Tensor) -> Tensor:
            losses.append(loss_of(self.model, batch))
            return losses[-1]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

        def train_dataloader(self) -> DataLoader:
            """In order; Lightning's own sampler for ranks shuffles."""
            sampler = DistributedSampler(texts(), shuffle=False) if dist.is_initialized() else None
            return DataLoader(texts(), batch_size=options["data"]["batch_size"], sampler=sampler)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(names, False)
    folder = Path(file).parent
    trainer = lightning.Trainer(**options["trainer"], max_steps=STEPS, default_root_dir=folder, **quiet)
    trainer.fit(Module())
    accumulation = options["trainer"]["accumulate_grad_batches"]
    return [mean_of_ranks(losses[i : i + accumulation]) for i in range(0, len(losses), accumulation)]


def main(tool: str, argument: str) -> None:
    """Train by a tool, and print the losses on the first rank."""
    if tool == "accelerate":
        losses = by_accelerate(int(argument))
    else:
        losses = by_lightning(argument) if tool == "lightning" else by_transformers(argument)[1]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    if dist.is_initialized():
        dist.barrier()  # gloo aborts a rank whose partner has ended
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
