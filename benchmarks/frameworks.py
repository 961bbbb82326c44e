"""Training with and without brimful in each framework: lines added, losses, peaks, overhead, out-of-memory.

    python benchmarks/frameworks.py

A GPT-2 of four layers trains on the same texts in the Trainer of Transformers, in Lightning's Trainer, with
Fabric, with Accelerate and in a loop of one's own (`framework_loops.py`), each without brimful and with it:

- **Lines added** are counted by difflib between the two functions.
- **Losses** of every step are compared, for a plan that keeps everything and one that only recomputes, with
  dropout; and for one that divides the batch by four, without dropout, which draws other numbers then.
- **Peaks** are the profiler's, of one step of the framework's own loop, beside the plan's prediction.
- **Overhead** is of the plan that keeps everything. A machine's speed drifts by more than is to be measured. So
  both loops, and the one without brimful once more, run in processes of their own, a step each in turn. A
  ratio is of two steps of the same turn, in time of the processor, which other processes lengthen less than the
  clock's; the latter is given beside. Each round has new processes, because how memory is laid out in a process
  changes its speed too.
- **Out-of-memory** is raised in place of one op of the third step, at 50 ops spread over it, one a run. The run
  must end with the losses and the weights of the undisturbed one, bit for bit.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import brimful as bf
from brimful.execution.host_allocator import keep_freed_memory
from brimful.execution.in_force import unwrapped
from brimful.profiling.peak import PeakMemory, peak_memory
from framework_loops import BATCH, FRAMEWORKS, NORM, RATE
from helpers.faults import OutOfMemoryAt
from machine import Rows

VOCABULARY, LENGTH, WIDTH, LAYERS = 512, 64, 192, 4
STEPS = 6
WATCHED = 2
"""The step, from 0, whose peak is measured and in which memory runs out."""
POINTS = 50
ROUNDS, TURNS, SKIPPED = 5, 24, 4
DRAWN = 2000
PLANS = {
    "keeps all": ({"recompute": "none", "micro_batch_size": BATCH}, 0.1),
    "recomputes all": ({"recompute": "all", "micro_batch_size": BATCH}, 0.1),
    "four micro-batches": ({"recompute": "none", "micro_batch_size": BATCH // 4}, 0.0),
}
"""Options of a plan, and the model's dropout."""
SAME = "the same losses and weights"
NO_MEMORY = ("profiler.",)
"""Ops that only name a range for the profiler."""
OWN_OPS = {"Transformers Trainer": ("aten.isnan", "aten.isinf", "aten._local_scalar_dense", "aten.add_.Tensor")}
"""Ops of one number each that a framework makes between the functions of a step, to report the loss."""


class Texts(Dataset):
    """Random tokens, all texts of one length."""

    def __init__(self, samples: int) -> None:
        shape = (samples, LENGTH)
        self.tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Run:
    """What a loop trains, and what is watched of it.

    Args:
        folder: For what a trainer writes.
        options: Of the plan.
        steps: How many there are.
        dropout: The model's.
        watched: Makes a context of model and optimizer, in which step `WATCHED` runs.
        ended: Called at the end of each step.
    """

    def __init__(
        self,
        folder: str,
        options: dict[str, Any],
        *,
        steps: int = STEPS,
        dropout: float = 0.1,
        watched: Callable[[nn.Module, Any], AbstractContextManager[Any]] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.texts = Texts(steps * BATCH)
        self.batch = self.texts[:BATCH]
        self.options = {
            "device": "cpu", "budget": "4GiB", "optimizer_implementation": "fused", "chunked_loss": False,
            **options,
        }  # fmt: skip
        self.arguments = {
            "output_dir": folder, "per_device_train_batch_size": BATCH, "num_train_epochs": 1,
            "learning_rate": RATE, "max_grad_norm": NORM, "lr_scheduler_type": "constant",
            "optim": "adamw_torch_fused", "use_cpu": True, "report_to": [], "disable_tqdm": True,
            "save_strategy": "no", "logging_steps": 1, "dataloader_pin_memory": False,
        }  # fmt: skip
        self.trainer_options = {
            "accelerator": "cpu", "devices": 1, "max_epochs": 1, "gradient_clip_val": NORM, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": folder,
        }  # fmt: skip
        self.losses: list[float] = []
        self.plan: bf.Plan | None = None
        self.recoveries: tuple[Any, ...] = ()
        self._dropout = dropout
        self._watched = watched
        self._ended = ended
        self._context = ExitStack()
        self._trained: nn.Module | None = None
        self._step = self._samples = 0
        self._parts: list[float] = []

    def model(self) -> nn.Module:
        """The model; the same weights each time, and the same random numbers after it."""
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4, bos_token_id=0,
            eos_token_id=0, use_cache=False, resid_pdrop=self._dropout, embd_pdrop=self._dropout,
            attn_pdrop=self._dropout,
        )  # fmt: skip
        return GPT2LMHeadModel(config).train()

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """A micro-batch begins."""
        self._trained = model
        if self._samples == 0 and self._step == WATCHED and self._watched is not None:
            self._context.enter_context(self._watched(model, unwrapped(optimizer)))

    def end(self, loss: Any, batch: dict[str, Tensor], *, scale: int = 1) -> None:
        """A micro-batch ends; its loss × `scale` is a mean, and None if the loop reports it otherwise."""
        samples = len(batch["labels"])
        self._samples += samples
        if self._samples == BATCH:
            self._context.close()
        if loss is not None:
            self._parts.append(float(torch.as_tensor(loss).detach()) * scale * samples / BATCH)
        if self._samples == BATCH:
            if self._parts:
                self.losses.append(sum(self._parts))
            self._samples, self._parts = 0, []
            self._step += 1
            self._ended()

    def results(self, plan: bf.Plan, applied: Any) -> None:
        """What a planned loop ended with."""
        self.plan = plan
        self.recoveries = tuple(getattr(applied, "recoveries", ()))

    def close(self) -> None:
        """End what is watched, if a step did not."""
        self._context.close()

    def weights(self) -> list[Tensor]:
        """Those that were trained."""
        assert self._trained is not None
        return [value.detach() for value in self._trained.state_dict().values()]

    def is_same(self, other: Run) -> bool:
        """Whether losses and weights are bit for bit those of another run."""
        same = [torch.equal(*both) for both in zip(self.weights(), other.weights(), strict=True)]
        return self.losses == other.losses and all(same)


