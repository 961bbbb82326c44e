"""PyTorch's own planner, `torch.distributed._tools.sac_ilp.sac_milp`, as a peer.

    pip install pulp pwlf

How it is done, tool by tool, on torch 2.13:

1. `MemTracker` (forward and backward), `RuntimeEstimator` (the same) and `SACEstimator` (forward) run the job
   on fake tensors inside a capture, so that they see the ops of the device: its kernels of attention and
   dropout, its casts. The optimizer has its state, as in the tool's own tests; where the batch is split,
   parameters hold gradients already, as from the second micro-batch on.
2. Their cost model asks the GPU of this machine for its rates and fails without one. It is replaced by
   `brimful.cost`, so both sides price ops alike.
3. The tool stops with an error where a module is called twice in a step (a shared dropout), where a forward
   makes a module of its own (Transformers' loss), where what a module returns needs no gradient (rotary
   embeddings), and where a module has nothing to discard (one linear layer inside). It is helped over all four:
   modules are kept alive, those without a gradient are left out, its order of modules is cut to the first calls
   of those it knows, and modules with nothing to discard are not checkpointed.
4. `sac_milp` is given the budget less what its formula leaves out and a user can know: the CUDA context, the
   batch, and the buffers and optimizer state that `MemTracker` reports. Parameters, gradients and activations
   have to fit the rest, as it counts them.
5. It decides which modules to checkpoint and what fraction of each to discard. Which ops that means is decided
   by its second step, `get_optimal_checkpointing_policy_per_module`. A module is then recomputed with the
   results of these ops saved, by the code that applies plans; casts, views and clones cannot be saved by it and
   are recomputed. What comes out is captured: its peak and time are those of the choice, not what the tool
   says.

It decides at a given micro-batch. Two peers come of it: one trains the whole batch at once, one takes the
largest micro-batch for which the tool finds a solution. Its own limits stand, a gap of 5 % and 180 seconds,
which are taken for processor time, so that other programs do not matter. Its fit of each module's curve is a
random search: with other seeds it decides otherwise.
"""

from __future__ import annotations

import io
import logging
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from brimful.batches import map_tensors, tensors_in
from brimful.capture import capture_step
from brimful.capture.recording.recorder import Recorder
from brimful.cost import Roofline
from brimful.execution.precision import autocast
from brimful.job import Batch
from brimful.optimizers import make_optimizer
from brimful.quantities import GIB
from brimful.settings import Action, Settings, UnitAction
from brimful.transforms.selective import _describe
from plan.bench import Bench, Failure, Outcome

