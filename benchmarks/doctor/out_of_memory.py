"""Explained out-of-memory errors: do they name what held the memory, and does their first change make it fit?

    python benchmarks/doctor/out_of_memory.py [NAME …]

Ten jobs of `zoo/` train two steps, 20 times each, under a limit of live bytes that one op exceeds: any op at
which a run without a limit reaches a new peak may be drawn. The explanation of the error is compared with a
recording of the same run (`brimful.doctor.Watch`), which knows of each block the op and the line that made it.
The first change that it proposes is then predicted (`bf.estimate`) against the limit, and run under the limit
where it is smaller micro-batches or a fused optimizer. With names, only these jobs run, each miss is shown, and
nothing is written.
"""

from __future__ import annotations

import gc
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import brimful as bf
from brimful.batches import tensors_in
from brimful.doctor import Watch
from brimful.execution.explained import Explanation
from brimful.memory.at_error import MemoryAtError, changes
from brimful.torch_utils.forward_lines import recorded_lines
from brimful.torch_utils.lines import shown_file
from brimful.trace import Category, EventKind, Trace
from machine import Rows
from zoo import ZOO, ZooModel

COMMAND = "python benchmarks/doctor/out_of_memory.py"
RESULT = "out_of_memory.json"
JOBS = (
    *("bert", "gpt2", "llama", "t5", "vit", "resnet-18", "unet", "vae", "lstm lm", "nn.TransformerEncoder"),
)
INJECTIONS = 20
STEPS = 2
LARGER = 4
"""How many times as many samples as the zoo's micro-batch: so that there is something to divide."""
OF_MODEL = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


class Limit(TorchDispatchMode):
    """Counts the bytes of live storages, and raises as CUDA does where an op exceeds a limit."""

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lines: dict[int, str] = {}
        """Lines of forward ops by the numbers of their autograd nodes."""
        self.peaks: list[int] = []
        """Live bytes at each op that reaches a new peak."""
        self.line = self.node = ""
        """Where it raised: for an op of backward, the line of its forward op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._count(tensor)
        if torch.is_grad_enabled():
            self._lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, _line())
        out = func(*args, **(kwargs or {}))
        before = self._live_bytes()
        for tensor in tensors_in(out):
            self._count(tensor)
        after = self._live_bytes()
        if after > max(self.peaks, default=0) and after > before:
            self.peaks.append(after)
        if after > self._limit_bytes:
            node = torch._C._current_autograd_node()
            self.node = "" if node is None else node.name()
            self.line = _line() if node is None else self._lines.get(node._sequence_nr(), "")
            self._limit_bytes = float("inf")
            del out, tensor, args, kwargs
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {after - before} bytes. GPU 0 has a total capacity of "
            )
        return out

    def begin_with(self, model: nn.Module) -> None:
        """Count what is there before the first op."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _live_bytes(self) -> int:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())


