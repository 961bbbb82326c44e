"""Arguments of another kind than a function takes, and plans of what a job was before it was changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

WRONG_ARGUMENT = "a wrong argument"
CHANGED_JOB = "a job that was changed after it was planned"
ENGINE = "what an engine of several ranks cannot train"
SAMPLES = 256


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)
        )
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def _batch(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 32), "y": torch.randint(0, 4, (samples,))}


def _job(**changes: Any) -> bf.Job:
    return bf.Job(**{"model": Blocks, "loss": _loss, "batch": _batch, "optimizer": "sgd"} | changes)


# Wrong arguments


def _refused(call: Callable[[], object], word: str) -> Verdict:
    try:
        made = call()
    except bf.errors.UsageError as error:
        if word not in str(error):
            raise WrongError(f"the error does not name {word}: {error}") from None
        return Verdict.REFUSED
    raise WrongError(f"accepted: {made!r:.100}")


def _accepted(call: Callable[[], object], expected: object) -> Verdict:
    found = call()
    if found != expected or type(found) is not type(expected):
        raise WrongError(f"{found!r}, not {expected!r}")
    return Verdict.RIGHT


def _fit(**options: Any) -> object:
    job = _job(data=lambda: bf.Data(train=_batch(8)))
    return bf.fit(job, bf.Settings(micro_batch_size=4), **{"steps": 1, "show_progress": False, **options})


def _plan(**options: Any) -> bf.Plan:
    return bf.plan(_job(), "T4", **{"global_batch_size": 8, **options})


def _applied(model: nn.Module, **options: Any) -> object:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bf.apply(bf.Settings(micro_batch_size=4), _job(), model, optimizer, **options)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "text permits what changes the mathematics": (lambda: _plan(split_batch_norm="no"), "split_batch_norm"),
    "text as recover": (lambda: _applied(Blocks(), recover="never"), "recover"),
    "text as resume": (lambda: _fit(resume="no", run_dir="run"), "resume"),
    "a list as job_calibration": (lambda: _plan(job_calibration=[1, 2]), "job_calibration"),
    "an object as optimizer of settings": (
        lambda: bf.Settings(micro_batch_size=1, optimizer=torch.optim.SGD),  # type: ignore[arg-type]
        "optimizer",
    ),
    "a number as chunked loss": (
        lambda: bf.Settings(micro_batch_size=1, chunked_loss=4),  # type: ignore[arg-type]
        "chunked_loss",
    ),
    "text as units": (lambda: bf.Settings(micro_batch_size=1, units="all"), "units"),  # type: ignore[arg-type]
    "NaN as samples": (lambda: _plan(global_batch_size=float("nan")), "global_batch_size"),
    "NaN as norm": (lambda: _fit(max_gradient_norm=float("nan")), "max_gradient_norm"),
    "text as ranks": (lambda: _plan(world_size="2"), "world_size"),
    "a number as schedule": (lambda: _fit(schedule=0.1), "schedule"),
    "measured as estimated": (
        lambda: bf.measure(_job(), "cpu", micro_batch_size=4),  # type: ignore[call-arg]
        "micro_batch_size",
    ),
    "one GPU as a number": (
        lambda: bf.gpus(_job(), global_batch_size=4, devices=3090),  # type: ignore[arg-type]
        "devices",
    ),
    "none as allocator": (
        lambda: bf.estimate(_job(), "T4", allocator=None),  # type: ignore[arg-type]
        "allocator",
    ),
    "the class of a device": (lambda: bf.estimate(_job(), bf.devices.Device), "device"),  # type: ignore[arg-type]
}
"""What is refused, by an error that names the argument."""

RIGHT: dict[str, tuple[Callable[[], object], object]] = {
    "NumPy's whole numbers": (lambda: bf.Settings(micro_batch_size=np.int64(4)).micro_batch_size, 4),
    "NumPy's truth values": (
        lambda: bf.Settings(micro_batch_size=1, expandable_segments=np.True_).expandable_segments,
        True,
    ),
    "a whole batch of NumPy": (lambda: _plan(global_batch_size=np.int32(8)).settings.global_batch_size, 8),
    "a list of units": (
        lambda: (
            bf.Settings(
                micro_batch_size=1, units=[bf.settings.UnitAction(fqn="a", action=bf.settings.Action.RECOMPUTE)]
            ).recomputed
        ),
        ("a",),
    ),
    "a dtype as precision": (
        lambda: bf.Settings(micro_batch_size=1, precision=torch.bfloat16).precision,  # type: ignore[arg-type]
        bf.settings.Precision.BF16,
    ),
    "a set of optimizers": (lambda: len(_plan(allow_optimizers={"adamw"}).asked.allow_optimizers), 1),
    "a torch device": (
        lambda: type(bf.measure(_job(), bf.Settings(micro_batch_size=2), torch.device("cpu"))).__name__,
        "Measurement",
    ),
    "a path of a run": (lambda: len(_fit(run_dir=Path("run"))[0].steps), 1),  # type: ignore[index]
    "a callback by its methods alone": (lambda: len(_fit(callbacks=[_Counts()])[0].steps), 1),  # type: ignore[index]
}
"""What may not be refused, and what it comes to."""


class _Counts:
    def on_step(self, *_given: object) -> None:
        """Called after each step."""

    on_validation = on_end = on_step


# Engines


def _engine(parallelism: str, optimizer: str = "adamw", precision: str = "fp32") -> Verdict:
    try:
        found = bf.plan(
            _job(optimizer=optimizer), "A100 80GB SXM", global_batch_size=8, world_size=2,
            precision=precision, parallelism=parallelism,
        )  # fmt: skip
    except bf.errors.UsageError as error:
        text = str(error)
        if "not trained under" in text or "cannot be trained under" in text:
            return Verdict.REFUSED
        raise
    if parallelism == "auto" or "bf16" in precision:
        return Verdict.RIGHT
    raise WrongError(found.settings.describe())


ENGINES = {
    "fp16 under FSDP2": partial(_engine, "fsdp2", precision="fp16"),
    "fp16 under ZeRO 1": partial(_engine, "zero1", precision="fp16"),
    "fp16 under ZeRO 3": partial(_engine, "zero3", precision="fp16"),
    "8-bit AdamW under FSDP2": partial(_engine, "fsdp2", "adamw8bit"),
    "fp16 or bf16 under FSDP2": partial(_engine, "fsdp2", precision="fp16,bf16"),
    "fp16 under what is best": partial(_engine, "auto", precision="fp16"),
    "8-bit AdamW under what is best": partial(_engine, "auto", "adamw8bit"),
}


# Changed jobs

_PROGRAM = """
import os, torch, brimful as bf
from torch import nn
from torch.utils.checkpoint import checkpoint
SETTING = int(open("setting").read())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(32, 4)
    def forward(self, x):
        for block in self.blocks:
            <body>
        return self.out(x)
