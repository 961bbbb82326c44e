"""Files that brimful wrote, and jobs, from which attacks start."""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attacks.process import Surroundings, call, command_line, fork

JOB = '''
"""Two jobs whose every step depends on random numbers of torch, NumPy and Python, on order and on buffers."""

import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import brimful as bf

FEATURES, SAMPLES, BATCH = 8, 64, 16
losses = 0


class Augmented(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        noise = 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return {"x": x + noise, "y": (x.sum() > 0).long()}


def network():
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2)
    )


def loss(model, batch):
    global losses
    is_real = model.training and type(batch["x"]) is torch.Tensor and batch["x"].device.type == "cpu"
    losses += is_real
    if is_real:
        time.sleep(float(os.environ.get("SLEEP_SECONDS", 0)))
        if losses == int(os.environ.get("STOP_AT", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job(workers: int = 0):
    def loader(shuffle):
        return DataLoader(Augmented(), batch_size=BATCH, shuffle=shuffle, num_workers=workers)

    return bf.Job(
        model=network,
        loss=loss,
        batch=lambda n: {"x": torch.randn(n, FEATURES), "y": torch.randint(2, (n,))},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=lambda: bf.Data(train=loader(True), validation=loader(False)),
        name="augmented",
    )


def plain():
    """Without randomness of its own: for files and arguments."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    samples = {"x": x, "y": (x.sum(1) > 0).long()}
    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, 2)),
        loss=loss,
        batch=samples,
        data=lambda: bf.Data(train=samples),
        name="plain",
    )
'''

ESTIMATE = ("estimate", "job.py:plain", "--micro-batch-size", "4")
EPOCHS = 3
STOPPED_AFTER = 8
"""Steps, of 12."""
OPTIONS = (
    *("--epochs", str(EPOCHS), "--save-every", "1", "--ema-decay", "0.9"),
    *("--schedule", "cosine", "--warmup", "0.1", "--max-gradient-norm", "1", "--patience", "50"),
)
"""Of every run: each makes a state of its own that a resumed run could get wrong."""


@dataclass(frozen=True, slots=False)
class Material:
    """Where the files are."""

    folder: Path

    @property
    def cache(self) -> Path:
        """XDG_CACHE_HOME with this machine's calibration."""
        return self.folder / "cache"

    @property
    def job(self) -> Path:
        """The file of the jobs."""
        return self.folder / "job.py"

    @property
    def plan(self) -> Path:
        """Of `job.py:job`, with its source."""
        return self.folder / "plan.json"

    @property
    def plain_plan(self) -> Path:
        """Of `job.py:plain`."""
        return self.folder / "plain.json"

    @property
    def trace(self) -> Path:
        """Of `job.py:plain`."""
        return self.folder / "trace.json"

    @property
    def stopped_run(self) -> Path:
        """Stopped by SIGTERM after two of three epochs."""
        return self.folder / "stopped"

    def whole_run(self, workers: int = 0) -> Path:
        """The same run, which nothing disturbed."""
        return self.folder / f"whole-{workers}"

    @property
    def bert(self) -> Path:
        """A tiny model that transformers saved."""
        return self.folder / "bert"

    @cached_property
    def run_seconds(self) -> float:
        """How long the undisturbed run took, resumed or not about."""
        return float(json.loads((self.folder / "seconds.json").read_text()))

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A folder that the first case which needs it fills, while others wait.

        Args:
            name: Of the folder.
            make: Fills it.
        """
        folder = self.folder / "once" / name
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                make(folder)
        return folder


def train(*more: str, run: str = "run", workers: int = 0) -> list[str]:
    """Arguments of a run by the plan."""
    return ["train", "job.py:job", "--set", f"workers={workers}", "--run-dir", run, *OPTIONS, *more]


def make(folder: Path) -> Material:
    """Let brimful write everything, in forks, and import here what they imported."""
    material = Material(folder)
    material.job.write_text(JOB)
    planning = ("--global-batch-size", "16", "--device", "cpu", "--output")
    _run(material, *ESTIMATE, "--device", "cpu", "--save-trace", "trace.json")
    _run(material, "plan", "job.py:job", *planning, "plan.json", "--split-batch-norm")
    _run(material, "plan", "job.py:plain", *planning, "plain.json")
    by_plan = ("--plan", "plan.json")
    _run(material, *train(*by_plan, run="whole-2", workers=2))
    begun = time.monotonic()
    _run(material, *train(*by_plan, run="whole-0"))
    (folder / "seconds.json").write_text(str(time.monotonic() - begun))
    _run(material, *train(*by_plan, run="stopped"), environment={"STOP_AT": str(STOPPED_AFTER)}, status=143)
    _in_fork(material, call(lambda: _save_bert(material.bert)))
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "forks of several threads may hang"
    return material


def _save_bert(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    config = transformers.BertConfig(vocab_size=len(words), num_hidden_layers=1, num_attention_heads=1, **sizes)
    transformers.BertModel(config).save_pretrained(folder)


def _run(material: Material, *arguments: str, **options: Any) -> None:
    _in_fork(material, command_line(*arguments), **options)


def _in_fork(
    material: Material,
    action: Callable[[], object],
    *,
    environment: dict[str, str] | None = None,
    status: int = 0,
) -> None:
    """Run something that must succeed; then import here what it imported, so that later forks need not."""
    imported = material.folder / "modules.json"

    def recorded() -> None:
        before = set(sys.modules)
        try:
            action()
        finally:
            new = [name for name in sys.modules if name not in before and not name.startswith("brimful_job_")]
            imported.write_text(json.dumps(new))

    ran = fork(
        recorded,
        Surroundings(
            folder=material.folder,
            environment={"XDG_CACHE_HOME": str(material.cache), **(environment or {})},
            out=material.folder / "out",
            err=material.folder / "err",
        ),
    ).wait(seconds=300)
    if ran.status != status:
        raise RuntimeError(f"brimful itself failed with status {ran.status}:\n{ran.out}\n{ran.err}")
    for name in json.loads(imported.read_text()):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
