"""Small Transformers `Trainer`s, and what they train to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LONGEST, SAMPLES = 97, 24, 40


class Texts(Dataset):
    """Random tokens of 6 to 24 each; the longest is the 29th."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(6, LONGEST, (samples,), generator=generator).tolist()
        lengths[28 % samples] = LONGEST
        self.texts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of texts, padded to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])

    ids, labels = padded("input_ids", 0), padded("labels", -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": labels.ne(-100).long()}


def gpt2(dropout: float = 0.1, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of `TrainingArguments`: 8 samples a step, quiet, on the CPU."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }


def trainer(
    folder: Path, model: nn.Module | None = None, *, kind: type[Trainer] = Trainer, **changes: Any
) -> Trainer:
    more = {name: changes.pop(name) for name in ("callbacks", "compute_loss_func") if name in changes}
    return kind(
        model=gpt2() if model is None else model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=Texts(),
        eval_dataset=Texts(10),
        data_collator=pad,
        **more,
    )


def train(own: Trainer) -> None:
    """Train with the same random numbers each time."""
    torch.manual_seed(0)
    own.train()


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def weights(trained: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trained.model.state_dict().items()}


class During(TrainerCallback):
    """Has a context in force during one optimizer step."""

    def __init__(self, step: int, context: Any) -> None:
        self._step = step
        self._context = context

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._context.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step + 1:
            self._context.__exit__(None, None, None)