LEFT_OUT = (_MemRefType.OPT, _MemRefType.BUFFER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the three tools say of a job at one micro-batch."""

    graph: Callable[[], Graph]
    """Anew each time, as `sac_milp` writes into it."""
    sac: SACEstimator
    left_out_bytes: int
    seconds: float
    """What they took."""


class SacMilp:
    """The tool on one bench; statistics are made once for each micro-batch.

    Args:
        bench: Its job, device, precision and optimizer.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._statistics: dict[int, Statistics] = {}
        self._policies: dict[Any, list[int]] = {}
        self._at = cache(self._decided)

    def whole_batch(self, budget_bytes: int) -> Outcome | Failure:
        """What it decides for the whole batch at once."""
        return self._at(self._bench.sizes[0], budget_bytes)

    def largest_micro_batch(self, budget_bytes: int) -> Outcome | Failure:
        """What it decides for the largest micro-batch at which it finds anything."""
        for size in self._bench.sizes:
            found = self._at(size, budget_bytes)
            if isinstance(found, Outcome):
                return found
        return found

    def _decided(self, size: int, budget_bytes: int) -> Outcome | Failure:
        try:
            if size not in self._statistics:
                self._statistics[size] = self._measured(size)
            statistics = self._statistics[size]
            graph = statistics.graph()
            left_bytes = budget_bytes - statistics.left_out_bytes
            if left_bytes <= 0:
                return Failure(why=f"micro-batch {size}: nothing is left of the budget")
            began = time.perf_counter()
            decisions, says_bytes, complaint = _solved(graph, left_bytes)
            seconds = time.perf_counter() - began
            if says_bytes < 0:
                return Failure(why=f"micro-batch {size}: {complaint}")
            actions = tuple(
                self._action(statistics.sac, name, fraction) for name, fraction in decisions.items()
            )
            settings = replace(self._bench.plain.with_micro_batch_size(size), units=actions)
            return self._bench.outcome(
                settings,
                says_peak_device_bytes=says_bytes + statistics.left_out_bytes,
                statistics_seconds=round(statistics.seconds, 2),
                solver_seconds=round(seconds, 2),
            )
        except Exception as error:  # whatever a tool of others raises is what it has to say
            return Failure(why=f"micro-batch {size}: {_told_shortly(error)}")

    def _measured(self, size: int) -> Statistics:
        bench = self._bench
        settings = bench.plain.with_micro_batch_size(size)
        found: list[Statistics] = []

        def loop(model: nn.Module, batches: Iterable[Batch]) -> None:
            for batch in batches:
                found.append(_statistics(bench, settings, model, batch))
                return

        capture_step(replace(bench.job, loop=loop), settings, bench.device, steps=1)
        return found[0]

    def _action(self, sac: SACEstimator, name: str, discarded: float) -> UnitAction:
        """A decision as ours: the module's path without the model's class, and the ops that it saves."""
        fqn = name.partition(".")[2]
        saved = () if discarded >= 1 else tuple(self._saved(sac, name, discarded))
        return UnitAction(fqn=fqn, action=Action.SAVE if saved else Action.RECOMPUTE, saved=saved)

    def _saved(self, sac: SACEstimator, name: str, discarded: float) -> Iterable[str]:
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

        stats = sac.sac_mod_stats[name]
        key = (tuple(stats.runtimes), tuple(stats.memory), tuple(stats.inplace_ops), round(discarded, 4))
        if key not in self._policies:
            with _limits_in_processor_time():
                self._policies[key] = get_optimal_checkpointing_policy_per_module(stats, 1 - discarded)
        policy = iter(self._policies[key])
        seen: Counter[str] = Counter()
        for op in sac._sac_mod_metadata[name].sac_metadata:
            is_saved = op.func not in OPS_TO_ALWAYS_SKIP and bool(next(policy, 0))
            info = _describe(op.func)
            if info.is_view or not info.is_counted:
                continue
            if is_saved and not info.writes:
                yield f"{info.kind}#{seen[info.kind]}"
            seen[info.kind] += 1


def _solved(graph: Graph, left_bytes: int) -> tuple[dict[str, float], int, str]:
    """What `sac_milp` says: fractions to discard by module, its peak or -1, and why it found nothing."""
    from torch.distributed._tools import sac_ilp

    said: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(sac_ilp.__name__)
    logger.addHandler(listener)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        with _limits_in_processor_time():
            decisions, _milliseconds, says_bytes = sac_ilp.sac_milp(graph, left_bytes / GIB)
    finally:
        logger.removeHandler(listener)
    return decisions, says_bytes, "; ".join(said)


@contextmanager
def _limits_in_processor_time() -> Iterator[None]:
    from torch.distributed._tools import sac_ilp

    solver = sac_ilp.PULP_CBC_CMD
    sac_ilp.PULP_CBC_CMD = partial(solver, timeMode="cpu")
    try:
        yield
    finally:
        sac_ilp.PULP_CBC_CMD = solver


def _statistics(bench: Bench, settings: Settings, model: nn.Module, host_batch: Batch) -> Statistics:
    """Run the three tools on a model and batch of fake tensors."""
    began = time.perf_counter()
    batch = map_tensors(host_batch, lambda tensor: tensor.to("cuda" if bench.device.kind == "cuda" else "cpu"))
    optimizer = make_optimizer(bench.job, model.parameters(), settings)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    if settings.gradient_accumulation_steps == 1:
        optimizer.zero_grad(set_to_none=True)

    def forward() -> torch.Tensor:
        with autocast(model, settings.precision):
            return bench.job.loss(model, batch)

    memory, runtime, sac = MemTracker(), RuntimeEstimator(), _FittingEstimator()
    price = _priced(Roofline(bench.device, settings.precision))
    with _quiet(), _modules_kept_alive():
        memory.track_external(model, optimizer)
        device = next(model.parameters()).device
        with memory:
            there = memory.get_tracker_snapshot()[device]
            forward().backward()
        with runtime("operator-level-cost-model"):
            runtime._estimate = price
            forward().backward()
        with sac("operator-level-cost-model"):
            sac._estimate_runtime = price
            forward()
        for module, stats in list(memory.memory_tracking.items()):
            if _ModState.PRE_BW not in stats.snapshots:
                del memory.memory_tracking[module]
        np.random.seed(0)  # its fit of two segments draws from here
        module_info = aggregate_stats(model, memory, runtime, sac, device)
        own = {stats["fqn"] for stats in module_info["mod_stats"]}
        for order, names in module_info["mod_order"].items():
            module_info["mod_order"][order] = [name for name in dict.fromkeys(names) if name in own]
        parse_module_info(module_info)  # raises here, once, where it cannot
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
    return Statistics(
        graph=lambda: parse_module_info(module_info),
        sac=sac,
        left_out_bytes=bench.device.context_bytes + batch_bytes + sum(there[kind] for kind in LEFT_OUT),
        seconds=time.perf_counter() - began,
    )


class _FittingEstimator(SACEstimator):
    """Leaves out modules whose curve cannot be fitted, instead of dividing by zero."""

    def pwlf_sac_tradeoff_curve(self, n_segments: int = 2, save_tradeoff_graphs: bool = False) -> None:
        for name, stats in self.sac_mod_stats.items():
            with suppress(ZeroDivisionError):
                fitted = self._get_sac_tradeoff_pwlf_stats(
                    stats, self.sac_mod_greedy_order_meta[name], n_segments
                )
                if np.isfinite([*fitted.slopes, *fitted.intercepts]).all():
                    self.sac_mod_tradeoff_stats[name] = fitted


def _priced(roofline: Roofline) -> Callable[..., tuple[Any, float]]:
    """Runs an op and says what it takes, in milliseconds, by what the recorder below has seen of it."""

    def run(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        recorder = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder))
        before = len(recorder.ops)
        out = func(*args, **(kwargs or {}))
        return out, 1e3 * sum(map(roofline.op_seconds, recorder.ops[before:]))

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _modules_kept_alive() -> Iterator[None]:
    """Those that a forward makes and drops, such as a loss: the tool's hooks look for them in backward."""
    alive: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _inputs: alive.append(module))
    try:
        yield
    finally:
        handle.remove()


def _told_shortly(error: BaseException) -> str:
    """What was raised first, and where."""
    while error.__cause__ is not None:
        error = error.__cause__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if text else ''}{text} ({frame.name}, {Path(frame.filename).name})"
