"""Plans in the Trainers of Transformers and Lightning on a GPU: losses, peaks, and memory that runs out.

    PYTHONPATH=src python3 benchmarks/gpu/trainers.py --out DIR          # on a machine with an NVIDIA GPU
    PYTHONPATH=src python3 benchmarks/gpu/trainers.py --out DIR --dry    # the same code at toy size on a CPU

A GPT-2 trains on the same texts without brimful, under a plan that recomputes everything, and under a plan that
keeps everything where the GPU has 70 % of the memory that this takes, so that memory runs out for real.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import lightning  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

import brimful.integrations.lightning as bfl  # noqa: E402
import brimful.integrations.transformers as bft  # noqa: E402
from machine import commit, machine  # noqa: E402

STEPS, BATCH, RATE = 6, 8, 1e-4
LITTLE = 0.7
"""Of what training without brimful reserves."""
KEEPS = {"recompute": "none", "micro_batch_size": BATCH}
RECOMPUTES = {"recompute": "all", "micro_batch_size": BATCH}


class Texts(Dataset):
    """Random tokens."""

    def __init__(self, dry: bool) -> None:
        self.vocabulary, self.length = (256, 32) if dry else (8192, 512)
        shape = (STEPS * BATCH, self.length)
        self.tokens = torch.randint(self.vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def model_of(texts: Texts, dry: bool, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    width, layers = (64, 2) if dry else (768, 6)
    config = GPT2Config(
        vocab_size=texts.vocabulary,
        n_positions=texts.length,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config).train()


def with_transformers(dry: bool, options: dict[str, Any] | None, dropout: float) -> dict[str, Any]:
    texts = Texts(dry)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            use_cpu=dry,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
        )
        trainer = Trainer(model_of(texts, dry, dropout), arguments, train_dataset=texts)
        plan = applied = None
        if options is not None:
            plan = bft.plan(trainer, **options)
            applied = bft.apply(plan, trainer)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _found(losses, plan, applied)


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self._parts: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: dict[str, Tensor], _batch: Any, index: int) -> None:
        self._parts.append(float(outputs["loss"]))
        if (index + 1) % self.trainer.accumulate_grad_batches == 0:
            self.losses.append(sum(self._parts))
            self._parts = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE, fused=True)


def with_lightning(dry: bool, options: dict[str, Any] | None, dropout: float) -> dict[str, Any]:
    texts = Texts(dry)
    module, loader = Module(model_of(texts, dry, dropout)), DataLoader(texts, batch_size=BATCH)
    plan = callback = None
    more: dict[str, Any] = {}
    if options is not None:
        plan = bfl.plan(module, loader, **options)
        callback = bfl.PlanCallback(plan)
        more = {**bfl.trainer_options(plan), "callbacks": [callback]}
        loader = bfl.loader(plan, loader)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu" if dry else "gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **more,
        )
        trainer.fit(module, loader)
    return _found(module.losses, plan, callback)


def _found(losses: list[float], plan: Any, applied: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": losses}
    if torch.cuda.is_available():
        found["measured_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["measured_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if plan is not None:
        found["settings"] = plan.settings.describe()
        found["predicted_peak_allocated_bytes"] = plan.predicted_peak_allocated_bytes
        found["predicted_peak_reserved_bytes"] = plan.predicted_peak_reserved_bytes
        found["recoveries"] = [str(each) for each in getattr(applied, "recoveries", ())]
    return found


WAYS: dict[str, Callable[..., dict[str, Any]]] = {
    "Transformers Trainer": with_transformers,
    "Lightning Trainer": with_lightning,
}


def row_of(name: str, dry: bool) -> dict[str, Any]:
    """All runs of one framework, and how far their losses are apart."""
    device = {"device": "cpu" if dry else "cuda", "optimizer_implementation": "fused", "chunked_loss": False}
    if dry:
        device["budget"] = "4GiB"
    row: dict[str, Any] = {"framework": name}
    for way, options, dropout in (
        ("alone", None, 0.1),
        ("recomputed", RECOMPUTES, 0.1),
        ("alone, without dropout", None, 0.0),
        ("too little memory", KEEPS, 0.0),
    ):
        if way == "too little memory" and not dry:
            total = torch.cuda.get_device_properties(0).total_memory
            reserved = row["alone, without dropout"]["measured_peak_reserved_bytes"]
            torch.cuda.set_per_process_memory_fraction(LITTLE * reserved / total)
        try:
            row[way] = WAYS[name](dry, None if options is None else {**device, **options}, dropout)
        except Exception as error:
            traceback.print_exc()
            row[way] = {"error": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        if not dry:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for way, other in (("recomputed", "alone"), ("too little memory", "alone, without dropout")):
        pairs = zip(row[way].get("losses", ()), row[other].get("losses", ()), strict=False)
        differences = [abs(loss / expected - 1) for loss, expected in pairs]
        row[way]["largest_relative_difference_of_losses"] = max(differences, default=None)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for trainers.json")
    parser.add_argument("--dry", action="store_true", help="toy models on the CPU, to see that it runs")
    parser.add_argument("--commit", default="", help="what to note where there is no git")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    content: dict[str, Any] = {
        "command": " ".join(["benchmarks/gpu/trainers.py", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "machine": machine(),
        "device": "cpu" if options.dry else torch.cuda.get_device_name(0),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name in WAYS:
        row = row_of(name, options.dry)
        content["rows"].append(row)
        (options.out / "trainers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for way in ("recomputed", "too little memory"):
            print(name, way, {key: value for key, value in row[way].items() if key != "losses"})


if __name__ == "__main__":
    main()