def trained(loop: Callable[[Run], None], options: dict[str, Any] | None = None, **others: Any) -> Run:
    """Run a loop to its end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = Run(folder, options or {}, **others)
        try:
            loop(run)
        finally:
            run.close()
    return run


def lines_added(framework: str) -> dict[str, int]:
    """Lines of the planned loop that the other does not have, and lines that are replaced."""
    pair = FRAMEWORKS[framework]
    alone, planned = _lines(pair.alone), _lines(pair.planned)
    added = changed = 0
    for kind, first, last, begin, end in difflib.SequenceMatcher(None, alone, planned, False).get_opcodes():
        if kind != "equal":
            changed += min(last - first, end - begin)
            added += max(0, (end - begin) - (last - first))
    return {"lines": len(alone), "lines_added": added, "lines_changed": changed}


def _lines(loop: Callable[[Run], None]) -> list[str]:
    """The lines of a function's body, without those that only a benchmark has."""
    lines = [line.strip() for line in inspect.getsource(loop).splitlines()[1:]]
    return [
        line for line in lines if line and not line.startswith(("run.", "trainer.add_callback(TrainerWatch"))
    ]


def compared(framework: str, plan: str) -> dict[str, Any]:
    """Losses with and without brimful, and the peak of a step beside its prediction."""
    pair, (options, dropout) = FRAMEWORKS[framework], PLANS[plan]
    measured: list[PeakMemory] = []

    @contextlib.contextmanager
    def watched(model: nn.Module, optimizer: Any):
        with peak_memory(model, optimizer, "cpu") as peak:
            yield
        measured.append(peak)

    alone = trained(pair.alone, dropout=dropout)
    planned = trained(pair.planned, options, dropout=dropout)
    profiled = trained(pair.planned, options, dropout=dropout, watched=watched)
    assert planned.plan is not None
    (peak,) = measured
    predicted = planned.plan.predicted_peak_allocated_bytes
    differences = [abs(a - b) / abs(b) for a, b in zip(planned.losses, alone.losses, strict=True)]
    return {
        "plan": plan,
        "settings": planned.plan.settings.describe(),
        "steps": len(alone.losses),
        "is_bitwise": planned.is_same(alone),
        "largest_relative_loss_difference": max(differences),
        "predicted_peak_allocated_bytes": predicted,
        "measured_peak_allocated_bytes": peak.allocated_bytes,
        "peak_error_fraction": predicted / peak.allocated_bytes - 1,
        "profiled_is_same": profiled.is_same(planned),
    }


def faults(framework: str) -> dict[str, Any]:
    """Memory runs out at ops spread over a step, each in a process that is forked where the step begins."""
    loop, (options, dropout) = FRAMEWORKS[framework].planned, PLANS["recomputes all"]

    def run_with(watched: Callable[[], AbstractContextManager[Any]]) -> Run:
        return trained(
            loop, options, dropout=dropout, steps=WATCHED + 2, watched=lambda _model, _optimizer: watched()
        )

    calm, counted = run_with(contextlib.nullcontext), OutOfMemoryAt()
    assert run_with(lambda: counted).is_same(calm)
    others = (*NO_MEMORY, *OWN_OPS.get(framework, ()))
    places = [place for place, op in enumerate(counted.ops) if not op.startswith(others)]
    chosen = [places[round((len(places) - 1) * each / (POINTS - 1))] for each in range(POINTS)]
    outcomes: Counter[str] = Counter()
    mine: list[tuple[OutOfMemoryAt, Any]] = []  # of a forked process, its fault and where its outcome goes

    def fork_each() -> AbstractContextManager[Any]:
        for place in chosen:
            reading, writing = os.pipe()
            if (process := os.fork()) == 0:
                mine.append((OutOfMemoryAt(place), writing))
                return mine[0][0]
            os.close(writing)
            with os.fdopen(reading) as pipe:
                outcomes[pipe.read() or "the process died"] += 1
            os.waitpid(process, 0)
        return contextlib.nullcontext()

    outcome = ""
    try:
        ended = run_with(fork_each)
        outcome = SAME if ended.is_same(calm) else "other losses or weights"
        if mine:
            outcome = outcome if mine[0][0].raised == 1 else "memory did not run out"
    except Exception as error:
        if not mine:
            raise
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        if mine:
            os.write(mine[0][1], outcome.encode())
            os._exit(0)
    return {
        "ops": len(counted.ops),
        "points": POINTS,
        "survived_the_same": outcomes[SAME],
        "outcomes": dict(outcomes),
    }