job = bf.Job(model=Net, loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), optimizer="sgd",
             batch=lambda n: {"x": torch.randn(n, 32), "y": torch.randint(0, 4, (n,))})
"""
BODIES = {
    "checkpoints from a size on": (
        "x = checkpoint(block, x, use_reentrant=False) if len(x) > SETTING else block(x)", 0, SAMPLES - 1,
    ),
    "copies in small batches": ("x = block(x) + (x.repeat(SETTING, 1)[:len(x)] if len(x) < 200 else x)", 1, 64),
    "widens small batches": (
        "x = block(x) if len(x) >= 200 else block(x) + x.repeat(1, SETTING).exp()[:, :32]", 1, 64,
    ),
    "keeps more in half precision": (
        "x = block(x) + (x.repeat(1, SETTING).exp()[:, :32] if torch.is_autocast_enabled('cpu') else x)", 1, 64,
    ),
    "float64 in small batches": (
        "x = block(x) if len(x) > 199 or SETTING < 1 else (block(x).double() * x.double().exp()).float()", 0, 1,
    ),
}  # fmt: skip
"""What a block does, with a number that a file has: before and after the file is changed."""


def _changed(body: str, before: int, after: int) -> Verdict:
    """After the change, the command plans as in a folder in which nothing was planned before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(_PROGRAM.replace("<body>", body))
        command = [
            *(sys.executable, "-m", "brimful", "plan", "job.py:job", "--device", "T4", "--json"),
            *("--global-batch-size", str(SAMPLES), "--budget", "100%", "--recompute", "none"),
            *("--micro-batch-size", "64", "--precision", "bf16,fp32" if "autocast" in body else "fp32"),
        ]  # fmt: skip

        def planned(setting: int, cache: str) -> str:
            (folder / "setting").write_text(str(setting))
            done = subprocess.run(
                command, cwd=folder, env=os.environ | {"XDG_CACHE_HOME": str(folder / cache)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            return done.stdout

        planned(before, "used")
        again, alone = planned(after, "used"), planned(after, "new")
    if not alone.strip():
        raise RuntimeError("the command printed nothing")
    if again != alone:
        raise WrongError("the plan is that of the code before")
    return Verdict.RIGHT


CASES = (
    *(Case(WRONG_ARGUMENT, name, partial(_refused, *each)) for name, each in WRONG.items()),
    *(Case(WRONG_ARGUMENT, f"control: {name}", partial(_accepted, *each)) for name, each in RIGHT.items()),
    *(Case(ENGINE, name, run) for name, run in ENGINES.items()),
    *(Case(CHANGED_JOB, name, partial(_changed, *each)) for name, each in BODIES.items()),
)