def _line() -> str:
    """The line that calls an op, outside of `Limit`."""
    frame: Any = sys._getframe(2)
    while frame is not None and not (name := shown_file(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{name}:{frame.f_lineno}" if frame is not None else ""


def built(job: bf.Job, *, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    assert callable(job.model)
    model: nn.Module = job.model()
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


def train(
    job: bf.Job, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int, parts: int = 1
) -> None:
    assert callable(job.batch)
    for _ in range(STEPS):
        batch = job.batch(samples)
        for part in range(parts):
            loss = job.loss(model, batch if parts == 1 else _part(batch, part, samples // parts))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _part(batch: Any, part: int, samples: int) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.narrow(0, part * samples, samples), batch)


@dataclass(frozen=True)
class Failure:
    """An error, what its explanation says, and what a recording of the run shows."""

    found: MemoryAtError
    limit: Limit
    trace: Trace
    of_model: dict[Category, list[torch.Tensor]]
    """Parameters and buffers, gradients, optimizer state."""


def injected(job: bf.Job, samples: int, limit_bytes: int) -> Failure:
    gc.collect()  # what other runs left is none of this one's
    limit, watch = Limit(limit_bytes), Watch()
    model, optimizer = built(job)
    limit.begin_with(model)
    try:
        with limit, watch, recorded_lines():
            try:
                train(job, model, optimizer, samples)
            except torch.OutOfMemoryError:  # without a name, which would hold what the error holds
                explanation = Explanation.of(cast(BaseException, sys.exc_info()[1]))
                raise
    except torch.OutOfMemoryError:
        assert explanation.found is not None, explanation.failure
        real = {
            Category.PARAMETERS: [*model.parameters(), *model.buffers()],
            Category.GRADIENTS: [each.grad for each in model.parameters() if each.grad is not None],
            Category.OPTIMIZER_STATE: [*tensors_in([*optimizer.state.values()])],
        }
        return Failure(explanation.found, limit, watch.evidence().trace, real)
    raise AssertionError("nothing exceeded the limit")


def held_in_truth(failure: Failure) -> dict[tuple[Category, str], int]:
    """Bytes by category, and by line where an op's line says more than the parameter's name.

    The recording knows a parameter from the first op on that reads it, gradients and state from the end of the
    first step on: what they really are is taken, and as much less of what it takes for temporaries.
    """
    trace = failure.trace
    live: dict[int, None] = {}
    for event in trace.events[:-1]:  # the last is what was asked for
        if event.kind is EventKind.ALLOCATE:
            live[event.storage] = None
        else:
            live.pop(event.storage, None)
    held: dict[tuple[Category, str], int] = defaultdict(int)
    for index in live:
        storage = trace.storages[index]
        line = "" if storage.op is None else trace.ops[storage.op].line
        held[_key(storage.category, line)] += storage.size_bytes
    for category, tensors in failure.of_model.items():
        storages = {each.untyped_storage()._cdata: each.nbytes for each in tensors}
        unknown, held[category, ""] = sum(storages.values()) - held[category, ""], sum(storages.values())
        for key in [
            key for key in held if key[0] is Category.TEMPORARIES and category is not Category.PARAMETERS
        ]:
            less = max(min(unknown, held[key]), 0)
            unknown, held[key] = unknown - less, held[key] - less
    return held


def held_as_named(found: MemoryAtError) -> dict[tuple[Category, str], int]:
    held: dict[tuple[Category, str], int] = defaultdict(int)
    for each in found.held:
        held[_key(each.category, each.line)] += each.held_bytes
    return held


def _key(category: Category, line: str) -> tuple[Category, str]:
    return category, "" if category in OF_MODEL or category is Category.INPUTS else line


def by_category(held: dict[tuple[Category, str], int]) -> Counter[Category]:
    found: Counter[Category] = Counter()
    for (category, _), size in held.items():
        found[category] += size
    return found


def fits(job: bf.Job, samples: int, change: str, limit_bytes: int) -> bool | None:
    """Whether a change is predicted to fit; None if it cannot be predicted on a CPU."""
    size, options = _size(samples, change), dict[str, Any]()
    if "activation checkpointing" in change:
        options["recompute"] = "all"
    if "fused=True" in change:
        options["optimizer_implementation"] = "fused"
    if "8 bits" in change:
        options["optimizer"] = "adamw8bit"
    try:
        estimate = bf.estimate(
            job,
            "cpu",
            micro_batch_size=size,
            gradient_accumulation_steps=samples // size,
            suggest=False,
            **({"optimizer": "adamw"} | options),
        )
    except bf.BrimfulError as error:
        print("not predicted:", change, type(error).__name__, str(error)[:200])
        return None
    return estimate.predicted_peak_allocated_bytes <= limit_bytes


def _size(samples: int, change: str) -> int:
    """The micro-batch of a change."""
    if (divided := re.search(r"micro-batches of (\d+)", change)) is not None:
        return int(divided[1])
    divided = re.search(r"micro-batches 1/(\d+) as large", change)
    return samples if divided is None else max(samples // int(divided[1]), 1)


def fits_in_a_run(job: bf.Job, samples: int, change: str, limit_bytes: int) -> bool | None:
    """Whether the steps stay within the limit with a change; None for those that take more than an argument."""
    if "activation checkpointing" in change or "8 bits" in change:
        return None
    limit = Limit(limit_bytes)
    model, optimizer = built(job, fused="fused=True" in change)
    limit.begin_with(model)
    try:
        with limit:
            train(job, model, optimizer, samples, samples // _size(samples, change))
    except torch.OutOfMemoryError:
        return False
    return True


def examined(case: ZooModel, *, shows: bool) -> list[dict[str, Any]]:
    job, samples = case.job(), case.micro_batch_size * LARGER
    free = Limit()
    model, optimizer = built(job)
    free.begin_with(model)
    with free:
        train(job, model, optimizer, samples)
    del model, optimizer
    draw = random.Random(case.name)
    peaks = draw.sample(free.peaks, min(INJECTIONS, len(free.peaks)))
    return [_row(case, job, samples, peak - 1, shows=shows) for peak in peaks]


def _row(case: ZooModel, job: bf.Job, samples: int, limit_bytes: int, *, shows: bool) -> dict[str, Any]:
    failure = injected(job, samples, limit_bytes)
    found, limit = failure.found, failure.limit
    truth, named = held_in_truth(failure), held_as_named(found)
    culprit, named_culprit = max(truth, key=truth.__getitem__), max(named, key=named.__getitem__)
    of_truth, of_named = by_category(truth), by_category(named)
    whole = sum(truth.values())
    off = sum(abs(of_truth[each] - of_named[each]) for each in Category) / 2
    proposed = changes(found)
    first = proposed.listed[0].change if proposed.listed else ""
    row = {
        "job": case.name,
        "phase": found.peak_phase.value,
        "limit_bytes": limit_bytes,
        "asked_line_is_right": found.line == limit.line,
        "culprit": [culprit[0].value, culprit[1]],
        "named": [named_culprit[0].value, named_culprit[1]],
        "category_is_right": of_truth.most_common(1)[0][0] is of_named.most_common(1)[0][0],
        "culprit_is_right": truth[named_culprit] == truth[culprit],  # several may hold as much
        "culprit_fraction": truth[culprit] / whole,
        "found_fraction": sum(named.values()) / whole,
        "wrong_category_fraction": off / whole,
        "first_change": first,
        "says_that_nothing_fits": proposed.lacking_bytes > 0,
        "first_change_fits": fits(job, samples, first, limit_bytes),
        "first_change_fits_in_a_run": fits_in_a_run(job, samples, first, limit_bytes),
    }
    is_wrong = (
        False in (row["first_change_fits"], row["first_change_fits_in_a_run"]) or row["says_that_nothing_fits"]
    )
    if shows and (is_wrong or not (row["culprit_is_right"] and row["asked_line_is_right"])):
        print(row)
        print("   asked:", found.line, found.peak_op, "| truth:", limit.line, limit.node)
        print("   truth:", sorted(((v, *k) for k, v in truth.items()), reverse=True)[:5])
        print("   named:", sorted(((v, *k) for k, v in named.items()), reverse=True)[:5])
        print("  ", [(each.change[:60], each.size_bytes) for each in proposed.listed], proposed.lacking_bytes)
    return row


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hopeless = [row for row in rows if row["says_that_nothing_fits"]]
    predicted = [
        row for row in rows if not row["says_that_nothing_fits"] and row["first_change_fits"] is not None
    ]
    return {
        "injections": len(rows),
        "jobs": len({row["job"] for row in rows}),
        "asked_line_right": sum(row["asked_line_is_right"] for row in rows),
        "category_right": sum(row["category_is_right"] for row in rows),
        "culprit_right": sum(row["culprit_is_right"] for row in rows),
        "first_change_predicted": len(predicted),
        "first_change_fits": sum(row["first_change_fits"] for row in predicted),
        "first_change_run": sum(row["first_change_fits_in_a_run"] is not None for row in predicted),
        "first_change_fits_in_a_run": sum(row["first_change_fits_in_a_run"] is True for row in predicted),
        "nothing_fits": len(hopeless),
        "nothing_fits_right": sum(row["first_change_fits"] is False for row in hopeless),
        "median_found_fraction": sorted(row["found_fraction"] for row in rows)[len(rows) // 2],
    }


def main(names: list[str]) -> None:
    rows = Rows(RESULT, COMMAND, "transformers")
    found = []
    for name in names or JOBS:
        (case,) = [each for each in ZOO if each.name == name]
        if rows.has(job=name) and not names:
            continue
        made = examined(case, shows=bool(names))
        found += made
        print(name, summary_of(made), flush=True)
        if not names:
            for row in made:
                rows.add(row)
    if not names:
        rows.keep({"summary": summary_of(rows.rows)})
        print(summary_of(rows.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