WAYS = ("alone", "alone again", "planned")


def take_turns(framework: str, way: str, connection: Connection) -> None:
    """Train in a process of its own, a step each time that it is its turn."""
    began = [0.0, 0.0]

    def ended() -> None:
        connection.send((time.process_time() - began[0], time.perf_counter() - began[1]))
        connection.recv()
        began[:] = time.process_time(), time.perf_counter()

    pair, (options, dropout) = FRAMEWORKS[framework], PLANS["keeps all"]
    loop = pair.planned if way == "planned" else pair.alone
    trained(loop, options, dropout=dropout, steps=TURNS + SKIPPED + 2, ended=ended)


def round_of(framework: str, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Of each way, its steps turn by turn, the first ones left out: time of the processor and of the clock."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    order, forking = random.Random(seed), multiprocessing.get_context("fork")
    with ExitStack() as stack:
        connections: dict[str, Connection] = {}
        for way in WAYS:
            connections[way], theirs = forking.Pipe()
            process = forking.Process(target=take_turns, args=(framework, way, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed here
            stack.callback(process.kill)
        for way in WAYS:
            connections[way].recv()  # its first step, which none waits for
        for _turn in range(TURNS + SKIPPED):
            for way in order.sample(WAYS, len(WAYS)):
                connections[way].send(None)
                found[way].append(connections[way].recv())
    return {way: steps[SKIPPED:] for way, steps in found.items()}


def ratios(found: dict[str, list[tuple[float, float]]], way: str) -> dict[str, float]:
    """Medians of a way's ratios to the loop alone in the same turn, less 1."""
    both = list(zip(found[way], found["alone"], strict=True))
    return {
        "processor": statistics.median(mine[0] / other[0] for mine, other in both) - 1,
        "clock": statistics.median(mine[1] / other[1] for mine, other in both) - 1,
    }


def overhead(framework: str) -> dict[str, Any]:
    """What brimful adds to a step, by a plan that changes nothing."""
    rounds = [round_of(framework, seed) for seed in range(ROUNDS)]
    planned, again = ([ratios(each, way) for each in rounds] for way in ("planned", "alone again"))
    return {
        "step_seconds": statistics.median(clock for each in rounds for _, clock in each["alone"]),
        "step_processor_seconds": statistics.median(own for each in rounds for own, _ in each["alone"]),
        "overhead_by_round": planned,
        "overhead_fraction": statistics.median(each["processor"] for each in planned),
        "overhead_fraction_by_clock": statistics.median(each["clock"] for each in planned),
        "noise_by_round": again,
        "noise_fraction": statistics.median(each["processor"] for each in again),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all frameworks in each respect."""
    runs = [run for row in rows for run in row["runs"]]
    scheduled = [run for run in runs if run["plan"] != "four micro-batches"]
    divided = [run for run in runs if run["plan"] == "four micro-batches"]
    return {
        "frameworks": len(rows),
        "most_lines_added": max(row["lines_added"] for row in rows),
        "bitwise": sum(run["is_bitwise"] for run in scheduled),
        "bitwise_of": len(scheduled),
        "largest_relative_loss_difference_divided": max(
            run["largest_relative_loss_difference"] for run in divided
        ),
        "largest_peak_error_fraction": max(abs(run["peak_error_fraction"]) for run in runs),
        "largest_overhead_fraction": max(row["overhead_fraction"] for row in rows),
        "out_of_memory_points": sum(row["out_of_memory"]["points"] for row in rows),
        "out_of_memory_survived": sum(row["out_of_memory"]["survived_the_same"] for row in rows),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    keep_freed_memory()  # with brimful and without
    packages = ("transformers", "lightning", "accelerate")
    rows = Rows("frameworks.json", "python benchmarks/frameworks.py", *packages)
    for framework in FRAMEWORKS:
        if rows.has(framework=framework):
            continue
        row: dict[str, Any] = {"framework": framework, **lines_added(framework)}
        row |= {"runs": [compared(framework, plan) for plan in PLANS]}
        row |= {"out_of_memory": faults(framework), **overhead(framework)}
        rows.add(row)
        print(json.dumps(row, indent=1), flush=True)
    rows.keep({"summary": summary(rows.rows)})


if __name__ == "__main__":
    main()
